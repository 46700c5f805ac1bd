"""Rows whose logits hold a NaN: which prompts are retried in isolation, and what leaves the cache.

The logits of a prompt's last token may be NaN because of the prompt, or because of KV that it has
read: a prompt that is cut, and whose client leaves before the end, stays in the cache in part, and
nobody has seen whether that KV is finite. So a prompt that has read from the cache is only a
suspect until it has been computed once more in isolation: reading nothing that others have
computed, sharing nothing.

- NaN again: it ends with the error. What it had read stays, so that a client who sends such
  prompts on purpose pays for both tries, and no other client loses a prefix that it shares.
- A token: its prompt takes the place of what is cached of the same tokens, and who reads that
  starts anew. What a request reads that has given tokens since stays: those tokens show that it
  is finite.

So a token costs a request one more try at most. What a failed prompt has computed itself leaves the
cache at once, and so does what hangs below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request
    from runtime.runner import StepOutput
    from runtime.scheduling.lifecycle import Lifecycle
    from runtime.scheduling.schedule_batch import ScheduleBatch


def failed_prompts(batch: ScheduleBatch, output: StepOutput) -> list[Request]:
    """The requests whose prompt a step completes without giving a token."""
    rows = [batch.sampled[index] for index in output.failed]
    return [batch.requests[row] for row in rows if row < batch.num_prefill]


def mark_for_isolated_retry(prompts: Sequence[Request], void: Sequence[Request]) -> list[Request]:
    """Marks those of these prompts that are to be computed in isolation; returns them.

    Args:
        void: requests that start anew anyway.
    """
    chosen = [
        request
        for request in prompts
        if request.scheduling.borrows  # not where it is isolated
        and not (request.finish or request.ending or request in void)
    ]
    for request in chosen:
        request.scheduling.isolated = True
    return chosen


def drop_computed(prompts: Sequence[Request], life: Lifecycle) -> None:
    """Takes what these prompts have computed out of the cache, those that have left included."""
    for request in prompts:
        record = request.scheduling
        if not life.memory.is_lost(request):
            life.memory.drop(request, record.matched_tokens, record.tree_tokens, _verified(life))


def end_isolation(batch: ScheduleBatch, life: Lifecycle) -> bool:
    """Where a request gives a token now that it has been computed in isolation, its prompt takes
    the place of what is cached of the same tokens; returns whether any does."""
    cleared = [
        request
        for request in batch.requests[: batch.num_prefill]
        if request.scheduling.isolated and request.new_tokens
    ]
    for request in cleared:
        request.scheduling.isolated = False
        life.memory.drop(request, 0, request.scheduling.target, _verified(life))
    for request in cleared:
        life.memory.insert(request, request.scheduling.target)
    return bool(cleared)


def _verified(life: Lifecycle) -> list[Request]:
    """Requests that have had a token from all that they have in the cache. The first one may be
    older than the last of that: pages give way to the cache's as their step is launched."""
    return [r for r in life.live.values() if r.row >= 0 and r.new_tokens > r.scheduling.borrows]
