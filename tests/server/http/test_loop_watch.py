"""Whatever holds up the event loop is measured, and named in the log."""

from __future__ import annotations

import asyncio
import re
import time
from types import SimpleNamespace

from aiohttp import web

from server.api import admin
from server.http import loop_watch
from server.http.loop_watch import TOLD_SECONDS, LoopWatch
from tests.fakes import fake_server


def hold_the_loop() -> None:
    """Works for three times as long as is told, on this thread."""
    end = time.thread_time() + 3 * TOLD_SECONDS
    while time.thread_time() < end:
        pass


async def test_a_held_loop_is_measured_and_its_holder_named(caplog):
    beats: list[tuple[float, float]] = []
    seen = asyncio.Event()

    def beat(late: float, cpu: float) -> None:
        beats.append((late, cpu))
        if late > TOLD_SECONDS:
            seen.set()

    watch = LoopWatch(beat)
    task = asyncio.current_task()
    assert task is not None
    task.set_name("the culprit")
    await asyncio.sleep(0)
    hold_the_loop()
    await seen.wait()
    watch.close()
    late, cpu = max(beats)
    assert late > 2 * TOLD_SECONDS
    assert cpu > 2 * TOLD_SECONDS
    told = " ".join(record.message for record in caplog.records)
    assert "the culprit, at hold_the_loop (http/test_loop_watch.py:" in told


async def test_a_request_that_holds_the_loop_is_named_and_counted(monkeypatch, caplog):
    async def health(request: web.Request) -> web.Response:
        hold_the_loop()
        return web.Response()

    others = [route for route in admin.ROUTES if route.path != "/health"]
    monkeypatch.setattr(admin, "ROUTES", [web.get("/health", health), *others])
    async with fake_server() as server:
        headers = {"X-Request-Id": "r-17"}
        async with server.client.get(server.url + "/health", headers=headers) as answer:
            assert answer.status == 200
        counts: dict[float, float] = {}
        while not counts or counts[0.1] == counts[float("inf")]:  # until the next beat
            async with server.client.get(server.url + "/metrics") as answer:
                text = await answer.text()
            bucket = r'loomserve:event_loop_lag_seconds_bucket\{le="(\S+)",.*\} (\S+)'
            counts = {float(le): float(count) for le, count in re.findall(bucket, text)}
    assert "GET /health of request r-17, at hold_the_loop" in caplog.text


async def test_a_loop_that_has_little_to_do_is_looked_at_less_often(monkeypatch):
    used, pauses = [0.0], []
    clocks = SimpleNamespace(monotonic=time.monotonic, thread_time=lambda: used[0])
    monkeypatch.setattr(loop_watch, "time", clocks)
    watch = LoopWatch(lambda late, cpu: None)
    watch._timer.cancel()
    loop = SimpleNamespace(call_later=lambda seconds, _: pauses.append(seconds))
    monkeypatch.setattr(watch, "_loop", loop)
    for work_s in (0.0, 0.01, 0.0001):
        used[0] += work_s
        watch._on_beat()
    assert pauses == [0.05, 0.02, 0.05]
    watch._ended.set()
    watch._watcher.join()
