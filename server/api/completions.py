"""/v1/completions: what follows a prompt."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from runtime.errors import InvalidRequest, wrong
from server.api.completions_answer import CompletionAnswer
from server.api.delivery import send
from server.api.fields import refused, required, served
from server.api.incoming import read_body
from server.api.kinds import MAX_LOGPROBS, MAX_N, Boolean, Integer, Kind, TokenIds
from server.api.request_fields import OpenAIFields
from server.service import REQUEST_ID, SERVICE, new_id

if TYPE_CHECKING:
    from server.api.json_schema import Schema
    from server.api.kinds import Reading
    from server.generation.generator import Generator
    from server.generation.params import ApiLimits, GenerationParams

DEFAULT_COMPLETION_TOKENS = 16
MAX_SEQUENCES = 1024  # of one request: prompts times choices
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
        )


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    service = request.app[SERVICE]
    body = await read_body(request, CompletionBody)
    params = await service.model_format.constrained(body.generation(service.limits), body.rules())
    prompts = await encode_prompts(
        body.prompt, service.generator, add_special_tokens=body.add_special_tokens
    )
    request_id = new_id("cmpl")
    texts = [""] * len(prompts)
    if body.echo:
        texts = [
            given if isinstance(given, str) else service.tokenizer.decode(given)
            for given in body.prompt
        ]
    with service.generator.start(
        prompts, params, request_id, body.request_id or request[REQUEST_ID]
    ) as generation:
        answer = CompletionAnswer(
            request_id,
            int(time.time()),
            service.limits.model,
            generation,
            service.tokenizer,
            texts,
        )
        return await send(request, generation, answer)


async def encode_prompts(
    given: list[str | list[int]], generator: Generator, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """The token ids of every prompt; an empty text becomes the model's BOS where it has one."""
    found = []
    for prompt in given:
        ids = prompt
        if isinstance(ids, str):
            ids = await generator.encode(ids, add_special_tokens=add_special_tokens)
            if not ids and generator.tokenizer.bos_token_id is not None:
                ids = [generator.tokenizer.bos_token_id]
        found.append(ids)
    return found


ROUTES = [web.post("/v1/completions", completions)]
