"""What may enter the queue: the bounds that make sure that whatever waits can run one day."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.errors import ContextTooLong, InvalidRequest

if TYPE_CHECKING:
    from runtime.request import Request


def kv_bound(input_tokens: int, max_new_tokens: int, page_size: int) -> int:
    """KV tokens that a request alone may need, the adder's spare page included. It fits a pool
    with *more* usable tokens than that."""
    return -(-input_tokens // page_size) * page_size + max_new_tokens + page_size


def resolve_max_new_tokens(
    request: Request, *, context_length: int, usable_tokens: int, page_size: int
) -> int:
    """Output tokens that a request may have: what it asked for, or else what context and pool
    leave.

    Raises:
        InvalidRequest: no input tokens, or max_tokens below 1.
        ContextTooLong: it can never fit; the message holds all the numbers.
    """
    given = request.sampling.max_new_tokens
    inputs = len(request.input_ids)
    if not inputs:
        raise InvalidRequest("The prompt has no tokens; at least 1 is needed.", param="prompt")
    if given is not None and given < 1:
        raise InvalidRequest(f"max_tokens is {given}; it must be at least 1.", param="max_tokens")
    wanted = 1 if given is None else given
    if inputs + wanted > context_length:
        raise ContextTooLong(
            f"This model's maximum context length is {context_length} tokens. The request has"
            f" {inputs} input tokens and asks for {wanted} output tokens, together"
            f" {inputs + wanted}. Shorten the prompt or lower max_tokens.",
            param="prompt" if given is None else "max_tokens",
        )
    need = kv_bound(inputs, wanted, page_size)
    if need >= usable_tokens:
        raise ContextTooLong(
            f"The request can never fit the KV cache: {inputs} input tokens (in pages of"
            f" {page_size}) and {wanted} output tokens need {need} tokens with a spare page, and"
            f" the cache must have more than that; it has {usable_tokens}.",
            param="prompt" if given is None else "max_tokens",
        )
    if given is not None:
        return given
    spare = usable_tokens - kv_bound(inputs, 0, page_size) - 1
    return min(context_length - inputs, spare)
