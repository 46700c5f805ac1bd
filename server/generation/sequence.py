"""One sequence on its way out: committed tokens become text, stops are found, deltas go out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from runtime.errors import GenerationFailed
from runtime.request import Finish, FinishReason
from server.generation.stop_rules import NO_STOPS, StopScanner
from server.generation.streams import Delta
from server.grammars.bits import forbid

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from runtime.errors import LoomserveError
    from runtime.request import RequestOutput, TokenLogprobs
    from server.generation.bad_words import BadWords
    from server.generation.stop_rules import StopRules
    from server.generation.streams import RequestStream
    from server.text.tokenizer import Tokenizer


class Grammar(Protocol):
    """A constraint on the output, at one request's position in it. It may still be compiling: then
    the request waits in the queue until it is `ready`, or ends because it is `refused`.

    `fill_mask` takes one row of int32 words, bit t % 32 of word t // 32 allowing token t.
    """

    failed: str | None
    refused: LoomserveError | None

    @property
    def ready(self) -> bool: ...

    def start(self, when_known: Callable[[], None]) -> None: ...

    def close(self) -> None: ...

    def fill_mask(self, bits: NDArray[np.int32]) -> None: ...

    def accept(self, token_id: int) -> None: ...

    def is_terminated(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRules:
    """What rules the output of a request's choices beside the sampler.

    Args: skip_special_tokens: special tokens do not show in the text.
    """

    stops: StopRules = NO_STOPS
    bad_words: BadWords | None = None
    skip_special_tokens: bool = True


class Sequence:
    """The output side of one request.

    Args: index: of its request among the stream's.

    Attributes:
        grammar: what constrains the output, or None.
        completion_tokens: tokens delivered; the usage figure.
        masked: its steps need token masks.
        arrival_s, first_token_s, last_token_s: moments on the engine's clock; the latter two None
            before the first token.
    """

    __slots__ = (
        "_bad_words",
        "_delta",
        "_detokenizer",
        "_include_stop",
        "_min_tokens",
        "_scanner",
        "arrival_s",
        "completion_tokens",
        "first_token_s",
        "grammar",
        "index",
        "last_token_s",
        "masked",
        "request",
        "stream",
    )

    def __init__(
        self, index: int, stream: RequestStream, rules: OutputRules, tokenizer: Tokenizer
    ) -> None:
        request = stream.requests[index]
        self.request = request
        self.stream = stream
        self.index = index
        self.arrival_s = request.arrival_s
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.completion_tokens = 0
        # To the scheduler it is something that gets ready; here is who made it.
        self.grammar = cast("Grammar | None", request.grammar)
        self.masked = self.grammar is not None or rules.bad_words is not None
        self._bad_words = rules.bad_words
        self._scanner = StopScanner(rules.stops) if rules.stops else None
        self._include_stop = rules.stops.include_in_output
        self._min_tokens = request.sampling.min_tokens
        self._detokenizer = tokenizer.detokenizer(
            request.input_ids, skip_special_tokens=rules.skip_special_tokens
        )
        self._delta = Delta(index)  # tokens whose text is not decided yet

    def advance(self, output: RequestOutput) -> Finish | None:
        """Takes news of the scheduler and sends what they make visible.

        Returns: how the sequence ended, if it did; that may be a stop which the scheduler, seeing
            tokens only, does not know of.
        Raises: GenerationFailed: the grammar cannot go on. InvalidRequest: a stop expression takes
            too long.
        """
        delta, finish = self._delta, output.finish
        if output.prompt_logprobs is not None:
            delta.prompt_logprobs = output.prompt_logprobs
        last = len(output.token_ids) - 1
        for position, token_id in enumerate(output.token_ids):
            logprobs = None if output.logprobs is None else output.logprobs[position]
            stopped = self._take(token_id, logprobs, finish if position == last else None)
            if stopped is not None:
                finish = stopped
                break
        if finish is not None:
            self.close(finish)
        elif delta.text:
            self._delta = Delta(self.index)
            self.stream.put_nowait(delta)
        return finish

    def close(self, finish: Finish) -> None:
        """Sends the last delta: text that was held back, unless a stop cut it, and the reason."""
        delta = self._delta
        cut = finish.reason is not FinishReason.STOP
        if self._scanner is None:
            delta.text += self._detokenizer.flush(cut=cut)
        elif self._scanner.matched is None:
            delta.text += self._scanner.feed(self._detokenizer.flush(cut=cut))
            delta.text += self._scanner.flush()
        delta.finish = finish
        self.stream.put_nowait(delta)

    def fill_mask(self, bits: NDArray[np.int32]) -> None:
        """Writes which tokens may come next into a row that allows all.

        Raises: GenerationFailed: the grammar cannot go on.
        """
        if self.grammar is not None:
            self.grammar.fill_mask(bits)
            if self.grammar.failed is not None:
                raise GenerationFailed(self.grammar.failed)
        if self._bad_words is not None:
            forbid(bits, self._bad_words.completing(self.request.output_ids))

    def _take(
        self, token_id: int, logprobs: TokenLogprobs | None, finish: Finish | None
    ) -> Finish | None:
        """Takes one token; a finish where it completes a stop or the grammar."""
        delta = self._delta
        delta.token_ids.append(token_id)
        if logprobs is not None:
            delta.logprobs.append(logprobs)
        self.completion_tokens += 1
        ends_here = finish is not None and finish.reason is FinishReason.STOP
        if not ends_here or self._include_stop:
            text = self._detokenizer.feed(token_id)
            if self._scanner is None or self.completion_tokens < self._min_tokens:
                delta.text += text
            elif text:
                delta.text += self._scanner.feed(text)
                if self._scanner.matched is not None:
                    return Finish(FinishReason.STOP, matched=self._scanner.matched)
        return None if self.grammar is None else self._follow_grammar(token_id, finish)

    def _follow_grammar(self, token_id: int, finish: Finish | None) -> Finish | None:
        grammar = self.grammar
        assert grammar is not None
        grammar.accept(token_id)
        if grammar.failed is not None:
            raise GenerationFailed(grammar.failed)
        # Complete on the last allowed token is complete, not cut.
        if (finish is None or finish.reason is FinishReason.LENGTH) and grammar.is_terminated():
            return Finish(FinishReason.STOP)
        return None
