"""Synthetic arrivals, and those read from a file of lengths."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from statistics import mean
from typing import TYPE_CHECKING

import pytest

from runtime.errors import ConfigError
from runtime.simulation.virtual_clock import VirtualClock
from runtime.simulation.workloads import Workload, read_length_trace

if TYPE_CHECKING:
    from pathlib import Path


def test_clock_jumps_forward_only() -> None:
    clock = VirtualClock(5.0)
    clock.advance_to(7.5)
    assert clock.now == 7.5
    with pytest.raises(ValueError, match=r"from 7\.5 s to 7\.0 s"):
        clock.advance_to(7.0)


def test_one_seed_gives_the_same_requests_each_time() -> None:
    workload = Workload(requests=50, rate=10.0, seed=4)
    assert workload.arrivals() == workload.arrivals()
    assert workload.arrivals() != Workload(requests=50, rate=10.0, seed=5).arrivals()


def test_poisson_arrivals_have_their_rate_and_spans() -> None:
    made = Workload(
        requests=4000, rate=20.0, input_tokens=(10, 30), output_tokens=(5, 7)
    ).arrivals()
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(made)]
    assert mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert {len(a.input_ids) for a in made} == set(range(10, 31))
    assert {a.output_tokens for a in made} == {5, 6, 7}


def test_bursts_arrive_together() -> None:
    made = Workload(requests=10, rate=1.0, burst=4).arrivals()
    times = [a.arrival_s for a in made]
    assert [times.count(t) for t in dict.fromkeys(times)] == [4, 4, 2]


def test_groups_share_exactly_their_prefix() -> None:
    made = Workload(
        requests=300, prefix_groups=3, prefix_tokens=40, input_tokens=(10, 10), cold_share=0.2
    ).arrivals()
    warm = [a for a in made if len(a.input_ids) == 50]
    assert len({bytes(a.input_ids[:40]) for a in warm}) == 3
    assert len({bytes(a.input_ids[40:]) for a in warm}) == len(warm)
    assert len(made) - len(warm) == pytest.approx(60, abs=20)


def test_clients_may_ask_for_more_than_they_get() -> None:
    arrival = Workload(requests=1, output_tokens=(100, 100), max_new_factor=2.5).arrivals()[0]
    assert (arrival.output_tokens, arrival.max_new_tokens) == (100, 250)


def test_length_trace_is_read_in_order_of_time_with_shared_prefixes(tmp_path: Path) -> None:
    lines = [
        {
            "arrival_s": 2.0,
            "input_tokens": 30,
            "output_tokens": 4,
            "prefix": "a",
            "prefix_tokens": 20,
        },
        {
            "arrival_s": 1.0,
            "input_tokens": 25,
            "output_tokens": 3,
            "prefix": "a",
            "prefix_tokens": 20,
        },
        {
            "arrival_s": 1.5,
            "input_tokens": 9,
            "output_tokens": 2,
            "max_new_tokens": 64,
            "priority": -1,
        },
    ]
    path = tmp_path / "lengths.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    made = read_length_trace(path)
    assert [a.arrival_s for a in made] == [1.0, 1.5, 2.0]
    assert [len(a.input_ids) for a in made] == [25, 9, 30]
    assert made[0].input_ids[:20] == made[2].input_ids[:20]
    assert made[0].input_ids[20:25] != made[2].input_ids[20:25]
    assert (made[1].max_new_tokens, made[1].priority) == (64, -1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2: not JSON"),
        ("[]", "2: must be an object, is list"),
        ('{"input_tokens":1,"output_tokens":1}', "arrival_s None: must be seconds"),
        (
            '{"arrival_s":0,"input_tokens":0,"output_tokens":1}',
            "input_tokens 0: must be at least 1",
        ),
        (
            '{"arrival_s":0,"input_tokens":1,"output_tokens":"7"}',
            "output_tokens '7': must be a whole",
        ),
        (
            '{"arrival_s":0,"input_tokens":5,"output_tokens":1,"prefix":"x","prefix_tokens":6}',
            "prefix_tokens 6: more than input_tokens 5",
        ),
    ],
    ids=["json", "object", "arrival", "zero", "string", "prefix"],
)
def test_wrong_line_of_a_length_trace_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"arrival_s":0,"input_tokens":1,"output_tokens":1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_length_trace(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"requests": 0}, "requests 0: must be at least 1"),
        ({"requests": 1, "rate": -1.0}, "rate -1.0"),
        ({"requests": 1, "rate": math.nan}, "rate nan"),
        ({"requests": 1, "rate": math.inf}, "rate inf"),
        ({"requests": 1, "max_new_factor": math.nan}, "max_new_factor nan"),
        ({"requests": 1, "cold_share": math.nan}, "cold_share nan"),
        ({"requests": 1, "prefix_tokens": -1}, "prefix_tokens -1"),
        ({"requests": 1, "input_tokens": (9, 3)}, r"input_tokens \(9, 3\)"),
        ({"requests": 1, "max_new_factor": 0.5}, "max_new_factor 0.5"),
    ],
    ids=str,
)
def test_wrong_workload_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**fields)
