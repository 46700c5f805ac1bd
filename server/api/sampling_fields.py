"""The fields that every generating endpoint shares, to parameters of the generation core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.errors import ModelNotFound
from runtime.request import SamplingParams
from server.api.body_fields import BodyFields, check_token_ids
from server.generation.params import GenerationParams
from server.generation.stop_rules import compile_stops

if TYPE_CHECKING:
    from server.generation.params import ApiLimits

# Below this a temperature is greedy: the quotient of two logits would overflow float32.
GREEDY_TEMPERATURE = 1e-4
# Beyond these a float32 logit would become 0 or infinite.
MAX_TEMPERATURE = 1e3
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
MAX_STOPS = 16
SEED_MASK = 2**63 - 1


def check_model(fields: BodyFields, limits: ApiLimits) -> None:
    """Raises: ModelNotFound: a model is named that is not the served one."""
    model = fields.string("model")
    if model is not None and model != limits.model:
        raise ModelNotFound(f"model: {model!r} does not exist; this server has {limits.model!r}")


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
    defaults = limits.defaults
    temperature = fields.number("temperature", defaults.temperature, low=0.0, high=MAX_TEMPERATURE)
    top_p = fields.number("top_p", defaults.top_p, low=0.0, high=1.0)
    top_k = fields.integer("top_k", low=-1, default=defaults.top_k) or 0
    # Nothing but the likeliest token has a cumulative probability of 0 before it.
    top_k = 1 if top_p == 0.0 else min(max(top_k, 0), limits.vocab_size)
    seed = fields.integer("seed", low=-(2**63), high=2**64 - 1)
    most = max_tokens if max_tokens is not None else limits.context_length
    return SamplingParams(
        max_new_tokens=1 if max_tokens == 0 else max_tokens,
        temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
        top_p=top_p if top_p > 0.0 else 1.0,
        top_k=top_k,
        min_p=fields.number("min_p", defaults.min_p, low=0.0, high=1.0),
        seed=None if seed is None else seed & SEED_MASK,
        presence_penalty=fields.number("presence_penalty", 0.0, low=-2.0, high=2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-2.0, high=2.0),
        repetition_penalty=fields.number(
            "repetition_penalty",
            defaults.repetition_penalty,
            low=MIN_REPETITION_PENALTY,
            high=MAX_REPETITION_PENALTY,
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
