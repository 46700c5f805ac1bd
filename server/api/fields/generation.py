"""Fields that every generating body has, and what they ask of the generation core: how the request
is served, how tokens are picked, where the text ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.errors import InvalidRequest, ModelNotFound, shown
from runtime.request import SamplingParams
from server.api.fields.bodies import Body, Record, ignored, refused, served
from server.api.fields.grammar import GrammarFields
from server.api.fields.kinds import (
    CONTEXT_LENGTH,
    MAX_N,
    Boolean,
    Integer,
    LogitBias,
    Number,
    ServerBound,
    Text,
    Texts,
    TokenIds,
)
from server.api.fields.unserved import ANSWER, PROMPT, SAMPLING, SERVING
from server.generation import stop_expressions, stop_rules
from server.generation.params import GenerationParams
from server.generation.stop_rules import compile_stops

if TYPE_CHECKING:
    from server.generation.params import ApiLimits
    from server.generation.stop_rules import StopRules

# Below this a temperature is greedy: the quotient of two logits would overflow float32.
GREEDY_TEMPERATURE = 1e-4
STOPS = Texts(most=16, altogether=stop_rules.MAX_CHARACTERS)
# Every choice of a request has a set of its own.
MAX_STOP_TOKENS = 1024
EXPRESSIONS = Texts(
    most=16,
    longest=stop_expressions.MAX_CHARACTERS,
    altogether=stop_expressions.MAX_CHARACTERS,
)


def from_model(name: str, otherwise: str) -> ServerBound:
    """The default of a field that a model may set."""
    told = f"the model's, else {otherwise}"
    return ServerBound(told, lambda limits: getattr(limits.defaults, name))


class ModelField(Body):
    """Which model is meant."""

    model = served(Text(), "the served model's name; may be left out")

    def check(self, where: str, limits: ApiLimits) -> None:
        super().check(where, limits)
        if self.model is not None:
            check_model(self.model, limits)


def check_model(name: str, limits: ApiLimits) -> None:
    """Raises: ModelNotFound: a model is named that is not the served one."""
    if name not in limits.names:
        served = ", ".join(map(repr, limits.names))
        raise ModelNotFound(f"model: {shown(name)} does not exist; this server has {served}")


class RequestFields(ModelField):
    """How a request is served."""

    stream = served(Boolean(), "the answer comes as events, while it is made", default=False)
    priority = served(Integer(-(2**31), 2**31 - 1), "larger is served first", default=0)
    cache_salt = served(Text(), "requests of different salts share no cached prefix")
    timeout = served(Number(0), "seconds from arrival to the end; 0: the server's", default=0.0)
    include_wait_times = served(
        Boolean(), "usage tells what the request waited for, and how long", default=False
    )
    request_id = served(
        Text(), "a name for /abort_request; need not be unique", names=("request_id", "rid")
    )
    unserved = (*PROMPT, *ANSWER, *SERVING)


class SamplingFields(Body):
    """How tokens are picked and where the text ends."""

    temperature = served(
        # Beyond 1000 a float32 logit would become 0.
        Number(0, 1000),
        "0 is greedy; larger is more varied",
        default=from_model("temperature", "1"),
    )
    top_p = served(
        Number(0, 1),
        "the likeliest tokens that have this probability together",
        default=from_model("top_p", "1"),
    )
    top_k = served(
        Integer(-1),
        "so many of the likeliest tokens; 0 and -1: all",
        default=from_model("top_k", "0"),
    )
    min_p = served(
        Number(0, 1),
        "tokens at least this likely, as a share of the likeliest's probability",
        default=from_model("min_p", "0"),
    )
    seed = served(Integer(-(2**63), 2**64 - 1), "same seed, same text, whatever else runs")
    presence_penalty = served(Number(-2, 2), "off the logits of tokens in the output", default=0.0)
    frequency_penalty = served(
        Number(-2, 2), "off the logits, for each time that a token is in the output", default=0.0
    )
    repetition_penalty = served(
        Number(0.001, 1000),
        "divides the logits of tokens in prompt and output",
        default=from_model("repetition_penalty", "1"),
        names=("repetition_penalty", "repeat_penalty"),
    )
    logit_bias = served(LogitBias(), "added to the logits of these tokens")
    bad_words = served(Texts(most=256), "texts that must not be written")
    stop = served(STOPS, "texts that end the output")
    stop_regex = served(
        EXPRESSIONS, "regular expressions, as RE2 has them, whose match ends the output"
    )
    stop_token_ids = served(
        TokenIds(most=MAX_STOP_TOKENS), "tokens that end the output, beside the model's own"
    )
    include_stop_str_in_output = served(
        Boolean(),
        "the text that ends the output is part of it",
        default=False,
        names=("include_stop_str_in_output", "no_stop_trim"),
    )
    ignore_eos = served(Boolean(), "the model's own end does not end the output", default=False)
    min_tokens = served(
        Integer(0, CONTEXT_LENGTH), "no token ends the output before so many", default=0
    )
    skip_special_tokens = served(Boolean(), "the text shows no special tokens", default=True)
    unserved = SAMPLING

    def stop_rules(self) -> StopRules | None:
        """Raises: InvalidRequest: an expression that cannot be compiled."""
        if not self.stop and not self.stop_regex:
            return None
        return compile_stops(self.stop or (), self.stop_regex or ())

    def sampling(
        self, limits: ApiLimits, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """How tokens are picked. Args: logprobs: alternatives per token; None: off."""
        # Nothing but the likeliest token has a cumulative probability of 0 before it.
        top_k = 1 if self.top_p == 0.0 else min(max(self.top_k, 0), limits.vocab_size)
        return SamplingParams(
            max_new_tokens=1 if max_tokens == 0 else max_tokens,
            temperature=0.0 if self.temperature < GREEDY_TEMPERATURE else self.temperature,
            top_p=self.top_p if self.top_p > 0.0 else 1.0,
            top_k=top_k,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or (),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            logprobs=logprobs,
        )


class GeneratingBody(SamplingFields, GrammarFields, RequestFields):
    """A body that asks for text: the fields of sampling, grammars and requests that all protocols
    but `/generate` share."""

    def params(
        self,
        limits: ApiLimits,
        max_tokens: int | None,
        *,
        default_tokens: int | None = None,
        logprobs: int | None = None,
    ) -> GenerationParams:
        """Parameters of the generation core. Args: default_tokens: the endpoint's own."""
        return generation_params(
            self,
            self,
            limits,
            max_tokens,
            default_tokens=default_tokens,
            logprobs=logprobs,
        )


def generation_params(
    request: RequestFields,
    sampling: SamplingFields,
    limits: ApiLimits,
    max_tokens: int | None,
    *,
    default_tokens: int | None = None,
    logprobs: int | None = None,
) -> GenerationParams:
    """Parameters from the fields that every endpoint has.

    Args:
        max_tokens: as the request says. default_tokens: as the endpoint has it; a model's own
            default comes before it.
        logprobs: alternatives per token; None: no log-probabilities.

    Raises: InvalidRequest: more tokens at least than at most, or a wrong stop expression.
    """
    default_tokens = limits.defaults.max_new_tokens or default_tokens
    most = default_tokens if max_tokens is None else max_tokens
    if most is not None and sampling.min_tokens > most:
        name = type(sampling).min_tokens.names[0]
        raise InvalidRequest(
            f"{name}: got {sampling.min_tokens}, must be at most the {most} tokens allowed",
            param=name,
        )
    return GenerationParams(
        sampling=sampling.sampling(limits, max_tokens, logprobs),
        default_tokens=default_tokens,
        stream=request.stream,
        include_wait_times=request.include_wait_times,
        stops=sampling.stop_rules(),
        include_stop=sampling.include_stop_str_in_output,
        bad_words=sampling.bad_words or (),
        skip_special_tokens=sampling.skip_special_tokens,
        hide_output=max_tokens == 0,
        priority=request.priority,
        cache_salt=request.cache_salt or "",
        timeout_s=request.timeout or None,
    )


INCLUDE_TIMINGS = served(
    Boolean(),
    "the answer, streamed or whole, tells where its time has gone; the header"
    " X-Loomserve-Timings: 1 asks for the same on every endpoint",
    default=False,
)


INCLUDE_PROGRESS = served(
    Boolean(),
    "until the first token, events tell the place in the queue, the tokens of the prompt that are"
    " computed, and when the token is expected, at once and in place of keep-alives",
    default=False,
)


class StreamOptions(Body):
    include_usage = served(Boolean(), "a last event tells the usage", default=False)
    include_timings = INCLUDE_TIMINGS
    include_progress = INCLUDE_PROGRESS
    unserved = (
        *refused("usage is told at the end", "continuous_usage_stats"),
        *ignored("events are not padded", "include_obfuscation"),
    )


class OpenAIFields(GeneratingBody):
    """What the older two of OpenAI's endpoints have in common."""

    n = served(Integer(1, MAX_N), "answers to make", default=1, names=("n", "n_cmpl"))
    stream_options = served(Record(StreamOptions), "of the answer's events")
    unserved = refused("use echo with logprobs on /v1/completions", "prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def include_progress(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_progress

    @property
    def include_timings(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_timings
