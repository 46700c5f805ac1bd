"""RequestRecord: what the scheduler itself knows of a request (`Request.scheduling`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.scheduling.radix_tree import Place

if TYPE_CHECKING:
    from runtime.scheduling.radix_tree import Node


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The scheduler's own per-request data.

    Args:
        seq: order of arrival; kept over retractions. -1: not taken yet.
        stop_ids: tokens that end it, EOS ids included unless it ignores them.
        key: bytes of the token ids to prefill, input and committed outputs.
        arrival_clocks: totals of the wait clocks when it began to wait.
        arrival_tokens: tokens the server had computed when it arrived (hrrn).
        waiting_since_s: when it arrived or was retracted; started_s: when it was last admitted.
        place: how far it is cached, as of the last look.
        node: end of its locked prefix in the radix cache.
        tree_tokens: leading tokens whose pages belong to the radix cache.
        matched_tokens: leading tokens whose KV it found in the cache and did not compute itself.
        target: tokens to have KV before it can sample: input and outputs at admission.
        synced_pages: leading entries of its table row that the device has or will get.
        last_step: last launched step that names it.
        admissions: times it was admitted; a retracted one is admitted again.
        passed_over_s: when a later arrival was first admitted before it.
        waited: seconds waited per blocking term, of waits that are over.
        own_reason: its blocking term in the last pass where that was not the whole queue's.
    """

    seq: int = -1
    stop_ids: frozenset[int] = frozenset()
    key: bytes = b""
    arrival_clocks: tuple[float, ...] = ()
    arrival_tokens: int = 0
    waiting_since_s: float = 0.0
    started_s: float | None = None
    place: Place = field(default_factory=Place)
    node: Node | None = None
    tree_tokens: int = 0
    matched_tokens: int = 0
    target: int = 0
    synced_pages: int = 0
    last_step: int = -1
    passed_over_s: float | None = None
    waited: list[float] = field(default_factory=list)
    own_reason: str = ""
    admissions: int = 0


def kv_need(extend_tokens: int, output_tokens: int, page_size: int) -> int:
    """KV tokens that a request is taken to need: what it computes, its outputs, and a page, since
    an extend can open one more.

    The one bound of intake and admission: a pool fits it with *more* available tokens than that.
    Intake asks it with the whole input in whole pages and all outputs, so that what it lets in is
    admitted once nobody else is left.
    """
    return extend_tokens + output_tokens + page_size
