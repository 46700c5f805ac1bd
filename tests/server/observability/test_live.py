"""/debug/live: what a sample holds, what watching costs, and what a slow reader loses."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace

import pytest
from yarl import URL

from runtime.errors import QueueFull
from server.generation.metrics import Histogram
from server.generation.step_records import StepRecords
from server.observability.latency_windows import LatencyWindow
from server.observability.live import (
    MOST_REQUESTS,
    MOST_STEPS,
    MOST_WATCHERS,
    LiveView,
    step_figures,
)
from tests.fakes import fake_runner, fake_server, make_fake_service
from tests.values import present


async def samples(server, count, **options):
    """The first `count` samples of /debug/live."""
    url = f"{server.url}/debug/live?samples={count}"
    async with server.client.get(url, **options) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        raw = (await answer.read()).decode()
    return [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n") if line]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def quick(service):
    """A live view that samples as often as a test would like."""
    service.live = LiveView(service.engine, interval_s=0.001)
    return service


@pytest.fixture
def slow_steps():
    """A server whose steps take 2 ms, with two rows."""
    runner = fake_runner(step_seconds=lambda batch: 0.002)
    return quick(make_fake_service(runner, scheduler={"max_running_requests": 2}))


async def test_the_first_sample_shows_the_steps_before_it():
    async with fake_server() as server:
        await server.complete("x" * 200, max_tokens=5)
        (sample,) = await samples(server, 1)
    total = server.service.engine.records.total
    assert [one["step"] for one in sample["steps"]] == list(range(total))
    assert sum(one["prefill_tokens"] for one in sample["steps"]) == 200
    assert sample["steps_left_out"] == 0
    assert sample["requests"] == []


async def test_the_four_kinds_add_up_to_the_pool_in_every_sample(slow_steps):
    async with fake_server(slow_steps) as server:
        work = [
            asyncio.create_task(server.complete("y" * (100 + 40 * number), max_tokens=20))
            for number in range(6)
        ]
        found = await samples(server, 25)
        await asyncio.gather(*work)
    for sample in found:
        pool = sample["pool"]
        assert (
            pool["free"] + pool["cached"] + pool["private"] + pool["reserved"] == (pool["capacity"])
        )
    assert len({tuple(sample["pool"].values()) for sample in found}) > 1, "and they change"


async def test_who_waits_is_shown_with_its_place_its_reason_and_its_expected_start(slow_steps):
    async with fake_server(slow_steps) as server:
        await server.complete("warm", max_tokens=4)
        work = [
            asyncio.create_task(server.complete("z" * 40, max_tokens=100, ignore_eos=True))
            for _ in range(5)
        ]
        await until(lambda: server.service.engine.scheduler.statistics().waiting == 3)
        await until(lambda: server.service.engine.scheduler.statistics().reason == "rows")
        (sample,) = await samples(server, 1)
        server.service.generator.abort(None)
        await asyncio.gather(*work, return_exceptions=True)
    queue = sample["queue"]
    assert (queue["waiting"], queue["running"] + queue["prefilling"]) == (3, 2)
    assert queue["blocked_by"] == "rows"
    waiting = [one for one in sample["requests"] if "position" in one]
    assert [one["position"] for one in waiting] == [1, 2, 3]
    assert [one["blocked_by"] for one in waiting] == ["rows"] * 3
    starts = [one["expected_start_s"] for one in waiting]
    assert starts == sorted(starts)
    assert 0 < starts[0] < 10


async def test_no_text_and_no_token_ids_are_shown(slow_steps):
    async with fake_server(slow_steps) as server:
        work = asyncio.create_task(server.complete("my secret", max_tokens=60))
        await until(lambda: server.service.engine.scheduler.has_unfinished)
        found = await samples(server, 10)
        await work
    assert "secret" not in json.dumps(found)
    assert not any("ids" in key for sample in found for one in sample["requests"] for key in one)


async def test_many_requests_and_steps_are_cut_at_a_number():
    service = quick(make_fake_service(scheduler={"max_running_requests": 1}))
    async with fake_server(service) as server:
        await server.complete("a", max_tokens=1200, ignore_eos=True)
        first = service.live.watch()
        work = [
            asyncio.create_task(server.complete("b" * 20, max_tokens=1500, ignore_eos=True))
            for _ in range(MOST_REQUESTS + 9)
        ]
        await until(lambda: service.engine.scheduler.statistics().waiting > MOST_REQUESTS)
        (sample,) = await samples(server, 1)
        service.generator.abort(None)
        await asyncio.gather(*work, return_exceptions=True)
        service.live.leave(first)
    assert sum("position" in one for one in sample["requests"]) == MOST_REQUESTS
    assert sample["queue"]["waiting"] > MOST_REQUESTS
    assert len(sample["steps"]) <= 400
    assert sample["steps_left_out"] + len(sample["steps"]) <= sample["steps_total"]


async def test_nobody_watches_and_nothing_runs():
    async with fake_server() as server:
        service = quick(server.service)
        watching = [task.get_name() for task in asyncio.all_tasks()]
        assert "live view" not in watching
        await samples(server, 1)
        await until(lambda: not service.live.watchers)
        await server.complete("hello", max_tokens=5)
        watching = [task.get_name() for task in asyncio.all_tasks() if not task.cancelling()]
        assert "live view" not in watching
        assert not service.engine._reports._watchers, "no step has told anybody"


async def test_a_slow_reader_loses_samples_and_holds_one(slow_steps):
    service = slow_steps
    async with fake_server(service) as server:
        slow, quick_one = service.live.watch(), service.live.watch()
        assert json.loads(present(await slow.take()))["steps"] == []
        work = asyncio.create_task(server.complete("w", max_tokens=120, ignore_eos=True))
        taken = [json.loads(present(await quick_one.take())) for _ in range(30)]
        held = present(slow._sample)
        late = json.loads(present(await slow.take()))
        await work
        for watcher in (slow, quick_one):
            service.live.leave(watcher)
    assert late == json.loads(held), "one sample, the newest"
    assert late["time_s"] >= taken[-2]["time_s"]
    assert len(held) < 64_000
    seen = [one["step"] for sample in taken for one in sample["steps"]]
    assert seen == sorted(set(seen)), "a reader that keeps up sees every step once"
    assert len(late["steps"]) <= MOST_STEPS


async def test_a_reader_that_never_reads_is_cut_off_and_holds_little(slow_steps):
    """Its socket fills; then samples are dropped, and after the time-out the reader is."""
    service = slow_steps
    service.config = replace(service.config, slow_reader_timeout=0.3)
    async with fake_server(service) as server:
        work = [
            asyncio.create_task(server.complete("u" * 40, max_tokens=1900, ignore_eos=True))
            for _ in range(MOST_REQUESTS)
        ]
        with socket.create_connection(("127.0.0.1", URL(server.url).port)) as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.sendall(b"GET /debug/live HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: service.live.watchers)
            await until(lambda: not service.live.watchers)
        service.generator.abort(None)
        await asyncio.gather(*work, return_exceptions=True)
    assert service.live._task is None


async def test_a_sample_that_fails_costs_nobody_a_place():
    async with fake_server() as server:
        service = server.service

        def broken(*_):
            raise RuntimeError("made for this test")

        service.engine.scheduler.glance = broken
        for _ in range(MOST_WATCHERS + 1):
            assert (await server.get("/debug/live"))[0] == 500
        assert not service.live.watchers
        del service.engine.scheduler.glance
        assert len(await samples(server, 1)) == 1


async def test_only_so_many_watch_and_a_place_comes_free():
    async with fake_server() as server:
        held = [server.service.live.watch() for _ in range(MOST_WATCHERS)]
        with pytest.raises(QueueFull, match="watch already"):
            server.service.live.watch()
        status, body = await server.get("/debug/live?samples=1")
        assert status == 503
        assert "watch already" in body["error"]["message"]
        server.service.live.leave(held.pop())
        assert len(await samples(server, 1)) == 1
        for watcher in held:
            server.service.live.leave(watcher)


async def test_a_reader_that_leaves_gives_its_place_back():
    async with fake_server() as server:
        async with server.client.get(server.url + "/debug/live") as answer:
            assert (await answer.content.readline()).startswith(b"data: ")
            assert len(server.service.live.watchers) == 1
        await until(lambda: not server.service.live.watchers)
        assert server.service.live._task is None


async def test_a_server_that_stops_ends_its_watchers():
    async with fake_server() as server:
        watcher = server.service.live.watch()
        assert await watcher.take() is not None
    assert await watcher.take() is None


async def test_the_key_is_asked_for():
    async with fake_server(api_key="secret") as server:
        assert (await server.get("/debug/live"))[0] == 401
        found = await samples(server, 1, headers={"Authorization": "Bearer secret"})
        assert len(found) == 1


@pytest.mark.parametrize("given", ["0", "x", "-1", "1.5", "10000000", ""])
async def test_a_wrong_number_of_samples_is_refused(given):
    async with fake_server() as server:
        status, body = await server.get(f"/debug/live?samples={given}")
    assert status == 400
    assert body["error"]["param"] == "samples"


async def test_steps_and_gaps_fill_the_time_between_first_launch_and_last_end():
    """Overlap on and off: what is no gap is a step."""
    for overlap_off in (False, True):
        runner = fake_runner(step_seconds=lambda batch: 0.001)
        service = make_fake_service(runner, disable_overlap=overlap_off)
        async with fake_server(service) as server:
            await server.complete("v", max_tokens=20, ignore_eos=True)
            records: StepRecords = service.engine.records
            steps = list(records)
        figures = step_figures(steps)
        total_ms = sum(one["step_ms"] + one["gap_ms"] for one in figures)
        assert total_ms == pytest.approx(1e3 * (steps[-1].done_s - steps[0].launched_s))
        assert all(one["gap_ms"] >= 0 and one["step_ms"] >= 0 for one in figures)


def test_a_latency_window_holds_what_is_new():
    histogram = Histogram((0.01, 0.1, 1.0))
    histogram.observe(5.0)
    window = LatencyWindow(histogram)
    assert window.news() == {"count": 0, "mean_ms": None, "p95_ms": None}
    for value in [0.02] * 18 + [0.5] * 2:
        histogram.observe(value)
    news = window.news()
    assert news["count"] == 20
    assert news["mean_ms"] == pytest.approx(1e3 * (18 * 0.02 + 2 * 0.5) / 20)
    assert news["p95_ms"] == 1000.0, "the 19th of 20 lies in the bucket up to 1 s"
    assert window.news()["count"] == 0
