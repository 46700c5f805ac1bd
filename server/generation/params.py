"""What the generation core is asked for, whatever protocol asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.text.least_tokens import TokenLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.request import PromptPin, SamplingParams
    from server.generation.output import Matcher
    from server.generation.stop_rules import StopRules

# Making Python's integers of so many ids lets nobody else run for 20 ms.
MAX_COUNTED = 200_000

DEFAULT_MAX_LOGPROBS = 20
DEFAULT_MAX_N = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request gets that does not say otherwise; a model may bring its own.

    Args: max_new_tokens: None: the endpoint's own default.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """What a request may ask for, and what it gets where it does not.

    Args:
        model: the served name, which answers carry; aliases: further ones that requests may name.
        vocab_size: ids that prompts, biases and stops may name are below it.
    """

    model: str
    vocab_size: int
    context_length: int
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    max_n: int = DEFAULT_MAX_N
    defaults: SamplingDefaults = SamplingDefaults()
    aliases: tuple[str, ...] = ()

    @property
    def prompt(self) -> TokenLimit:
        """Tokens of a prompt."""
        length = self.context_length
        return TokenLimit(length, f"This model's maximum context length is {length} tokens")

    @property
    def counted(self) -> TokenLimit:
        """Tokens of a text that is tokenized to be looked at."""
        most = max(self.context_length, MAX_COUNTED)
        return TokenLimit(most, f"At most {most} tokens are counted")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model, *self.aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """What any endpoint asks of the generation core, beside the prompt.

    Args:
        n: choices to return. best_of: choices to generate, the likeliest n of which are returned.
        sampling: `seed` None means a seed drawn per choice.
        include_wait_times: the usage says what the request waited for, and how long.
        include_timings: the answer says where its time has gone.
        include_progress: its stream says how far it is, before its first token.
        echo: the answer begins with the prompt.
        hide_output: max_tokens was 0, so nothing of what is generated shows (echo, for scoring).
        hide_logprobs: sampling.logprobs is set for the server's own sake (best_of).
        default_tokens: of an answer, where sampling.max_new_tokens is None: so many, or as many as
            fit; None: as many as fit.
        timeout_s: from arrival to the end; None: the server's.
        include_stop: the text shows what ends it, be that a stop or a token.
        new_matcher: makes the matcher of one choice, where a grammar rules the output.
        pins: what of the prompt is to stay cached, the shortest first.
        goes_on: the prompt is a conversation in which there was an answer before.
    """

    sampling: SamplingParams
    stream: bool = False
    include_usage: bool = False
    include_wait_times: bool = False
    include_timings: bool = False
    include_progress: bool = False
    n: int = 1
    best_of: int = 1
    stops: StopRules | None = None
    include_stop: bool = False
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    echo: bool = False
    hide_output: bool = False
    hide_logprobs: bool = False
    priority: int = 0
    cache_salt: str = ""
    default_tokens: int | None = None
    timeout_s: float | None = None
    new_matcher: Callable[[], Matcher] | None = None
    pins: tuple[PromptPin, ...] = ()
    goes_on: bool = False
