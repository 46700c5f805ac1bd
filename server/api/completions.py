"""/v1/completions: what follows a prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from runtime.errors import InvalidRequest, wrong
from server.api.answers import CompletionAnswer
from server.api.body_fields import BodyFields, check_token_ids
from server.api.delivery import send
from server.api.sampling_fields import check_model, generation_params
from server.service import REQUEST_ID, SERVICE, new_id, read_json

if TYPE_CHECKING:
    from server.generation.generator import Generator
    from server.generation.params import ApiLimits, GenerationParams

DEFAULT_COMPLETION_TOKENS = 16
MAX_SEQUENCES = 1024  # of one request: prompts times choices


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """/v1/completions. prompts: texts or token ids, at least one."""

    prompts: list[str | list[int]]
    params: GenerationParams
    add_special_tokens: bool = True


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    service = request.app[SERVICE]
    body = await read_json(request)
    wish = parse_completion(body, service.limits)
    params = await service.model_format.constrained(wish.params, body)
    prompts = await encode_prompts(wish, service.generator)
    request_id = new_id("cmpl")
    texts = [""] * len(prompts)
    if wish.params.echo:
        texts = [
            given if isinstance(given, str) else service.tokenizer.decode(given)
            for given in wish.prompts
        ]
    with service.generator.start(prompts, params, request_id, request[REQUEST_ID]) as generation:
        answer = CompletionAnswer(
            request_id,
            int(time.time()),
            service.limits.model,
            generation,
            service.tokenizer,
            texts,
        )
        return await send(request, generation, answer)


def parse_completion(body: Any, limits: ApiLimits) -> CompletionRequest:
    """Raises: InvalidRequest: a field that is wrong. ModelNotFound."""
    fields = BodyFields(body)
    check_model(fields, limits)
    if fields.get("suffix"):
        raise InvalidRequest(
            "suffix: not supported, since the model cannot fill in the middle; leave it out",
            param="suffix",
        )
    echo = fields.boolean("echo")
    max_tokens = fields.integer(
        "max_tokens",
        low=0 if echo else 1,
        default=limits.defaults.max_new_tokens or DEFAULT_COMPLETION_TOKENS,
    )
    logprobs = fields.integer("logprobs", low=0, high=limits.max_logprobs)
    n = fields.integer("n", low=1, high=limits.max_n, default=1) or 1
    best_of = fields.integer("best_of", low=n, high=limits.max_n, default=n) or n
    stream = fields.boolean("stream")
    if stream and best_of > n:
        raise InvalidRequest(
            f"best_of: got {best_of} with n {n}; a stream cannot choose among more than n",
            param="best_of",
        )
    prompts = _prompts(fields, limits)
    if len(prompts) * best_of > MAX_SEQUENCES:
        raise InvalidRequest(
            f"prompt: {len(prompts)} prompts with {best_of} choices each; at most {MAX_SEQUENCES}"
            " choices are allowed",
            param="prompt",
        )
    params = generation_params(
        fields,
        limits,
        max_tokens=max_tokens,
        # The likeliest of several are found by their tokens' probabilities.
        logprobs=0 if logprobs is None and best_of > n else logprobs,
        prompt_logprobs=logprobs if echo else None,
        n=n,
        best_of=best_of,
        echo=echo,
        hide_logprobs=logprobs is None,
    )
    return CompletionRequest(
        prompts=prompts,
        params=params,
        add_special_tokens=fields.boolean("add_special_tokens", True),
    )


def _prompts(fields: BodyFields, limits: ApiLimits) -> list[str | list[int]]:
    """One or several prompts, each a text or token ids."""
    allowed = "a string, a list of strings, a list of token ids, or a list of such lists"
    value = fields.get("prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise fields.error("prompt", allowed)
    if all(type(item) is int for item in value):
        value = [value]
    for index, prompt in enumerate(value):
        if isinstance(prompt, list) and prompt:
            check_token_ids(prompt, limits.vocab_size, f"prompt[{index}]")
        elif not isinstance(prompt, str):
            raise wrong(f"prompt[{index}]", prompt, "a string or a list of token ids")
    return value


async def encode_prompts(wish: CompletionRequest, generator: Generator) -> list[list[int]]:
    """The token ids of every prompt; an empty text becomes the model's BOS where it has one."""
    found = []
    for prompt in wish.prompts:
        ids = prompt
        if isinstance(ids, str):
            ids = await generator.encode(ids, add_special_tokens=wish.add_special_tokens)
            if not ids and generator.tokenizer.bos_token_id is not None:
                ids = [generator.tokenizer.bos_token_id]
        found.append(ids)
    return found


ROUTES = [web.post("/v1/completions", completions)]
