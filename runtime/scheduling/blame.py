"""Whose fault it is that a row gives no number, and what of it leaves the cache.

The next token of a prompt may not be a number because of the prompt, or because of KV that it has
read: a prompt that is cut, and whose client leaves before the end, stays in the cache in part, and
nobody has seen whether that is numbers. So who has read from the cache is not blamed before it has
been computed once more, alone: reading nothing that others have computed, sharing nothing.

- Again no number: it ends with the error. What it had read stays, so that a client who sends such
  prompts on purpose pays for both tries and costs nobody the prefix that he shares with them.
- A number: its prompt takes the place of what is cached of the same tokens, and who reads that
  starts anew. What a request reads that has given tokens since stays: those tokens are the proof
  that it is numbers.

So a token costs a request one more try at most. What a prompt without a number has computed itself
leaves the cache at once, and so does what hangs below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request
    from runtime.runner import StepOutput
    from runtime.scheduling.lifecycle import Lifecycle
    from runtime.scheduling.schedule_batch import ScheduleBatch


def prompts_without_number(batch: ScheduleBatch, output: StepOutput) -> list[Request]:
    """Whose prompt a step completes, and gives no token for."""
    rows = [batch.sampled[index] for index in output.failed]
    return [batch.requests[row] for row in rows if row < batch.num_prefill]


def give_second_chances(prompts: Sequence[Request], void: Sequence[Request]) -> list[Request]:
    """Marks those of these prompts that are to be computed alone; returns them.

    Args:
        void: requests that start anew anyway.
    """
    chosen = [
        request
        for request in prompts
        if request.scheduling.borrows  # not where it is alone
        and not (request.finish or request.ending or request in void)
    ]
    for request in chosen:
        request.scheduling.alone = True
    return chosen


def drop_computed(prompts: Sequence[Request], life: Lifecycle) -> None:
    """Takes what these prompts have computed out of the cache, those that have left included."""
    for request in prompts:
        record = request.scheduling
        if not life.memory.is_lost(request):
            life.memory.drop(request, record.matched_tokens, record.tree_tokens, _proven(life))


def acquit(batch: ScheduleBatch, life: Lifecycle) -> bool:
    """Where a request gives a number now that it has been computed alone, its prompt takes the
    place of what is cached of the same tokens; returns whether any does."""
    acquitted = [
        request
        for request in batch.requests[: batch.num_prefill]
        if request.scheduling.alone and request.new_tokens
    ]
    for request in acquitted:
        request.scheduling.alone = False
        life.memory.drop(request, 0, request.scheduling.target, _proven(life))
    for request in acquitted:
        life.memory.insert(request, request.scheduling.target)
    return bool(acquitted)


def _proven(life: Lifecycle) -> list[Request]:
    """Requests that have had a token from all that they have in the cache. The first one may be
    older than the last of that: pages give way to the cache's as their step is launched."""
    return [r for r in life.live.values() if r.row >= 0 and r.new_tokens > r.scheduling.borrows]
