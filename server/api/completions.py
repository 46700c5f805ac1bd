"""/v1/completions: what follows a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from runtime.errors import InvalidRequest, wrong
from server.api.answers import OpenAIAnswer, Planned, answer, finish_name
from server.api.fields.bodies import refused, required, served
from server.api.fields.generation import OpenAIFields
from server.api.fields.kinds import MAX_LOGPROBS, MAX_N, Boolean, Integer, Kind, TokenIds
from server.api.incoming import beside, read_body
from server.api.logprobs import CompletionLogprobs, MergedLogprobs
from server.http.sse import event
from server.service import SERVICE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.api.fields.kinds import Reading
    from server.api.fields.schema_words import Schema
    from server.generation.generator import Generation
    from server.generation.output import Delta
    from server.generation.params import ApiLimits, GenerationParams
    from server.service import Service
    from server.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
# Of one request, prompts times choices: each is queued in 0.05 ms, all together.
MAX_SEQUENCES = 256
IDS = TokenIds(least=1)


class Prompts(Kind[list[str | list[int]]]):
    """One or several prompts, each a text or token ids."""

    json_types = (str, list)

    def read(self, value: Any, where: str, reading: Reading) -> list[str | list[int]]:
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise self.wrong(value, where, reading)
        if all(type(item) is int for item in value):
            value = [value]
        for index, prompt in enumerate(value):
            if isinstance(prompt, list) and prompt:
                IDS.read(prompt, f"{where}[{index}]", reading)
            elif not isinstance(prompt, str):
                raise wrong(f"{where}[{index}]", prompt, "a string or a list of token ids")
        return list(value)

    def allowed(self, limits: ApiLimits | None) -> str:
        return "a string, a list of strings, a list of token ids, or a list of such lists"

    def schema(self, limits: ApiLimits) -> Schema:
        text: Schema = {"type": "string", "minLength": 1}
        ids = IDS.schema(limits)
        several = {"type": "array", "items": {"anyOf": [text, ids]}, "minItems": 1}
        return {"anyOf": [text, ids, several]}


class CompletionBody(OpenAIFields):
    """The body of /v1/completions."""

    prompt = required(
        Prompts(), "what to go on from; an empty text is the model's first token, where it has one"
    )
    max_tokens = served(
        Integer(0),
        "tokens of an answer at most; 0 with echo scores the prompt; else the model's default, or"
        f" {DEFAULT_COMPLETION_TOKENS}",
        names=("max_tokens", "n_predict"),
    )
    best_of = served(
        Integer(1, MAX_N), "make so many answers and give the likeliest n; not streamed"
    )
    echo = served(Boolean(), "the answer begins with the prompt", default=False)
    logprobs = served(
        Integer(0, MAX_LOGPROBS), "log-probabilities of tokens, and of so many likeliest ones"
    )
    add_special_tokens = served(Boolean(), "the tokenizer adds what begins a text", default=True)
    unserved = refused("the model cannot fill in the middle", "suffix")

    def check(self, where: str, limits: ApiLimits) -> None:
        super().check(where, limits)
        best_of = self.best_of or self.n
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens", 0, "an integer of at least 1, or go with echo")
        if best_of < self.n:
            raise wrong("best_of", best_of, f"at least n, which is {self.n}")
        if self.stream and best_of > self.n:
            raise InvalidRequest(
                f"best_of: got {best_of} with n {self.n}; a stream cannot choose among more than n",
                param="best_of",
            )
        if len(self.prompt) * best_of > MAX_SEQUENCES:
            raise InvalidRequest(
                f"prompt: {len(self.prompt)} prompts with {best_of} choices each; at most"
                f" {MAX_SEQUENCES} choices are allowed",
                param="prompt",
            )

    def generation(self, limits: ApiLimits) -> GenerationParams:
        """What it asks of the generation core."""
        best_of = self.best_of or self.n
        # The likeliest of several are found by their tokens' probabilities.
        logprobs = 0 if self.logprobs is None and best_of > self.n else self.logprobs
        params = self.params(
            limits, self.max_tokens, default_tokens=DEFAULT_COMPLETION_TOKENS, logprobs=logprobs
        )
        prompt_logprobs = self.logprobs if self.echo else None
        return replace(
            params,
            sampling=replace(params.sampling, prompt_logprobs=prompt_logprobs),
            n=self.n,
            best_of=best_of,
            echo=self.echo,
            hide_logprobs=self.logprobs is None,
            include_usage=self.include_usage,
            include_timings=self.include_timings,
            include_progress=self.include_progress,
        )


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    body = await read_body(request, CompletionBody)
    return await answer(
        request,
        lambda: _plan(request, body),
        stream=body.stream,
        prefix="cmpl",
        client_id=body.request_id,
    )


async def _plan(request: web.Request, body: CompletionBody) -> Planned:
    """Tokenizes the prompts, and checks what rules the answer. Raises: InvalidRequest."""
    service = request.app[SERVICE]
    params = body.generation(service.limits)
    prompts = await encode_prompts(request, body.prompt, add_special_tokens=body.add_special_tokens)
    texts = [""] * len(prompts)
    if body.echo:
        decode = service.tokenizer.decode
        texts = await beside(
            request, lambda: [p if isinstance(p, str) else decode(p) for p in body.prompt]
        )
    # Last: between this, which counts the client's grammars, and its start nobody else comes.
    params = await service.model_format.constrained(
        params, body.rules(), client=request.remote or ""
    )
    return Planned(prompts, params, lambda generation: CompletionAnswer(generation, service, texts))


async def encode_prompts(
    request: web.Request, given: list[str | list[int]], *, add_special_tokens: bool = True
) -> list[list[int]]:
    """The token ids of every prompt; an empty text becomes the model's BOS where it has one."""
    service = request.app[SERVICE]
    tokenizer, most = service.tokenizer, service.limits.prompt

    def encoded() -> list[list[int]]:
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        ids = iter(tokenizer.encode_all(texts, add_special_tokens=add_special_tokens, most=most))
        return [next(ids) if isinstance(prompt, str) else prompt for prompt in given]

    empty = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [ids or empty for ids in await beside(request, encoded)]


class _Choice:
    """One choice of a completion, delta by delta.

    Attributes: merged: the log-probabilities of a whole answer.
    """

    def __init__(
        self,
        index: int,
        prompt_ids: Sequence[int],
        prompt_text: str,
        generation: Generation,
        tokenizer: Tokenizer,
    ) -> None:
        params = generation.params
        self.index = index
        self.mean_logprob = 0.0
        self.merged = MergedLogprobs()
        self._prompt_ids = prompt_ids
        self._scored = 0  # tokens of the prompt
        self._echoed = prompt_text if params.echo else None
        self._top = params.sampling.logprobs
        self._logprobs: CompletionLogprobs | None = None
        self._sum, self._count = 0.0, 0
        if self._top is not None:
            detokenizer = tokenizer.detokenizer(
                () if params.echo else prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
            )
            self._logprobs = CompletionLogprobs(tokenizer, detokenizer)

    def score(self, delta: Delta, merged: MergedLogprobs) -> MergedLogprobs:
        """Adds a delta's log-probabilities to those before it, if they were asked for."""
        if self._logprobs is None:
            return merged
        top = self._top or 0
        if delta.prompt_logprobs is not None:
            begin, self._scored = self._scored, self._scored + len(delta.prompt_logprobs)
            ids = self._prompt_ids[begin : self._scored]
            merged.add(self._logprobs.add(ids, delta.prompt_logprobs, top=top))
        merged.add(self._logprobs.add(delta.token_ids, delta.logprobs, top=top))
        self._sum += sum(entry.logprob for entry in delta.logprobs)
        self._count += len(delta.logprobs)
        self.mean_logprob = self._sum / max(1, self._count)
        return merged

    def entry(self, delta: Delta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The `choices` entry of a delta. The first one of an echo begins with the prompt."""
        text = delta.text
        if self._echoed is not None:
            text, self._echoed = self._echoed + text, None
        return {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_name(delta.finish),
            "stop_reason": None if delta.finish is None else delta.finish.matched,
        }


class CompletionAnswer(OpenAIAnswer):
    """A text completion, streamed or whole.

    Args: prompt_texts: of each prompt, for echo.
    """

    object = event_object = "text_completion"

    def __init__(
        self, generation: Generation, service: Service, prompt_texts: Sequence[str]
    ) -> None:
        super().__init__(generation, service)
        width = generation.params.best_of
        self._choices = [
            _Choice(
                index,
                generation.prompts[index // width],
                prompt_texts[index // width],
                generation,
                service.tokenizer,
            )
            for index in range(width * len(generation.prompts))
        ]
        self._entries: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        self._plain = generation.params.sampling.logprobs is None and not generation.params.echo
        start = orjson.dumps(self.of_choices([], self.object))[:-2]
        self._fast = (
            b"data: " + start + b'{"index":',
            b',"text":',
            b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n',
        )

    def events(self, delta: Delta) -> bytes:
        if self._plain and delta.finish is None:
            before, middle, after = self._fast
            return before + b"%d" % delta.index + middle + orjson.dumps(delta.text) + after
        choice = self._choices[delta.index]
        logprobs = choice.score(delta, MergedLogprobs()).json()
        return event(self.of_choices([choice.entry(delta, logprobs)], self.object))

    def add(self, delta: Delta) -> None:
        choice = self._choices[delta.index]
        choice.score(delta, choice.merged)
        self._entries[delta.index].append(choice.entry(delta, None))

    def body(self) -> dict[str, Any]:
        """The answer's body: for each prompt, its n likeliest choices."""
        params = self.generation.params
        chosen: list[dict[str, Any]] = []
        for first in range(0, len(self._choices), params.best_of):
            group = list(range(first, first + params.best_of))
            if params.best_of > params.n:
                group.sort(key=lambda index: -self._choices[index].mean_logprob)
            for index in group[: params.n]:
                logprobs = self._choices[index].merged.json()
                chosen.append(_whole_choice(len(chosen), self._entries[index], logprobs))
        if params.best_of > params.n and params.hide_logprobs:
            for choice in chosen:
                choice["logprobs"] = None
        return self.of_choices(chosen, self.object, **self.figures(usage=True))


def _whole_choice(
    index: int, entries: Sequence[dict[str, Any]], logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": "".join(entry["text"] for entry in entries),
        "logprobs": logprobs,
        "finish_reason": entries[-1]["finish_reason"],
        "stop_reason": entries[-1]["stop_reason"],
    }


ROUTES = [web.post("/v1/completions", completions)]
