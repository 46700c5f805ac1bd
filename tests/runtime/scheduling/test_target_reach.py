"""Whether the target is within reach: a sequential test with a confidence and hysteresis."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from runtime.scheduling.step_time_model import TargetReach


def feed(reach: TargetReach, *steps: bool) -> list[bool | None]:
    answers = []
    for held in steps:
        reach.observe(held=held)
        answers.append(reach.within)
    return answers


def changes(answers: Sequence[bool | None]) -> int:
    return sum(a is not b for a, b in itertools.pairwise(answers))


def test_nothing_is_said_before_the_evidence_suffices() -> None:
    # 99 : 1 by misses of 20 % against 5 %: 4 ** 4 = 256 is beyond 99, 4 ** 3 = 64 is not.
    assert feed(TargetReach(), *[False] * 4) == [None, None, None, False]
    # By steps that held, 0.95 / 0.8 each: (19 / 16) ** 26 = 87, ** 27 = 103.
    assert feed(TargetReach(), *[True] * 27) == [None] * 26 + [True]


def test_an_answer_changes_only_when_the_evidence_has_turned() -> None:
    reach = TargetReach()
    feed(reach, *[True] * 1000)
    assert feed(reach, *[False] * 7) == [True] * 6 + [False]
    assert feed(reach, *[True] * 54) == [False] * 53 + [True]


@pytest.mark.parametrize(
    ("share", "within"), [(0.0, True), (0.05, True), (0.2, False), (1.0, False)]
)
def test_a_steady_share_of_misses_gets_a_steady_answer(share: float, within: bool) -> None:
    draw = random.Random(7)
    answers = feed(TargetReach(), *[draw.random() >= share for _ in range(5000)])
    known = [answer for answer in answers if answer is not None]
    assert known.count(within) > 0.99 * len(known)
    assert changes(known) <= 2


def test_misses_that_come_together_now_and_then_change_nothing() -> None:
    """The first step of each of six short prompts between two long ones, as recorded."""
    reach = TargetReach()
    rounds = [*[False, *[True] * 6] * 6, *[True] * 180]
    answers = feed(reach, *[True] * 60, *rounds * 10)
    assert changes(answers) == 1
    assert answers[-1] is True
