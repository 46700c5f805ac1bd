"""Plan: what one pass of the scheduler decided, for the loop around it to carry out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import RequestOutput
    from runtime.scheduling.kv_tier import PageLoad
    from runtime.scheduling.schedule_batch import ScheduleBatch
    from runtime.scheduling.write_behind import PageCopy


@dataclass(slots=True)
class Plan:
    """What a pass decided.

    Args:
        batch: the step to launch, to be committed or failed later; None: nothing to launch.
        reason: without a batch: "idle", "wait_commit" (commit the step in flight, then plan
            again), or the term that blocks the queue.
        ended: last outputs of requests that ended in this pass (aborted, timed out, impossible to
            go on with).
        grammars_ready: ids of requests that entered the queue since their grammar is compiled.
        copies, loads: to and from the tier below the pool, to be begun at once, whether or not
            there is a batch; `stored` and `loaded` are to be told of their ends.
    """

    batch: ScheduleBatch | None = None
    reason: str = ""
    ended: list[RequestOutput] = field(default_factory=list)
    grammars_ready: list[str] = field(default_factory=list)
    copies: Sequence[PageCopy] = ()
    loads: Sequence[PageLoad] = ()
