"""The way out of one request: committed tokens become text, and text goes to the handler's task.

The engine gives and never waits. A reader that is slower than the model finds what it missed in
one piece: news of one choice are merged while nobody takes them, so a client that stops reading
holds at most the text of its own answer, and nobody else waits for it. What is long comes in
several pieces, between which its reader lets others run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from runtime.request import Finish, FinishReason
from server.generation.stop_rules import StopScanner
from server.generation.timeline import Timeline
from server.grammars.bits import forbid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from runtime.errors import LoomserveError
    from runtime.request import Request, RequestOutput, TokenLogprobs
    from server.generation.bad_words import BadWords
    from server.generation.stop_rules import StopRules
    from server.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """News of one choice.

    Args:
        index: of the choice, among those submitted together.
        text: characters that follow what was sent before.
        token_ids: tokens behind this text; also those whose text is hidden or was held back.
        logprobs: parallel to token_ids where the request asked for them, else empty.
        prompt_logprobs: parts of the prompt's in their order, before any token, where asked for.
        finish: set on the last delta of the choice.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: Finish | None = None

    def extend(self, later: Delta) -> None:
        """Appends news of the same choice."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish = later.finish


# What a reader takes at once: writing out 20 alternatives of each takes 3 ms of the event loop.
MOST_TOKENS = 128


def _pieces(delta: Delta) -> list[Delta]:
    """The same news, with a part of the prompt in each piece where it is long."""
    scored = delta.prompt_logprobs
    if scored is None or len(scored) <= MOST_TOKENS:
        return [delta]
    *before, delta.prompt_logprobs = (
        scored[begin : begin + MOST_TOKENS] for begin in range(0, len(scored), MOST_TOKENS)
    )
    return [*(Delta(delta.index, prompt_logprobs=part) for part in before), delta]


class RequestStream:
    """All choices of one request, read by one task as they come.

    Args:
        requests: the engine's requests, by choice index; their token counts give the usage.
        received_s: when the client's request was read, on the engine's clock.

    Attributes: timelines: parallel to requests.
    """

    __slots__ = ("_error", "_pending", "_unfinished", "_waiter", "requests", "timelines")

    def __init__(self, requests: Sequence[Request], received_s: float) -> None:
        self.requests = requests
        self.timelines = [Timeline(request, received_s) for request in requests]
        self._pending: dict[int, list[Delta]] = {}
        self._unfinished = len(requests)
        self._waiter: asyncio.Future[None] | None = None
        self._error: LoomserveError | None = None

    def put_nowait(self, delta: Delta) -> None:
        """Adds news; wakes the reader."""
        waiting = self._pending.get(delta.index)
        if waiting is None:
            self._pending[delta.index] = _pieces(delta)
        elif len(waiting[-1].token_ids) < MOST_TOKENS:
            waiting[-1].extend(delta)
        else:
            waiting.append(delta)
        self._wake()

    @property
    def unread_tokens(self) -> int:
        """Tokens of the news that nobody has taken yet."""
        deltas = (delta for waiting in self._pending.values() for delta in waiting)
        return sum(len(delta.token_ids) + len(delta.prompt_logprobs or ()) for delta in deltas)

    def fail(self, error: LoomserveError) -> None:
        """Ends the stream: the reader gets what is pending, then the error."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[Delta]:
        """The news since the last call, waiting for some; empty once every choice has ended.

        Raises: LoomserveError: the engine cannot go on with this request.
        """
        while not self._pending:
            if not self._unfinished:
                return []
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news = [delta for waiting in self._pending.values() for delta in waiting]
        self._pending.clear()
        for delta in news:
            if delta.finish is not None:
                self._unfinished -= 1
        return news


class Matcher(Protocol):
    """A grammar that the output follows, at one request's position in it. It may still be
    compiling: then the request waits in the queue until it is `ready`, or ends because it is
    `refused`.

    `fill_mask` takes one row of int32 words, bit t % 32 of word t // 32 allowing token t.
    """

    @property
    def failed(self) -> LoomserveError | None: ...

    @property
    def refused(self) -> LoomserveError | None: ...

    @property
    def ready(self) -> bool: ...

    def start(self, when_known: Callable[[], None]) -> None: ...

    def close(self) -> None: ...

    def fill_mask(self, bits: NDArray[np.int32]) -> None: ...

    def accept(self, token_id: int) -> None: ...

    def is_terminated(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRules:
    """What rules the output of a request's choices beside the sampler.

    Args:
        include_stop: the text shows what ends it, be that a stop or a token.
        skip_special_tokens: special tokens do not show in the text.
    """

    stops: StopRules | None = None
    include_stop: bool = False
    bad_words: BadWords | None = None
    skip_special_tokens: bool = True


class ChoiceOutput:
    """The output side of one choice: committed tokens become text, stops are found, deltas go out.

    Args: index: of its request among the stream's.

    Attributes:
        matcher: of the grammar that the output follows, or None.
        completion_tokens: tokens delivered; the usage figure.
        masked: its steps need token masks.
        timeline: what is noted of its time.
    """

    __slots__ = (
        "_bad_words",
        "_delta",
        "_detokenizer",
        "_include_stop",
        "_min_tokens",
        "_scanner",
        "completion_tokens",
        "index",
        "masked",
        "matcher",
        "request",
        "stream",
        "timeline",
    )

    def __init__(
        self, index: int, stream: RequestStream, rules: ChoiceRules, tokenizer: Tokenizer
    ) -> None:
        request = stream.requests[index]
        self.request = request
        self.stream = stream
        self.index = index
        self.timeline = stream.timelines[index]
        self.completion_tokens = 0
        # To the scheduler it is something that gets ready; here is who made it.
        self.matcher = cast("Matcher | None", request.grammar)
        self.masked = self.matcher is not None or rules.bad_words is not None
        self._bad_words = rules.bad_words
        self._include_stop = rules.include_stop
        self._scanner = None
        if rules.stops is not None:
            self._scanner = StopScanner(rules.stops, include=rules.include_stop)
        self._min_tokens = request.sampling.min_tokens
        self._detokenizer = tokenizer.detokenizer(
            request.input_ids, skip_special_tokens=rules.skip_special_tokens
        )
        self._delta = Delta(index)  # tokens whose text is not decided yet

    def advance(self, output: RequestOutput) -> Finish | None:
        """Takes news of the scheduler and sends what they make visible.

        Returns: how the choice ended, if it did; that may be a stop which the scheduler, seeing
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
        self.timeline.finish = finish.reason.value
        self.stream.put_nowait(delta)

    def fill_mask(self, bits: NDArray[np.int32]) -> None:
        """Writes which tokens may come next into a row that allows all.

        Raises: LoomserveError: the grammar cannot go on.
        """
        if self.matcher is not None:
            self.matcher.fill_mask(bits)
            if self.matcher.failed is not None:
                raise self.matcher.failed
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
        return None if self.matcher is None else self._follow_grammar(token_id, finish)

    def _follow_grammar(self, token_id: int, finish: Finish | None) -> Finish | None:
        matcher = self.matcher
        assert matcher is not None
        matcher.accept(token_id)
        if matcher.failed is not None:
            raise matcher.failed
        # Complete on the last allowed token is complete, not cut.
        if (finish is None or finish.reason is FinishReason.LENGTH) and matcher.is_terminated():
            return Finish(FinishReason.STOP)
        return None
