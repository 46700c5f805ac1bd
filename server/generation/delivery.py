"""Turns what a step gave into text in the streams of the requests that wait for it.

Whatever goes wrong here for one request ends that one alone: its client gets an error, and the
scheduler is told.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from runtime.errors import GenerationFailed, LoomserveError
from runtime.request import Finish, FinishReason
from server.generation.pace import Pace
from server.generation.timeline import TIMED_LAPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.request import RequestOutput
    from runtime.scheduling.scheduler import Scheduler
    from server.generation.metrics import Metrics
    from server.generation.output import ChoiceOutput

log = logging.getLogger("loomserve.engine")


class Delivery:
    """Hands the choices that are being generated their tokens, until each has ended.

    Args: wake: called when the scheduler may go on with a request that it could not go on with.

    Attributes:
        live: the choices, by their requests' ids.
        masked: how many of them need token masks.
        timed: how long making and writing text takes is noted in each request's timeline.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: Metrics,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.live: dict[str, ChoiceOutput] = {}
        self.masked = 0
        self.timed = False
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock
        self._wake = wake

    def follow(self, choice: ChoiceOutput) -> None:
        """Takes on a choice that the scheduler has."""
        self.live[choice.request.request_id] = choice
        self.masked += choice.masked
        if choice.matcher is not None:
            choice.matcher.start(lambda: self._grammar_known(choice))

    async def step(self, news: list[RequestOutput], now: float) -> None:
        """Delivers what a step gave; others may run between two rows."""
        pace = Pace()
        for output in news:
            if pace.due():
                await pace.rest()
            self._one(output, now)

    def at_once(self, news: list[RequestOutput], now: float) -> None:
        """Delivers what the scheduler tells of requests beside a step."""
        for output in news:
            self._one(output, now)

    def close(self, choice: ChoiceOutput, finish: Finish) -> None:
        """Ends a choice from outside; its rows and pages follow when no step names them."""
        try:
            choice.close(finish)
        except Exception as error:
            self.fail(choice, error)
        else:
            self._leave(choice)

    def fail(self, choice: ChoiceOutput, error: Exception) -> None:
        """Ends a choice that cannot go on, with the error its client gets."""
        request_id = choice.request.request_id
        if isinstance(error, LoomserveError):
            told = error
        else:
            log.error("request %s failed", request_id, exc_info=error)
            told = GenerationFailed(
                f"the output cannot be processed: internal error ({kind_of(error)})"
            )
        self._scheduler.finish(request_id, Finish(FinishReason.ERROR, message=str(told)))
        self._leave(choice)
        choice.stream.fail(told)

    def fail_all(self, error: LoomserveError) -> None:
        """Ends every choice with an error. The scheduler is not told."""
        for choice in list(self.live.values()):
            self._leave(choice)
            choice.stream.fail(error)

    def _one(self, output: RequestOutput, now: float) -> None:
        choice = self.live.get(output.request.request_id)
        if choice is None:  # ended already: a late token of the step in flight
            return
        try:
            if self.timed and not choice.completion_tokens & TIMED_LAPS:
                finish = self._advance_timed(choice, output)
            else:
                finish = choice.advance(output)
            self._metrics.tokens(choice, len(output.token_ids), now)
        except Exception as error:
            self.fail(choice, error)
            return
        if finish is not None:
            if finish is not output.finish:  # found in the text: the scheduler must be told
                self._scheduler.finish(output.request.request_id, finish)
            self._leave(choice)

    def _advance_timed(self, choice: ChoiceOutput, output: RequestOutput) -> Finish | None:
        begun = self._clock()
        try:
            return choice.advance(output)
        finally:
            choice.timeline.text.add(begun, self._clock())

    def _grammar_known(self, choice: ChoiceOutput) -> None:
        """A grammar that a request waits for is compiled, or cannot be enforced."""
        assert choice.matcher is not None
        if choice.matcher.refused is not None:
            self.fail(choice, choice.matcher.refused)
        self._wake()

    def _leave(self, choice: ChoiceOutput) -> None:
        """Nobody waits for a choice any more."""
        del self.live[choice.request.request_id]
        self.masked -= choice.masked
        try:
            if choice.matcher is not None:
                choice.matcher.close()
            now = self._clock()
            waited = self._scheduler.waited_seconds(choice.request)
            choice.timeline.end(now, choice.completion_tokens, waited)
            self._metrics.finished(choice, now)
        except Exception:
            log.exception("request %s could not be counted", choice.request.request_id)


def kind_of(error: BaseException) -> str:
    """What clients may know of an internal error: its kind, never its text."""
    return type(error).__name__
