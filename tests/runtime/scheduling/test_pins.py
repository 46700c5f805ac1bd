"""Prefixes that clients asked to be kept: what goes before what, for how long, and how much of it.

The pool of these tests has 200 tokens in pages of one, so a prompt of n tokens is n cached pages.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from runtime.request import PromptPin, Request
from runtime.scheduling.radix_tree import Place
from runtime.simulation.recorder import RecordingScheduler
from runtime.simulation.replay import replay
from runtime.simulation.trace import TraceWriter, config_from, read_trace
from tests.runtime.scheduling.scheduler_harness import Driver, config, request


def asking(name: str, tokens: int | list[int], *pins: PromptPin, **more: Any) -> Request:
    return request(name, tokens, 1, pins=pins, **more)


def serve(driver: Driver, *requests: Request) -> None:
    for one in requests:
        driver.add(one)
        driver.run()


def cached(driver: Driver, tokens: list[int]) -> int:
    """How much of a prompt is cached. Changes nothing."""
    place = Place()
    key = array("i", tokens).tobytes()
    driver.scheduler._memory.cache.tree.seek(place, "", key, len(tokens))
    return place.tokens


def prompt(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def pinned(driver: Driver) -> int:
    return driver.scheduler.statistics().pinned_tokens


def test_what_is_pinned_goes_after_what_is_not() -> None:
    driver = Driver(config())
    kept, other = prompt(1000, 60), prompt(2000, 60)
    serve(driver, asking("a", kept, PromptPin(60, 300)), asking("b", other))
    assert pinned(driver) == 60
    serve(driver, *(asking(f"c{i}", prompt(3000 + 100 * i, 60)) for i in range(4)))
    assert cached(driver, kept) == 60, "though it was used before all the others"
    assert cached(driver, other) == 0
    driver.assert_all_free()


def test_running_requests_get_pinned_pages_where_nothing_else_is_left() -> None:
    driver = Driver(config(pin_share=1.0))
    kept = prompt(1000, 120)
    serve(driver, asking("a", kept, PromptPin(120, 300)))
    driver.add(request("b", prompt(2000, 150), 20))
    driver.run()
    assert driver.reason("b") == "length"
    assert cached(driver, kept) < 60
    stats = driver.scheduler.statistics()
    assert stats.pinned_tokens == cached(driver, kept), "what is left of it stays pinned"
    assert stats.pinned_evicted_tokens == 120 - stats.pinned_tokens


def test_a_pool_full_of_pins_holds_nobody_up() -> None:
    plain, full = Driver(config()), Driver(config(pin_share=1.0))
    serve(full, *(asking(f"p{i}", prompt(9000 + 50 * i, 45), PromptPin(45, 9e9)) for i in range(4)))
    full.batches.clear()
    for driver in (plain, full):
        driver.add(*(request(f"r{i}", prompt(1000 * i, 50 + i), 9) for i in range(6)))
        driver.run()
    shapes = [[(list(b.rows), list(b.extend_lens)) for b in d.batches] for d in (plain, full)]
    assert shapes[0] == shapes[1]


def test_a_pin_ends_with_its_time_and_is_renewed_by_who_asks_again() -> None:
    driver = Driver(config())
    kept = prompt(1000, 50)
    serve(driver, asking("a", kept, PromptPin(50, 300)))
    driver.now = 299.0
    serve(driver, asking("b", kept, PromptPin(50, 300)))
    driver.now = 301.0
    serve(driver, asking("c", prompt(2000, 5)))
    assert pinned(driver) == 50
    driver.now = 600.0
    serve(driver, asking("d", prompt(2010, 5)))
    assert pinned(driver) == 0
    serve(driver, *(asking(f"e{i}", prompt(3000 + 100 * i, 60)) for i in range(4)))
    assert cached(driver, kept) == 0


def test_a_shorter_time_shortens_nothing() -> None:
    driver = Driver(config())
    serve(driver, asking("a", prompt(1000, 50), PromptPin(20, 3600), PromptPin(50, 300)))
    driver.now = 400.0
    serve(driver, asking("b", prompt(1000, 20), PromptPin(20, 300)))
    assert pinned(driver) == 20
    driver.now = 3000.0
    serve(driver, asking("c", prompt(2000, 5)))
    assert pinned(driver) == 20


def test_pins_keep_their_share_and_what_nobody_has_asked_for_longest_gives_way() -> None:
    driver = Driver(config(pin_share=0.5))
    prompts = [prompt(1000 * i, 40) for i in range(1, 4)]
    serve(driver, *(asking(f"a{i}", p, PromptPin(40, 300)) for i, p in enumerate(prompts[:2])))
    serve(driver, asking("again", prompts[0], PromptPin(40, 300)))
    serve(driver, asking("third", prompts[2], PromptPin(40, 300)))
    assert pinned(driver) == 80, "of 100 that there may be"
    serve(driver, *(asking(f"b{i}", prompt(5000 + 100 * i, 50)) for i in range(4)))
    assert [cached(driver, p) for p in prompts] == [40, 0, 40]
    serve(driver, asking("long", prompt(9000, 150), PromptPin(150, 300)))
    assert pinned(driver) == 100, "the beginning of what is longer"
    driver.scheduler.change_options(pin_share=0.0)
    assert pinned(driver) == 0


def test_of_one_key_the_newest_prompt_is_kept() -> None:
    driver = Driver(config())
    common = prompt(1000, 30)
    for i in range(5):
        own = prompt(2000 + 100 * i, 20)
        serve(driver, asking(f"r{i}", common + own, PromptPin(50, 300, "session")))
        assert pinned(driver) == 50
    serve(driver, asking("other", common + prompt(9000, 20), PromptPin(50, 300, "other")))
    assert pinned(driver) == 70, "what two keys share counts once"
    apart = asking("salted", common, PromptPin(30, 300, "session"), namespace="salt")
    serve(driver, apart)
    assert pinned(driver) == 100, "a key is of its namespace"


def test_any_number_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.scheduling.pins.MOST_PINS", 20)
    driver = Driver(config(capacity_tokens=64))
    for i in range(150):
        serve(driver, asking(f"r{i}", prompt(1000, 5), PromptPin(5, 3600, f"k{i}")))
    pins = driver.scheduler._memory.cache.pins
    assert len(pins) == 20
    assert len(pins._heap) <= 2 * 20 + 64
    driver.assert_all_free()


def test_nothing_is_pinned_of_who_has_left_or_gave_nan() -> None:
    driver = Driver(config(), overlap=False)
    left, spoilt = (asking(name, 40, PromptPin(40, 300)) for name in ("left", "spoilt"))
    driver.add(left)
    driver.plan()
    driver.scheduler.abort("left")
    driver.commit()
    driver.run()
    driver.add(spoilt)
    driver.plan()
    driver.commit(failed=[0])
    driver.run()
    assert pinned(driver) == 0
    assert (left.pinned_tokens, spoilt.pinned_tokens) == (0, 0)


def test_a_pin_is_made_when_the_prompt_is_known_to_be_right() -> None:
    driver = Driver(config(chunked_prefill_size=32), overlap=False)
    made = asking("a", 80, PromptPin(80, 300))
    driver.add(made)
    for expected in (0, 0, 80):
        driver.plan()
        assert pinned(driver) == 0
        driver.commit()
        assert (pinned(driver), made.pinned_tokens) == (expected, expected)


def test_whole_pages_are_pinned_and_none_without_a_cache() -> None:
    paged = Driver(config(page_size=16, capacity_tokens=320))
    serve(paged, asking("a", 50, PromptPin(40, 300)))
    assert pinned(paged) == 32
    off = Driver(config(disable_radix_cache=True))
    made = asking("a", 50, PromptPin(50, 300))
    serve(off, made)
    assert (pinned(off), made.pinned_tokens) == (0, 0)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo"])
def test_recorded_pins_are_replayed_to_the_byte(tmp_path: Path, eviction: str) -> None:
    made = config(eviction_policy=eviction)
    path = tmp_path / "trace.jsonl"
    driver = Driver(made)
    driver.scheduler = scheduler = RecordingScheduler(made, TraceWriter(path, made))
    for i in range(12):
        pins = (PromptPin(30, 0.2), PromptPin(60, 0.1, f"k{i % 2}"))[: i % 3]
        driver.add(asking(f"r{i}", prompt(1000 * (i % 4), 60), *pins))
        driver.step()
    driver.run()
    scheduler.close()
    assert driver.scheduler.statistics().pinned_evicted_tokens > 0
    trace = read_trace(path)
    assert replay(trace, config_from(trace.options)).difference is None
    other = replay(trace, config_from(trace.options, {"pin_share": 0.0})).difference
    assert other is not None, "pins change what is decided"
