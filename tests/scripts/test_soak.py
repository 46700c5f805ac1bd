"""What the soak takes for flat."""

from __future__ import annotations

from scripts.soak import Sample, judge


def samples(memory, **changes):
    values = {"files": 14, "threads": 6, "tasks": 9, "connections": 0, "kv_lost": 0, **changes}
    return [Sample(at_s=60.0 * i, memory_mib=one, **values) for i, one in enumerate(memory)]


def test_what_is_filled_once_is_no_growth():
    assert judge(samples([200, 300, 301, 300, 302, 301, 302])) == []


def test_growth_is_told():
    (told,) = judge(samples([200, 300, 302, 305, 306, 308, 310]))
    assert told == "memory_mib grew from 301.0 to 309.0"


def test_a_task_that_each_look_finds_more_of_is_told():
    grown = [one for i in range(7) for one in samples([300] * 7, tasks=9 + i)[i : i + 1]]
    assert judge(grown) == ["tasks grew from 10.5 to 14.5"]


def test_kv_that_is_lost_is_told_once_for_each_look():
    assert judge(samples([300] * 5, kv_lost=16)) == [
        f"16 KV tokens are lost after {60 * i} s" for i in range(5)
    ]


def test_a_short_run_tells_nothing():
    assert judge(samples([300, 300])) == ["too short to tell whether anything grows"]
