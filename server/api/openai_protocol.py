"""OpenAI request bodies to parameters. Knows no aiohttp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.errors import InvalidRequest, ModelNotFound, wrong
from runtime.request import SamplingParams
from server.api.body_fields import BodyFields, check_token_ids
from server.formats.chat_messages import parse_messages
from server.generation.params import ApiLimits, GenerationParams
from server.generation.stop_rules import compile_stops

if TYPE_CHECKING:
    from server.text.chat_template import Message

# Below this a temperature is greedy: the quotient of two logits would overflow float32.
GREEDY_TEMPERATURE = 1e-4
DEFAULT_COMPLETION_TOKENS = 16
# Beyond these a float32 logit would become 0 or infinite.
MAX_TEMPERATURE = 1e3
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
MAX_STOPS = 16
MAX_SEQUENCES = 1024  # of one request: prompts times choices
SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """/v1/completions. prompts: texts or token ids, at least one."""

    prompts: list[str | list[int]]
    params: GenerationParams
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """/v1/chat/completions. render: options of `ChatTemplate.render`."""

    messages: list[Message]
    render: dict[str, Any]
    params: GenerationParams


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
        "max_tokens", low=0 if echo else 1, default=DEFAULT_COMPLETION_TOKENS
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


def parse_chat(body: Any, limits: ApiLimits) -> ChatRequest:
    """Raises: InvalidRequest: a field that is wrong. ModelNotFound."""
    fields = BodyFields(body)
    check_model(fields, limits)
    messages = parse_messages(fields.get("messages"))
    max_tokens = fields.integer("max_completion_tokens", low=1)
    if max_tokens is None:
        max_tokens = fields.integer("max_tokens", low=1)
    top = fields.integer("top_logprobs", low=0, high=limits.max_logprobs)
    wanted = fields.boolean("logprobs")
    if top is not None and not wanted:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    n = fields.integer("n", low=1, high=limits.max_n, default=1) or 1
    params = generation_params(
        fields, limits, max_tokens=max_tokens, logprobs=(top or 0) if wanted else None, n=n
    )
    return ChatRequest(messages=messages, render=render_options(fields, messages), params=params)


def render_options(fields: BodyFields, messages: list[Message]) -> dict[str, Any]:
    """How a chat template is to render the conversation.

    Raises: InvalidRequest: both a generation prompt and continuing the last message are wanted.
    """
    continued = fields.boolean("continue_final_message")
    if continued and fields.get("add_generation_prompt") is True:
        raise InvalidRequest(
            "continue_final_message: cannot be true together with add_generation_prompt",
            param="continue_final_message",
        )
    if continued and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message: the last message must be the assistant's, it is the"
            f" {messages[-1]['role']}'s",
            param="continue_final_message",
        )
    kwargs = fields.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise fields.error("chat_template_kwargs", "an object")
    return {
        "add_generation_prompt": fields.boolean("add_generation_prompt", not continued),
        "continue_final_message": continued,
        "kwargs": kwargs,
    }


def check_model(fields: BodyFields, limits: ApiLimits) -> None:
    """Raises: ModelNotFound: a model is named that is not the served one."""
    model = fields.string("model")
    if model is not None and model != limits.model:
        raise ModelNotFound(f"model: {model!r} does not exist; this server has {limits.model!r}")


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


def generation_params(
    fields: BodyFields,
    limits: ApiLimits,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    n: int = 1,
    best_of: int | None = None,
    echo: bool = False,
    hide_logprobs: bool = False,
) -> GenerationParams:
    """Parameters from the fields that every endpoint shares, and from those it reads itself."""
    options = fields.get("stream_options")
    usage = options is not None and BodyFields(options, "stream_options").boolean("include_usage")
    timeout = fields.number("timeout", 0.0, low=0.0)
    return GenerationParams(
        sampling=parse_sampling(
            fields,
            limits,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        stream=fields.boolean("stream"),
        include_usage=usage,
        include_wait_times=fields.boolean("include_wait_times"),
        n=n,
        best_of=best_of or n,
        stops=compile_stops(
            fields.strings("stop", most=MAX_STOPS),
            fields.strings("stop_regex", most=MAX_STOPS),
            fields.boolean("include_stop_str_in_output"),
        ),
        bad_words=fields.strings("bad_words", most=256),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        echo=echo,
        hide_output=max_tokens == 0,
        hide_logprobs=hide_logprobs,
        priority=fields.integer("priority", low=-(2**31), high=2**31 - 1, default=0) or 0,
        cache_salt=fields.string("cache_salt", "") or "",
        timeout_s=timeout or None,
    )


def parse_sampling(
    fields: BodyFields,
    limits: ApiLimits,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """How tokens are picked; the fields are the same on every endpoint."""
    temperature = fields.number("temperature", 1.0, low=0.0, high=MAX_TEMPERATURE)
    top_p = fields.number("top_p", 1.0, low=0.0, high=1.0)
    top_k = fields.integer("top_k", low=-1, default=0) or 0
    # Nothing but the likeliest token has a cumulative probability of 0 before it.
    top_k = 1 if top_p == 0.0 else min(max(top_k, 0), limits.vocab_size)
    seed = fields.integer("seed", low=-(2**63), high=2**64 - 1)
    most = max_tokens if max_tokens is not None else limits.context_length
    return SamplingParams(
        max_new_tokens=1 if max_tokens == 0 else max_tokens,
        temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
        top_p=top_p if top_p > 0.0 else 1.0,
        top_k=top_k,
        min_p=fields.number("min_p", 0.0, low=0.0, high=1.0),
        seed=None if seed is None else seed & SEED_MASK,
        presence_penalty=fields.number("presence_penalty", 0.0, low=-2.0, high=2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-2.0, high=2.0),
        repetition_penalty=fields.number(
            "repetition_penalty", 1.0, low=MIN_REPETITION_PENALTY, high=MAX_REPETITION_PENALTY
        ),
        logit_bias=_logit_bias(fields, limits.vocab_size),
        stop_token_ids=frozenset(fields.token_ids("stop_token_ids", limits.vocab_size)),
        ignore_eos=fields.boolean("ignore_eos"),
        min_tokens=fields.integer("min_tokens", low=0, high=most, default=0) or 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _logit_bias(fields: BodyFields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    value = fields.get("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise fields.error("logit_bias", "an object of token ids and numbers from -100 to 100")
    pairs = []
    for key in value:
        token_id = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else -1
        check_token_ids([token_id if token_id >= 0 else key], vocab_size, "logit_bias")
        bias = BodyFields(value, "logit_bias").number(key, 0.0, low=-100.0, high=100.0)
        pairs.append((token_id, bias))
    return tuple(pairs)
