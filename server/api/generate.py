"""/generate: SGLang's native endpoint. Text or token ids in, text, token ids and figures out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from runtime.errors import InvalidRequest, wrong
from server.api.body_fields import BodyFields, check_token_ids
from server.api.completions import CompletionRequest, encode_prompts
from server.api.delivery import send
from server.api.sampling_fields import check_model, generation_params
from server.http.sse import DONE, event
from server.service import REQUEST_ID, SERVICE, new_id, read_json

if TYPE_CHECKING:
    from runtime.request import Finish, TokenLogprobs
    from server.generation.generator import Generation
    from server.generation.params import ApiLimits
    from server.generation.streams import Delta
    from server.http.errors import ErrorAnswer

# Names of sampling_params, by the names that the other endpoints have for them.
NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
DEFAULT_NEW_TOKENS = 128


async def generate(request: web.Request) -> web.StreamResponse:
    """POST /generate."""
    service = request.app[SERVICE]
    body = await read_json(request)
    wish, single = parse_generate(body, service.limits)
    sampling = body.get("sampling_params") or {}
    params = await service.model_format.constrained(wish.params, sampling, native=True)
    prompts = await encode_prompts(wish, service.generator)
    request_id = new_id("gen")
    client_id = body["rid"] if isinstance(body.get("rid"), str) else request[REQUEST_ID]
    with service.generator.start(prompts, params, request_id, client_id) as generation:
        return await send(request, generation, GenerateAnswer(request_id, generation, single))


def parse_generate(body: Any, limits: ApiLimits) -> tuple[CompletionRequest, bool]:
    """The request, and whether its answer is one object rather than a list.

    Raises: InvalidRequest: a field that is wrong. ModelNotFound.
    """
    fields = BodyFields(body)
    check_model(fields, limits)
    options = BodyFields(fields.get("sampling_params") or {}, "sampling_params", NAMES)
    prompts, single = _prompts(fields, limits)
    logprobs = None
    if fields.boolean("return_logprob"):
        logprobs = fields.integer("top_logprobs_num", low=0, high=limits.max_logprobs, default=0)
    start = fields.integer("logprob_start_len", low=-1, default=-1)
    n = options.integer("n", low=1, high=limits.max_n, default=1) or 1
    params = generation_params(
        options,
        limits,
        max_tokens=options.integer(
            "max_tokens", low=1, default=limits.defaults.max_new_tokens or DEFAULT_NEW_TOKENS
        ),
        logprobs=logprobs,
        # SGLang scores the prompt from a position on; here it is scored whole or not at all.
        prompt_logprobs=logprobs if start == 0 else None,
        n=n,
    )
    params = replace(params, stream=fields.boolean("stream"))
    return CompletionRequest(prompts=prompts, params=params), single and n == 1


def _prompts(fields: BodyFields, limits: ApiLimits) -> tuple[list[str | list[int]], bool]:
    """The prompts, and whether there was one, not a list of them."""
    text, ids = fields.get("text"), fields.get("input_ids")
    if (text is None) == (ids is None):
        raise InvalidRequest("text: exactly one of text and input_ids must be given", param="text")
    name, value = ("text", text) if ids is None else ("input_ids", ids)
    single = isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
    )
    prompts = [value] if single else value
    if not isinstance(prompts, list) or not 0 < len(prompts) <= limits.max_n:
        raise wrong(name, value, f"a prompt, or a list of 1 to {limits.max_n} prompts")
    for index, prompt in enumerate(prompts):
        if ids is None and not isinstance(prompt, str):
            raise wrong(f"text[{index}]", prompt, "a string")
        if ids is not None:
            if not isinstance(prompt, list):
                raise wrong(f"input_ids[{index}]", prompt, "a list of token ids")
            check_token_ids(prompt, limits.vocab_size, f"input_ids[{index}]")
    return prompts, single


class _Choice:
    """What one choice has given so far."""

    def __init__(self, index: int, generation: Generation) -> None:
        self.index = index
        self._request = generation.requests[index]
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self._text += delta.text
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        self._finish = delta.finish

    def body(self, request_id: str, seconds: float) -> dict[str, Any]:
        """The choice as a whole; in streams, each event holds all that came before."""
        meta: dict[str, Any] = {
            "id": request_id,
            "finish_reason": _finish_body(self._finish, len(self._ids)),
            "prompt_tokens": len(self._request.input_ids),
            "completion_tokens": len(self._ids),
            "cached_tokens": self._request.cached_tokens,
            "e2e_latency": round(seconds, 4),
        }
        if self._request.sampling.logprobs is not None:
            meta["output_token_logprobs"] = [_pair(entry) for entry in self._logprobs]
            meta["output_top_logprobs"] = [_top(entry) for entry in self._logprobs]
        if self._prompt_logprobs is not None:
            first = [[None, self._request.input_ids[0], None]]
            rest = [entry for entry in self._prompt_logprobs if entry is not None]
            meta["input_token_logprobs"] = first + [_pair(entry) for entry in rest]
            meta["input_top_logprobs"] = [None, *(_top(entry) for entry in rest)]
        return {"text": self._text, "output_ids": self._ids, "meta_info": meta}


def _pair(entry: TokenLogprobs) -> list[Any]:
    return [entry.logprob, entry.token_id, None]


def _top(entry: TokenLogprobs) -> list[list[Any]]:
    return [[logprob, token_id, None] for token_id, logprob in entry.top]


def _finish_body(finish: Finish | None, tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.reason.value == "length":
        return {"type": "length", "length": tokens}
    return {"type": finish.reason.value, "matched": finish.matched}


class GenerateAnswer:
    """The answer, streamed or whole."""

    def __init__(self, request_id: str, generation: Generation, single: bool) -> None:
        self._request_id = request_id
        self._generation = generation
        self._single = single
        self._started = time.perf_counter()
        self._choices = [_Choice(i, generation) for i in range(len(generation.requests))]

    def _body(self, index: int) -> dict[str, Any]:
        seconds = time.perf_counter() - self._started
        return self._choices[index].body(self._request_id, seconds)

    def events(self, delta: Delta) -> bytes:
        self._choices[delta.index].add(delta)
        body = self._body(delta.index)
        return event(body if self._single else {"index": delta.index, **body})

    def closing(self) -> bytes:
        return DONE

    def failure(self, error: ErrorAnswer) -> bytes:
        return event(error.body)

    async def whole(self) -> Any:
        async for delta in self._generation:
            self._choices[delta.index].add(delta)
        bodies = [self._body(index) for index in range(len(self._choices))]
        return bodies[0] if self._single else bodies


ROUTES = [web.post("/generate", generate)]
