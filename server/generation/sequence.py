"""One sequence on its way out: committed tokens become text, stops are found, deltas go out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from runtime.request import Finish, FinishReason
from server.generation.stop_rules import StopScanner
from server.generation.streams import Delta

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from runtime.request import Request, RequestOutput, SamplingParams, TokenLogprobs
    from server.generation.stop_rules import StopRules
    from server.generation.streams import RequestStream
    from server.text.tokenizer import Tokenizer


class Grammar(Protocol):
    """A constraint on the output, at one request's position in it.

    `fill_mask` takes one row of int32 words, bit t % 32 of word t // 32 allowing token t.
    """

    ready: bool
    failed: str | None

    def fill_mask(self, bits: NDArray[np.int32]) -> None: ...

    def accept(self, token_id: int) -> None: ...

    def is_terminated(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One sequence to generate: what `Engine.submit` needs to make a `Request`.

    Args:
        input_ids: the prompt, at least one token.
        skip_special_tokens: special tokens do not show in the text.
        deadline_s: on the engine's clock, or None.
        grammar: constrains the output; compiled already.
    """

    input_ids: list[int]
    sampling: SamplingParams
    stops: StopRules
    skip_special_tokens: bool = True
    priority: int = 0
    namespace: str = ""
    deadline_s: float | None = None
    grammar: Grammar | None = None


class Sequence:
    """The output side of one request.

    Attributes:
        completion_tokens: tokens delivered; the usage figure.
        masked: its steps need token masks.
        arrival_s, first_token_s, last_token_s: moments on the engine's clock; the latter two None
            before the first token.
    """

    __slots__ = (
        "_delta",
        "_detokenizer",
        "_grammar",
        "_include_stop",
        "_min_tokens",
        "_scanner",
        "arrival_s",
        "completion_tokens",
        "first_token_s",
        "index",
        "last_token_s",
        "masked",
        "request",
        "stream",
    )

    def __init__(
        self,
        request: Request,
        stream: RequestStream,
        index: int,
        spec: SequenceSpec,
        tokenizer: Tokenizer,
    ) -> None:
        self.request = request
        self.stream = stream
        self.index = index
        self.arrival_s = request.arrival_s
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.completion_tokens = 0
        self.masked = spec.grammar is not None or bool(spec.sampling.bad_words)
        self._grammar = spec.grammar
        self._scanner = StopScanner(spec.stops) if spec.stops else None
        self._include_stop = spec.stops.include_in_output
        self._min_tokens = spec.sampling.min_tokens
        self._detokenizer = tokenizer.detokenizer(
            spec.input_ids, skip_special_tokens=spec.skip_special_tokens
        )
        self._delta = Delta(index)  # tokens whose text is not decided yet

    def advance(self, output: RequestOutput) -> Finish | None:
        """Takes news of the scheduler and sends what they make visible.

        Returns: how the sequence ended, if it did; that may be a stop which the scheduler, seeing
        tokens only, does not know of.
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
        """Writes which tokens the grammar allows next."""
        assert self._grammar is not None
        self._grammar.fill_mask(bits)

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
        return None if self._grammar is None else self._follow_grammar(token_id, finish)

    def _follow_grammar(self, token_id: int, finish: Finish | None) -> Finish | None:
        grammar = self._grammar
        assert grammar is not None
        grammar.accept(token_id)
        if grammar.failed is not None:
            return Finish(FinishReason.ERROR, message=grammar.failed)
        # Complete on the last allowed token is complete, not cut.
        if (finish is None or finish.reason is FinishReason.LENGTH) and grammar.is_terminated():
            return Finish(FinishReason.STOP)
        return None
