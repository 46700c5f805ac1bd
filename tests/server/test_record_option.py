"""--record: the trace of a served run can be read and replayed."""

from __future__ import annotations

import errno
import io
import os
import stat
from contextlib import asynccontextmanager
from typing import cast

import pytest

from runtime.config import SchedulerConfig
from runtime.errors import ConfigError
from runtime.simulation.live_run import read_live_run
from runtime.simulation.recorder import RecordingScheduler
from runtime.simulation.replay import replay
from runtime.simulation.trace import config_from, read_trace
from server.config import ServerConfig
from server.loading import make_scheduler
from server.service import Parts, make_service
from tests.fakes import IM_END, byte_tokenizer, fake_runner, fake_server


@asynccontextmanager
async def recorded_server(path, **options):
    runner = fake_runner()
    config = SchedulerConfig(
        capacity_tokens=runner.info.max_total_tokens,
        context_length=2048,
        eos_token_ids=frozenset({IM_END}),
        max_running_requests=16,
    )
    parts = Parts(runner, make_scheduler(config, str(path)), byte_tokenizer(), "fake")
    given = ServerConfig(port=0, record=str(path), **options)
    async with fake_server(make_service(given, parts)) as server:
        yield server


async def test_every_plan_and_commit_of_a_run_is_in_the_trace(tmp_path):
    path = tmp_path / "run.trace"
    async with recorded_server(path) as server:
        for i in range(3):
            await server.complete(f"prompt {i}", max_tokens=5)
        await server.wait_idle()
        steps = server.service.engine.records.total
    assert server.service.engine.scheduler._writer._file is None, "the file is left open"
    kinds = [event["event"] for _, event in read_trace(path).events]
    assert kinds.count("add") == 3
    assert kinds.count("commit") == steps
    assert kinds.count("plan") >= steps


async def test_recorded_trace_is_told_to_who_has_the_key_without_what_was_said(tmp_path):
    path, told = tmp_path / "run.trace", tmp_path / "told.trace"
    async with recorded_server(path, api_key="secret") as server:
        server.client.headers["Authorization"] = "Bearer secret"
        await server.complete("a prompt of some length", max_tokens=5)
        await server.wait_idle()
        async with server.client.get(server.url + "/debug/recorded_trace") as answer:
            assert answer.status == 200
            told.write_bytes(await answer.read())
        assert (await server.get("/simulator/setup"))[1]["records"] is True
        del server.client.headers["Authorization"]
        assert (await server.get("/debug/recorded_trace"))[0] == 401
    recorded, live = read_live_run(read_trace(path)), read_live_run(read_trace(told))
    assert live.step_times == recorded.step_times
    ids, said = live.arrivals[0].input_ids, recorded.arrivals[0].input_ids
    assert len(ids) == len(said)
    assert ids != said


async def test_what_clients_ask_to_stay_cached_is_replayed_and_simulated(tmp_path):
    path, told = tmp_path / "run.trace", tmp_path / "told.trace"
    async with recorded_server(path) as server:
        for turn in range(3):
            text = "a session's prompt " * 5 + "and more " * turn
            await server.chat(text, max_tokens=4, prompt_cache_key="my secret session")
        await server.wait_idle()
        async with server.client.get(server.url + "/debug/recorded_trace") as answer:
            told.write_bytes(await answer.read())
    trace = read_trace(path)
    assert replay(trace, config_from(trace.options)).difference is None
    pins = [one.pins for one in read_live_run(trace).arrivals]
    assert [(pin.ttl_s, pin.key) for (pin,) in pins] == [(300.0, "my secret session")] * 3
    disguised = [one.pins for one in read_live_run(read_trace(told)).arrivals]
    assert [pin.tokens for (pin,) in disguised] == [pin.tokens for (pin,) in pins]
    assert {pin.key for (pin,) in disguised} == {"k1"}, "one key, whose name nobody learns"


async def test_server_that_records_nothing_says_so():
    async with fake_server() as server:
        status, body = await server.get("/debug/recorded_trace")
        assert status == 409
        assert "--record FILE does" in body["error"]["message"]
        assert (await server.get("/simulator/setup"))[1]["records"] is False


class FullDisk(io.StringIO):
    """A file on a disk that has no room left."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_trace_that_cannot_be_written_ends_and_serving_goes_on(tmp_path, caplog):
    path = tmp_path / "run.trace"
    async with recorded_server(path) as server:
        await server.complete("before", max_tokens=3)
        await server.wait_idle()
        writer = server.service.engine.scheduler._writer
        written = path.read_bytes()
        writer._file.close()
        writer._file = FullDisk()
        bodies = [await server.complete(f"after {i}", max_tokens=3) for i in range(3)]
        await server.wait_idle()
        assert [body["usage"]["completion_tokens"] for body in bodies] == [3, 3, 3]
        assert (await server.get("/health"))[0] == 200
    warnings = [record for record in caplog.records if record.name == "loomserve.record"]
    assert [record.levelname for record in warnings] == ["WARNING"], "said once"
    assert "No space left on device" in warnings[0].getMessage()
    assert path.read_bytes() == written
    assert read_trace(path).events, "what was written before can be read"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_trace_that_cannot_be_begun_is_told_at_the_start():
    config = SchedulerConfig(capacity_tokens=1024, context_length=512)
    with pytest.raises(ConfigError, match="record /dev/full: cannot be written"):
        make_scheduler(config, "/dev/full")


@pytest.mark.parametrize("there_before", [False, True])
def test_a_trace_can_be_read_by_its_owner_alone(tmp_path, there_before):
    """Prompts stand in it."""
    path = tmp_path / "run.trace"
    if there_before:
        path.touch()
        path.chmod(0o644)
    config = SchedulerConfig(capacity_tokens=1024, context_length=512)
    cast("RecordingScheduler", make_scheduler(config, str(path))).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
