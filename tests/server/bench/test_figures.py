"""Figures of answers with known times, recomputed from scratch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runtime.errors import ConfigError
from server.bench.answer import Answer
from server.bench.figures import spread_ms, summarize
from server.bench.own_load import OwnLoad
from server.bench.slo import Slo
from tests.server.bench.scripted import answered


def test_nothing_has_no_spread():
    assert spread_ms([]) is None


def test_one_answer_s_measures():
    """Written at 5 s; tokens after 0.5, 0.75 and 1.5 s, the end after 2 s."""
    answer = answered(5.0, 0.5, 0.75, 1.5, end=2.0)
    assert answer.ttft == 0.5
    assert answer.gaps == [0.25, 0.75]
    assert answer.tpot == 0.5
    assert answer.e2e == 2.0
    assert answered(0.0, 0.5).tpot is None
    several = answered(0.0, 0.5, 1.0, completion_tokens=11)  # several tokens in a chunk
    assert several.tpot == 0.05


def test_a_record_holds_seconds_from_the_run_s_beginning():
    record = answered(105.0, 0.5, 1.0, end=1.25, due=104.5).record(100.0)
    assert (record["due_s"], record["start_s"], record["end_s"]) == (4.5, 5.0, 6.25)
    assert (record["ttft_s"], record["tpot_s"], record["e2e_s"]) == (0.5, 0.5, 1.25)
    assert record["token_times_s"] == [5.5, 6.0]
    silent = Answer(4, start=1.0, end=2.0, error="timeout").record(0.0)
    assert (silent["ttft_s"], silent["tpot_s"], silent["error"]) == (None, None, "timeout")


def some_answers() -> list[Answer]:
    rng = random.Random(5)
    made = []
    for _ in range(40):
        times = np.cumsum([rng.expovariate(10.0) for _ in range(rng.randint(1, 12))])
        made.append(answered(rng.random() * 10, *times, end=times[-1] + 0.01, cached_tokens=3))
    return made


def test_a_summary_is_what_numpy_makes_of_the_answers():
    answers = some_answers()
    broken = answered(0.0, 9.0, error="HTTP 503: busy", completion_tokens=0)
    cut = answered(0.0, 8.0, cut=True)
    found = summarize([*answers, broken, cut], wall_s=20.0)
    assert (found["requests"], found["completed"], found["cut"]) == (42, 40, 1)
    assert found["errors"] == {"HTTP 503": 1}
    tokens = sum(len(answer.times) for answer in answers)
    assert found["output_tokens"] == tokens + 1  # the cut one's too
    assert found["output_tokens_per_s"] == pytest.approx((tokens + 1) / 20, abs=0.01)
    assert found["requests_per_s"] == 2.0
    assert found["cached_tokens"] == 120
    values = {
        "ttft_ms": [a.times[0] - a.start for a in answers],
        "itl_ms": np.concatenate([np.diff(a.times) for a in answers]),
        "tpot_ms": [(a.times[-1] - a.times[0]) / (len(a.times) - 1) for a in answers if a.gaps],
        "e2e_ms": [a.end - a.start for a in answers],
    }
    for name, seconds in values.items():
        milliseconds = np.array(seconds) * 1e3
        assert found[name]["mean"] == pytest.approx(milliseconds.mean(), abs=1e-3)
        assert found[name]["max"] == pytest.approx(milliseconds.max(), abs=1e-3)
        for percent in (50, 90, 99):
            expected = np.percentile(milliseconds, percent)
            assert found[name][f"p{percent}"] == pytest.approx(expected, abs=1e-3)


def test_how_late_requests_were_sent():
    found = summarize([answered(5.0, 1.0, due=4.9), answered(6.0, 1.0, due=6.0)], 10.0)
    assert found["late_ms"]["max"] == pytest.approx(100.0)
    assert summarize([answered(5.0, 1.0)], 10.0)["late_ms"] is None


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("ttft=500", True),
        ("ttft=499", False),
        ("tpot=500,ttft=9000", True),
        ("tpot=499,ttft=9000", False),
        ("itl=750", True),
        ("itl=749", False),
        ("e2e=2000", True),
        ("e2e=1999", False),
    ],
)
def test_an_slo_bounds_each_measure(text, met):
    assert Slo.parse(text).met_by(answered(0.0, 0.5, 0.75, 1.5, end=2.0)) is met


@pytest.mark.parametrize(
    ("answer", "met"),
    [
        (answered(0.0, 0.1, error="timeout"), False),
        (answered(0.0, 0.1, 0.2, end=0.4, cut=True), None),  # it might have kept it
        (Answer(4, start=0.0, end=0.3, cut=True), None),
        (Answer(4, start=0.0, end=0.6, cut=True), False),  # no first token in 600 ms
        (answered(0.0, 0.1, end=0.9, cut=True), False),  # no second one for 800 ms
    ],
)
def test_what_did_not_complete_is_judged_as_far_as_it_went(answer, met):
    assert Slo.parse("ttft=500,itl=700").met_by(answer) is met


def test_goodput_counts_the_answers_that_kept_every_bound():
    fast, slow = answered(0.0, 0.1, 0.2), answered(0.0, 0.6, 0.7)
    undecided = Answer(4, start=0.0, end=0.3, cut=True)
    found = summarize([fast, fast, fast, slow, undecided], 2.0, Slo.parse("ttft=500"))
    assert found["goodput_per_s"] == 1.5
    assert found["slo_attainment"] == 0.75
    assert summarize([undecided], 2.0, Slo.parse("ttft=500"))["slo_attainment"] is None


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=0", "ttft=inf", "size=3", "ttft=1;"])
def test_an_slo_that_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match="--slo"):
        Slo.parse(text)


@pytest.mark.parametrize(("work", "bottleneck"), [((0.1, 0.1), False), ((0.1, 0.45), True)])
def test_the_client_s_own_share_is_told_by_its_busiest_look(work, bottleneck):
    """Two looks of half a second, with this much processor time each."""
    now = [0.0, 0.0]
    own = OwnLoad(wall=lambda: now[0], cpu=lambda: now[1])
    for cpu_s in work:
        now[0] += 0.5
        now[1] += cpu_s
        own.look()
    found = own.summary()
    assert found["cpu_share"] == pytest.approx(sum(work))
    assert found["busiest_share"] == pytest.approx(max(work) / 0.5)
    assert found["bottleneck"] is bottleneck
