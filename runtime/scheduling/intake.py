"""What may enter the queue: the bounds that make sure that whatever waits can run one day."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from runtime.errors import ContextTooLong, InvalidRequest, QueueFull
from runtime.request import Finish, FinishReason, RequestRecord
from runtime.scheduling.page_allocator import whole_pages
from runtime.scheduling.prefill_adder import kv_need

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.config import SchedulerConfig
    from runtime.request import Request
    from runtime.scheduling.lifecycle import Lifecycle


def check_ids(requests: Sequence[Request], life: Lifecycle) -> None:
    """Every live request has an id of its own.

    Raises: InvalidRequest: two of these have the same, or one is that of a live request.
    """
    for request_id, times in Counter(request.request_id for request in requests).items():
        if times > 1 or request_id in life.live:
            raise InvalidRequest(f"Request id {request_id!r} is in use.")


def resolve_max_new_tokens(request: Request, config: SchedulerConfig) -> int:
    """Output tokens that a request may have: what it asked for, or else what context and pool
    leave.

    Raises:
        InvalidRequest: no input tokens, or max_tokens below 1.
        ContextTooLong: it can never fit; the message holds all the numbers.
    """
    context_length, usable_tokens = config.context_length, config.usable_tokens
    page_size = config.page_size
    given = request.sampling.max_new_tokens
    inputs = len(request.input_ids)
    if not inputs:
        raise InvalidRequest("The prompt has no tokens; at least 1 is needed.", param="prompt")
    if given is not None and given < 1:
        raise InvalidRequest(f"max_tokens is {given}; it must be at least 1.", param="max_tokens")
    wanted = 1 if given is None else given
    rounded = whole_pages(inputs, page_size)
    if inputs + wanted > context_length:
        raise ContextTooLong(
            f"This model's maximum context length is {context_length} tokens. The request has"
            f" {inputs} input tokens and asks for {wanted} output tokens, together"
            f" {inputs + wanted}. Shorten the prompt or lower max_tokens.",
            param="prompt" if given is None else "max_tokens",
        )
    need = kv_need(rounded, wanted, page_size)
    if need >= usable_tokens:
        raise ContextTooLong(
            f"The request can never fit the KV cache: {inputs} input tokens (in pages of"
            f" {page_size}) and {wanted} output tokens need {need} tokens with a spare page, and"
            f" the cache must have more than that; it has {usable_tokens}.",
            param="prompt" if given is None else "max_tokens",
        )
    if given is not None:
        return given
    return room_for_output(inputs, config)


def room_for_output(inputs: int, config: SchedulerConfig) -> int:
    """Output tokens that context and pool leave after so many inputs; below 1: it does not fit."""
    page_size = config.page_size
    rounded = whole_pages(inputs, page_size)
    spare = config.usable_tokens - kv_need(rounded, 0, page_size) - 1
    return min(config.context_length - inputs, spare)


def make_room_in_queue(
    requests: Sequence[Request], life: Lifecycle, cap: int
) -> list[tuple[Request, Finish]]:
    """Chooses waiting requests of lower priority to be displaced, so that the queue stays within
    its cap when the newcomers join. Changes nothing.

    Args:
        cap: most requests that wait; 0: no cap.

    Returns: (request to displace, how it ends) pairs.
    Raises:
        InvalidRequest: more newcomers than the queue ever takes.
        QueueFull: too few requests could be displaced, so the newcomers are refused.
    """
    if not cap or len(life.queue) + len(life.compiling) + len(requests) <= cap:
        return []
    if len(requests) > cap:
        raise InvalidRequest(
            f"The request asks for {len(requests)} sequences; the queue takes at most {cap}."
        )
    waiting = life.waiting_on
    missing = waiting + len(requests) - cap
    lowest = min(request.priority for request in requests)
    others = life.queue.to_displace(lowest, missing)
    retry_after_s = max(1.0, life.mean_wait_s)
    if len(others) < missing:
        raise QueueFull(
            f"{waiting} requests are waiting, and the queue takes {cap}.",
            retry_after_s=retry_after_s,
        )
    message = (
        f"The queue takes {cap} requests, and one of higher priority needed the place."
        f" Retry after {retry_after_s:.0f} s."
    )
    finish = Finish(FinishReason.ERROR, "queue_full", message, retry_after_s)
    return [(other, finish) for other in others]


def start_record(request: Request, seq: int, computed_tokens: int, config: SchedulerConfig) -> None:
    """Sets what the scheduler notes of a request that is taken."""
    sampling = request.sampling
    eos: frozenset[int] = frozenset() if sampling.ignore_eos else config.eos_token_ids
    request.prompt_logprobs = None if sampling.prompt_logprobs is None else [None]
    request.scheduling = RequestRecord(
        seq=seq,
        stop_ids=sampling.stop_token_ids | eos,
        key=request.input_ids.tobytes(),
        arrival_tokens=computed_tokens,
    )
