"""Fields of how a request is served, and the parameters that a generating body amounts to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.errors import InvalidRequest, ModelNotFound, shown
from server.api.fields import Body, Record, ignored, refused, served
from server.api.grammar_fields import GrammarFields
from server.api.kinds import MAX_N, Boolean, Integer, Number, Text
from server.api.sampling_fields import SamplingFields
from server.api.unserved import ANSWER, PROMPT, SERVING
from server.generation.params import GenerationParams

if TYPE_CHECKING:
    from server.generation.params import ApiLimits


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


class GeneratingBody(SamplingFields, GrammarFields, RequestFields):
    """What every body of the known protocols has."""

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


class StreamOptions(Body):
    include_usage = served(Boolean(), "a last event tells the usage", default=False)
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
