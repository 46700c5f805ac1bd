"""/generate: SGLang's native endpoint. Text or token ids in, text, token ids and figures out."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from runtime.errors import wrong
from server.api.answers import Answer, Planned, answer
from server.api.completions import encode_prompts
from server.api.fields.bodies import Record, ignored, refused, served
from server.api.fields.generation import RequestFields, SamplingFields, generation_params
from server.api.fields.grammar import GrammarFields
from server.api.fields.kinds import (
    MAX_LOGPROBS,
    MAX_N,
    Boolean,
    Integer,
    Kind,
    Text,
    TokenIds,
    resolved,
)
from server.api.incoming import read_body, read_value
from server.api.logprobs import JsonList
from server.http.sse import DONE, event
from server.service import SERVICE

if TYPE_CHECKING:
    from runtime.request import Finish, TokenLogprobs
    from server.api.fields.kinds import Reading
    from server.api.fields.schema_words import Schema
    from server.generation.generator import Generation
    from server.generation.output import Delta
    from server.generation.params import ApiLimits, GenerationParams
    from server.service import Service

DEFAULT_NEW_TOKENS = 128


class OneOrMany(Kind["tuple[list[Any], bool]"]):
    """A prompt, or a list of prompts. Read as the list, and whether there was one."""

    json_types = (str, list)

    def __init__(self, one: Kind[Any], of: str) -> None:
        self.one, self.of = one, of

    def read(self, value: Any, where: str, reading: Reading) -> tuple[list[Any], bool]:
        single = isinstance(value, str) or (
            isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
        )
        prompts = [value] if single else value
        most = resolved(MAX_N, reading.limits)
        if not isinstance(prompts, list) or not 0 < len(prompts) <= most:
            raise self.wrong(value, where, reading)
        for index, prompt in enumerate(prompts):
            if type(prompt) not in self.one.json_types:
                raise wrong(f"{where}[{index}]", prompt, self.of)
            self.one.read(prompt, f"{where}[{index}]", reading)
        return prompts, single

    def allowed(self, limits: ApiLimits | None) -> str:
        return f"{self.of}, or a list of 1 to {resolved(MAX_N, limits)} of them"

    def schema(self, limits: ApiLimits) -> Schema:
        one = self.one.schema(limits)
        most = resolved(MAX_N, limits)
        return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1, "maxItems": most}]}


class NativeSampling(SamplingFields, GrammarFields):
    """`sampling_params` of /generate: the fields of other endpoints, some by SGLang's names."""

    max_new_tokens = served(
        Integer(1),
        f"tokens of an answer at most; else the model's default, or {DEFAULT_NEW_TOKENS}",
    )
    min_tokens = served(
        SamplingFields.min_tokens.kind,
        SamplingFields.min_tokens.meaning,
        default=0,
        names=("min_new_tokens",),
    )
    seed = served(SamplingFields.seed.kind, SamplingFields.seed.meaning, names=("sampling_seed",))
    include_stop_str_in_output = served(
        Boolean(),
        SamplingFields.include_stop_str_in_output.meaning,
        default=False,
        names=("no_stop_trim",),
    )
    n = served(Integer(1, MAX_N), "answers to make", default=1)
    unserved = ignored("every token is sent as it is made", "stream_interval")


class GenerateBody(RequestFields):
    """The body of /generate."""

    text = served(OneOrMany(Text(), "a string"), "what to go on from")
    input_ids = served(
        OneOrMany(TokenIds(least=1), "a list of token ids"), "instead of text: its token ids"
    )
    sampling_params = served(Record(NativeSampling), "how tokens are picked, and where to end")
    return_logprob = served(Boolean(), "tokens have their log-probabilities", default=False)
    top_logprobs_num = served(
        Integer(0, MAX_LOGPROBS), "also those of so many likeliest tokens", default=0
    )
    logprob_start_len = served(
        Integer(-1),
        "0 scores the prompt too; SGLang scores from a position on, here it is whole or not at all",
        default=-1,
    )
    unserved = (
        *refused(
            "log-probabilities are told by token ids, in lists",
            "return_flat_raw_top_logprobs",
            "return_flat_raw_top_logprobs_b64",
            "return_text_in_logprobs",
        ),
        *refused("the model reads text alone", "modalities", "multi_item_delimiter_indices"),
        *refused("requests are answered while the client waits", "background"),
        *refused("use sampling_params", "custom_logit_processor"),
        *refused("reasoning is bounded in conversations alone", "max_thinking_tokens"),
        *ignored("the model reasons where its template says so", "require_reasoning"),
        *ignored(
            "for SGLang's own processes",
            "http_worker_ipc",
            "need_wait_for_mm_inputs",
            "num_items_assigned",
            "encoder_urls",
            "return_bytes",
        ),
    )

    one_of = ("text", "input_ids")

    @property
    def prompts(self) -> tuple[list[str | list[int]], bool]:
        """The prompts, and whether there was one, not a list of them."""
        given = self.input_ids if self.text is None else self.text
        assert given is not None, "checked"
        return given

    def generation(self, sampling: NativeSampling, limits: ApiLimits) -> GenerationParams:
        """What it asks of the generation core."""
        logprobs = self.top_logprobs_num if self.return_logprob else None
        params = generation_params(
            self,
            sampling,
            limits,
            sampling.max_new_tokens,
            default_tokens=DEFAULT_NEW_TOKENS,
            logprobs=logprobs,
        )
        scored = logprobs if self.logprob_start_len == 0 else None
        return replace(
            params,
            sampling=replace(params.sampling, prompt_logprobs=scored),
            n=sampling.n,
            best_of=sampling.n,
        )


async def generate(request: web.Request) -> web.StreamResponse:
    """POST /generate."""
    body = await read_body(request, GenerateBody)
    return await answer(
        request,
        lambda: _plan(request, body),
        stream=body.stream,
        prefix="gen",
        client_id=body.request_id,
    )


async def _plan(request: web.Request, body: GenerateBody) -> Planned:
    """Tokenizes the prompts, and checks what rules the answer. Raises: InvalidRequest."""
    service = request.app[SERVICE]
    sampling = body.sampling_params or read_value(NativeSampling, {}, service.limits)
    params = body.generation(sampling, service.limits)
    given, single = body.prompts
    prompts = await encode_prompts(request, given)
    params = await service.model_format.constrained(
        params, sampling.rules(), client=request.remote or ""
    )
    alone = single and params.n == 1
    return Planned(
        prompts,
        params,
        lambda generation: GenerateAnswer(generation, service, body.request_id, alone),
    )


class _Choice:
    """What one choice has given so far."""

    def __init__(self, index: int, generation: Generation) -> None:
        self.index = index
        self._generation = generation
        self._request = generation.requests[index]
        self._text = ""
        self._ids: list[int] = []
        self._scored = self._request.sampling.logprobs is not None
        self._pairs, self._tops = JsonList(), JsonList()
        self._prompt_pairs: JsonList | None = None
        self._prompt_tops = JsonList()
        self._finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self._text += delta.text
        self._ids += delta.token_ids
        self._pairs.extend([_pair(entry) for entry in delta.logprobs])
        self._tops.extend([_top(entry) for entry in delta.logprobs])
        if delta.prompt_logprobs is not None:
            self._add_prompt(delta.prompt_logprobs)
        self._finish = delta.finish

    def _add_prompt(self, entries: list[TokenLogprobs | None]) -> None:
        if self._prompt_pairs is None:
            self._prompt_pairs = JsonList()
            self._prompt_pairs.extend([[None, self._request.input_ids[0], None]])
            self._prompt_tops.extend([None])
        rest = [entry for entry in entries if entry is not None]
        self._prompt_pairs.extend([_pair(entry) for entry in rest])
        self._prompt_tops.extend([_top(entry) for entry in rest])

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
        if self._generation.params.include_wait_times:
            meta |= self._generation.usage().waited()
        if self._finish is not None and self._generation.params.include_timings:
            meta["timings"] = asdict(self._generation.timings(self.index))
        if self._scored:
            meta["output_token_logprobs"] = self._pairs.json()
            meta["output_top_logprobs"] = self._tops.json()
        if self._prompt_pairs is not None:
            meta["input_token_logprobs"] = self._prompt_pairs.json()
            meta["input_top_logprobs"] = self._prompt_tops.json()
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
    if finish.reason.value == "abort":
        return {"type": "abort", "message": finish.message}
    return {"type": finish.reason.value, "matched": finish.matched}


class GenerateAnswer(Answer):
    """The answer, streamed or whole.

    Args: name: what the client calls it, if anything; single: one choice, which is not in a list.
    """

    def __init__(
        self, generation: Generation, service: Service, name: str | None, single: bool
    ) -> None:
        super().__init__(generation, service)
        self.id = name or self.id
        self._single = single
        self._started = time.perf_counter()
        self._choices = [_Choice(i, generation) for i in range(len(generation.requests))]

    def _body(self, index: int) -> dict[str, Any]:
        seconds = time.perf_counter() - self._started
        return self._choices[index].body(self.id, seconds)

    def events(self, delta: Delta) -> bytes:
        self.add(delta)
        body = self._body(delta.index)
        return event(body if self._single else {"index": delta.index, **body})

    def closing(self) -> bytes:
        return DONE

    def add(self, delta: Delta) -> None:
        self._choices[delta.index].add(delta)

    def body(self) -> Any:
        bodies = [self._body(index) for index in range(len(self._choices))]
        return bodies[0] if self._single else bodies


ROUTES = [web.post("/generate", generate)]
