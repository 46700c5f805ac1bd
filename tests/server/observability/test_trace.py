"""Traces: they follow the rules of the Trace Event Format, and show what happened when.

The rules are those of the format's description: every event has ph, ts, pid, tid and name, and
args is an object; a complete event has a duration; complete events of a lane nest. A trace is an
array of events whose closing bracket may be missing.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import logging
import os
import stat
from collections import defaultdict

import pytest

from runtime.errors import ConfigError
from server.observability.trace_events import Slice, nested
from tests.fakes import fake_runner, fake_server, make_fake_service
from tests.server.generation.faulty_runner import FaultyRunner

STEP_S = 0.008
PHASES = {"X", "M"}


def checked(events):
    """The events by (process's name, lane's name), after every rule was checked."""
    names: dict[tuple, str] = {}
    lanes = defaultdict(list)
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= event.keys(), event
        assert event["ph"] in PHASES
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event.get("args", {}), dict)
        assert isinstance(event["ts"], int | float)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append(event)
        elif event["name"] in ("process_name", "thread_name"):
            names[event["pid"], event["tid"]] = event["args"]["name"]
    for lane in lanes.values():
        around: list[float] = []
        for before, event in itertools.pairwise([{"ts": 0.0}, *lane]):
            assert before["ts"] <= event["ts"], "a lane is in order"
            while around and around[-1] <= event["ts"] + 0.002:
                around.pop()
            end = event["ts"] + event["dur"]
            assert not around or end <= around[-1] + 0.002, "events of a lane nest"
            around.append(end)
    return {(names[pid, 0], names[pid, tid]): lane for (pid, tid), lane in lanes.items()}


def spans(lane, name):
    """Begin and end of a lane's events of that name, by step."""
    found = [one for one in lane if one["name"] == name]
    return {one["args"]["step"]: (one["ts"], one["ts"] + one["dur"]) for one in found}


BODY = {"prompt": "x" * 150, "max_tokens": 30, "ignore_eos": True, "stream": True}


async def streams(server, count):
    async def one(i):
        body = {**BODY, "prompt": f"{i}" * 150}
        async with server.client.post(server.url + "/v1/completions", json=body) as answer:
            assert "[DONE]" in (await answer.read()).decode()

    await asyncio.gather(*map(one, range(count)))
    await server.wait_idle()


def file_of(server):
    file = server.service.tracing._file
    assert file is not None
    return file


async def traced(path, count=4, **options):
    runner = fake_runner(step_seconds=lambda batch: STEP_S)
    async with fake_server(runner=runner, trace=str(path), **options) as server:
        await streams(server, count)
    return checked(json.loads(path.read_text()))


def planned_inside(lanes):
    """Of the steps that followed another at once: how many, and how many of them were planned while
    the device computed the one before."""
    loop, device = lanes["server", "event loop"], lanes["server", "device"]
    plans = spans(loop, "plan")
    steps = {one["args"]["step"]: (one["ts"], one["ts"] + one["dur"]) for one in device}
    inside = [
        steps[step - 1][0] <= begin and end <= steps[step - 1][1]
        for step, (begin, end) in plans.items()
        if step - 1 in steps
    ]
    return len(inside), sum(inside)


async def test_a_file_s_events_follow_the_rules_and_overlap_shows(tmp_path):
    """With overlap, step N + 1 is planned while the device computes step N."""
    lanes = await traced(tmp_path / "trace.json")
    count, inside = planned_inside(lanes)
    assert count > 30
    # A busy machine may be late now and then; the first step has nothing to hide behind.
    assert inside > 0.5 * count
    loop = lanes["server", "event loop"]
    assert {event["name"] for event in loop} == {"plan", "launch", "commit", "deliver"}
    moments = [spans(loop, name) for name in ("plan", "launch", "commit", "deliver")]
    for step in moments[0]:
        times = [one[step] for one in moments]
        assert all(a[1] <= b[0] + 0.002 for a, b in itertools.pairwise(times))


async def test_without_overlap_no_plan_lies_in_a_step(tmp_path):
    lanes = await traced(tmp_path / "trace.json", disable_overlap=True)
    count, inside = planned_inside(lanes)
    assert count > 30
    assert inside == 0


async def test_a_request_s_lane_tells_its_life(tmp_path):
    options = {"chunked_prefill_size": 64, "max_running_requests": 1}
    lanes = await traced(tmp_path / "trace.json", 3, scheduler=options)
    requests = [lane for (process, _), lane in lanes.items() if process == "requests"]
    events = [event for lane in requests for event in lane]
    named = defaultdict(list)
    for event in events:
        named[event["name"]].append(event)
    for name in ("tokenize", "queued", "decode", "detokenize", "write", "waiting: rows"):
        assert named[name], name
    wholes = [event for event in events if "request_id" in event["args"]]
    assert len(wholes) == 3
    assert all(len(named[name]) == 3 for name in ("tokenize", "queued", "decode"))
    assert len(named["prefill"]) == 3 * 3, "150 tokens in chunks of 64, for each"
    computed = [event for event in lanes["server", "device"] if event["args"]["prefill_tokens"]]
    assert {event["args"]["step"] for event in named["prefill"]} == {
        event["args"]["step"] for event in computed
    }
    for whole, *rest in requests:
        assert whole["args"]["tokens"] == 30
        assert (whole["args"]["status"], whole["args"]["finish"]) == (200, "length")
        (queued,) = [event for event in rest if event["name"] == "queued"]
        assert queued["dur"] == pytest.approx(1e6 * whole["args"]["queued_s"], abs=50)
        for term, seconds in queued["args"]["waited_s"].items():
            (waiting,) = [event for event in rest if event["name"] == f"waiting: {term}"]
            assert waiting["dur"] == pytest.approx(1e6 * seconds, abs=50)
    # One request runs at a time, so no two decode at once.
    decodes = sorted((event["ts"], event["ts"] + event["dur"]) for event in named["decode"])
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(decodes))


async def test_a_retracted_request_is_queued_and_prefilled_again(tmp_path):
    runner = fake_runner(max_total_tokens=16 * 40, step_seconds=lambda batch: 0.0005)
    options = {"schedule_conservativeness": 0.0, "chunked_prefill_size": 256}
    path = tmp_path / "trace.json"
    async with fake_server(runner=runner, scheduler=options, trace=str(path)) as server:
        body = {"max_tokens": 120, "ignore_eos": True}
        await asyncio.gather(*(server.complete(f"{i}" * 40, **body) for i in range(6)))
        await server.wait_idle()
        retractions = server.service.engine.scheduler.counters.retractions
    lanes = checked(json.loads(path.read_text()))
    events = [e for (process, _), lane in lanes.items() if process == "requests" for e in lane]
    assert retractions > 0
    assert sum(event["name"] == "queued" for event in events) == 6 + retractions


@pytest.mark.parametrize("disable_overlap", [False, True])
async def test_a_step_that_fails_is_in_the_trace_and_its_rows_again(tmp_path, disable_overlap):
    failed: list[int] = []

    def fails(batch, part):
        first = part == "forward" and not failed and batch.num_decode == 2
        failed.extend([batch.step] * first)
        return first

    path = tmp_path / "trace.json"
    options = {"trace": str(path), "disable_overlap": disable_overlap}
    async with fake_server(runner=FaultyRunner(fails), **options) as server:
        await asyncio.gather(*(server.complete(p, max_tokens=9, ignore_eos=True) for p in "ab"))
        await server.wait_idle()
    lanes = checked(json.loads(path.read_text()))
    device = [event["args"] for event in lanes["server", "device"]]
    assert [args["step"] for args in device if "failed" in args] == failed
    wholes = [
        event
        for (process, _), lane in lanes.items()
        if process == "requests"
        for event in lane
        if "request_id" in event["args"]
    ]
    assert [event["args"]["tokens"] for event in wholes] == [9, 9]


async def test_debug_trace_gives_the_next_steps(tmp_path):
    runner = fake_runner(step_seconds=lambda batch: STEP_S)
    async with fake_server(runner=runner, api_key="sesame") as server:
        assert (await server.get("/debug/trace?steps=5"))[0] == 401
        server.client.headers["X-Api-Key"] = "sesame"
        asked = asyncio.create_task(server.get("/debug/trace?steps=12"))
        body = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "stream": True}
        async with server.client.post(server.url + "/v1/completions", json=body) as answer:
            await answer.content.readline()
            assert server.service.engine.delivery.timed
            status, events = await asked
        assert not server.service.engine.delivery.timed
        await server.wait_idle()
        lanes = checked(events)
        assert status == 200
        assert len(lanes["server", "device"]) == 12
        (lane,) = [lane for (process, _), lane in lanes.items() if process == "requests"]
        assert lane[0]["args"]["status"] == 0, "it goes on"
        for query in ("steps=0", "steps=x", "steps=10001", "seconds=61", "seconds=0"):
            status, body = await server.get(f"/debug/trace?{query}")
            assert (status, body["error"]["param"]) == (400, query.partition("=")[0])


async def test_a_trace_of_an_idle_server_ends_in_time_and_few_are_taken_at_once():
    async with fake_server() as server:
        asked = [
            asyncio.create_task(server.get("/debug/trace?steps=5&seconds=1")) for _ in range(5)
        ]
        found = await asyncio.gather(*asked)
        assert sorted(status for status, _ in found) == [200, 200, 200, 200, 503]
        assert not server.service.engine.delivery.timed
    assert [checked(body) for status, body in found if status == 200] == [{}] * 4


async def test_a_client_that_leaves_ends_its_trace():
    async with fake_server() as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await server.get("/debug/trace?seconds=60")
        while server.service.engine.delivery.timed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await server.complete("still here", max_tokens=2)


async def test_the_trace_of_a_server_that_died_lacks_its_end_alone(tmp_path):
    path = tmp_path / "trace.json"
    async with fake_server(trace=str(path)) as server:
        await streams(server, 2)
        file = file_of(server)
        while file._waiting or not path.read_text().endswith("\n"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cut = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    whole = json.loads(path.read_text())
    assert not cut.rstrip().endswith("]")
    events = json.loads(cut.rstrip().rstrip(",") + "]")
    assert events == whole[: len(events)]
    assert checked(events)


async def test_a_full_disk_ends_the_trace_and_serving_goes_on(tmp_path, caplog):
    path = tmp_path / "trace.json"
    async with fake_server(trace=str(path)) as server:
        await server.complete("before", max_tokens=3)
        file = file_of(server)

        def full(data):
            raise OSError(errno.ENOSPC, "No space left on device")

        file._write = full
        for i in range(3):
            body = await server.complete(f"after {i}", max_tokens=3)
            assert body["usage"]["completion_tokens"] == 3
            await server.wait_idle()
        file._thread.join(10)
        await server.complete("the next step lets go of it", max_tokens=3)
        assert not server.service.engine.delivery.timed
    told = [record for record in caplog.records if record.name == "loomserve.trace"]
    assert [record.levelno for record in told] == [logging.WARNING], "said once"
    assert "No space left on device" in told[0].getMessage()


async def test_what_a_slow_disk_cannot_take_is_left_out_and_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("server.observability.tracing.MAX_WAITING", 4)
    path = tmp_path / "trace.json"
    async with fake_server(trace=str(path)) as server:
        file = file_of(server)
        go_on, write = asyncio.Event(), file._write
        loop = asyncio.get_running_loop()

        def slow(data):
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)
            write(data)

        file._write = slow
        await streams(server, 2)
        go_on.set()
        file._write = write
    events = json.loads(path.read_text())
    checked(events)
    labels = events[-1]["args"]["labels"]
    assert labels.endswith("records left out")
    assert int(labels.split()[0]) > 0
    assert sum("something is left out" in one.getMessage() for one in caplog.records) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_file_that_cannot_be_written_is_told_at_the_start():
    with pytest.raises(ConfigError, match="trace /dev/full: cannot be written"):
        make_fake_service(trace="/dev/full")


def test_what_reaches_beyond_the_one_around_it_is_cut():
    given = [Slice("late", 5, 6), Slice("long", 1, 9), Slice("outer", 0, 4), Slice("in", 2, 3)]
    assert [(one.name, one.begin_s, one.end_s) for one in nested(given)] == [
        ("outer", 0, 4),
        ("long", 1, 4),
        ("in", 2, 3),
        ("late", 5, 6),
    ]
