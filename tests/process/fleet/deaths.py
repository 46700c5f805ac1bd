"""Load on a fleet whose replicas end and come back, and what may become of a request then."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import aiohttp

from tests.process.fleet.asking import (
    PATIENCE_S,
    Answer,
    Question,
    ask,
    ask_all,
    client_session,
    prefix,
)

END_S = 2.0  # after a death, by when the streams that it cut off must have ended
MAX_TOKENS = 60  # about as many characters
QUESTIONS = [Question(f"{prefix(n % 6, 100)} and {n}", MAX_TOKENS) for n in range(24)]


class Load:
    """Clients that ask one after the other, each as soon as it has its answer.

    Args: requests: how many in all; None: until the block ends.
    """

    def __init__(self, url: str, clients: int, requests: int | None = None) -> None:
        self.answers: list[tuple[Question, Answer]] = []
        self._url = url
        self._clients = clients
        self._left = itertools.count() if requests is None else iter(range(requests))
        self._endless = requests is None
        self._heard = threading.Condition()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._endless:
            self._left = iter(())
        self._thread.join()

    def wait_for_characters(self, count: int) -> None:
        """Until all answers together have so many."""

        def there() -> bool:
            return sum(len(answer.text) for _, answer in self.answers) >= count

        with self._heard:
            assert self._heard.wait_for(there, timeout=PATIENCE_S), f"fewer than {count} came"

    def _tell(self) -> None:
        with self._heard:
            self._heard.notify_all()

    async def _run(self) -> None:
        async with client_session() as client, asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._ask_on(client))

    async def _ask_on(self, client: aiohttp.ClientSession) -> None:
        while (number := next(self._left, None)) is not None:
            question = QUESTIONS[number % len(QUESTIONS)]
            got = Answer(heard=self._tell)
            self.answers.append((question, got))
            await ask(client, self._url, question, got)


def kill_while_it_answers(url: str, pids: Sequence[int], draw: random.Random) -> Death:
    """All questions at once, most of which wait; at a random token of all, a process is killed."""
    number = draw.randrange(len(pids))
    enough = draw.randrange(len(QUESTIONS) * MAX_TOKENS * 2 // 3)
    with Load(url, len(QUESTIONS), len(QUESTIONS)) as load:
        load.wait_for_characters(enough)
        os.kill(pids[number], signal.SIGKILL)
        death = Death(number, time.monotonic(), load.answers)
    return death


@dataclass(frozen=True, slots=True)
class Death:
    """Args: number: of the replica. at_s: on the clock of `time.monotonic`. answers: around it."""

    number: int
    at_s: float
    answers: list[tuple[Question, Answer]]

    @property
    def last_cut_s(self) -> float:
        """After it, when the last of the streams that it cut off had ended; 0 without any."""
        cut = [answer.ended_s for _, answer in self.answers if not answer.complete]
        return max(cut, default=self.at_s) - self.at_s


def answers_of(url: str) -> dict[Question, str]:
    """What a single process answers."""
    return dict(zip(QUESTIONS, (answer.text for answer in ask_all(url, QUESTIONS)), strict=True))


def what_is_wrong(
    answers: Sequence[tuple[Question, Answer]], expected: dict[Question, str], death_s: float | None
) -> list[str]:
    """A line for each answer that is not as it may be: the one expected, or, after a death, a
    beginning of it of which the client was told in time that it is no more than that."""
    faults = [
        (question, answer, _fault(answer, expected[question], death_s))
        for question, answer in answers
    ]
    return [
        f"{question.prompt!r}: {fault}: {answer}" for question, answer, fault in faults if fault
    ]


def _fault(answer: Answer, whole: str, death_s: float | None) -> str | None:
    if answer.status != 200:
        return "it had not begun and did not succeed elsewhere"
    if answer.complete:
        return None if answer.text == whole else f"it should be {whole!r}"
    if not answer.text:
        return "it had not begun and was cut off"
    if not whole.startswith(answer.text.rstrip("\ufffd")):
        return f"it is no beginning of {whole!r}"
    if death_s is None or not 0 <= answer.ended_s - death_s <= END_S:
        return f"it ended at {answer.ended_s}, and a replica at {death_s}"
    return None
