"""What the fleet's command line becomes: the commands of its processes."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from dataclasses import replace

import pytest
from aiohttp import web

from runtime.errors import ConfigError
from server.args import parse_args
from server.fleet import options as fleet_options
from server.fleet.member import Member
from server.fleet.options import parse_fleet
from server.fleet.supervisor import Fleet, run_fleet


def after(words, name):
    """The value behind an option, its last."""
    return words[len(words) - 1 - words[::-1].index(name) + 1]


def test_replicas_get_the_options_of_serve_and_ports_behind_the_router_s():
    words = ["m", "--replicas", "3", "--port", "9000", "--page-size", "32", "--host", "0.0.0.0"]
    config = parse_fleet([*words, "--", "--policy", "random"])
    for number in range(3):
        command = config.replica_command(number)
        assert command[1:5] == ["-P", "-m", "server", "m"], "not a folder of the working directory"
        assert after(command, "--page-size") == "32"
        assert after(command, "--port") == str(9001 + number)
        assert after(command, "--host") == "127.0.0.1", "clients go through the router"
        assert "--policy" not in command
        cores = len(os.sched_getaffinity(0))
        assert int(after(command, "--cpu-threads")) == max(1, cores // 3)
    assert config.router_words == ("--policy", "random")
    assert config.router_url == "http://127.0.0.1:9000"


def test_devices_are_dealt_out_in_turn():
    config = parse_fleet(["--replicas", "3", "--devices", "0,2"])
    seen = [config.replica_environment(number)["CUDA_VISIBLE_DEVICES"] for number in range(3)]
    assert seen == ["0", "2", "0"]
    assert "--cpu-threads" not in config.replica_command(0)
    assert after(config.replica_command(0), "--device") == "cuda", "it refuses without a GPU"


@pytest.mark.parametrize(
    ("replicas", "cores"),
    [(2, [{1, 4}, {5, 7}]), (3, [{1}, {4}, {5}]), (5, [{1}, {4}, {5}, {7}, {1}])],
)
def test_replicas_that_bind_threads_have_cores_of_their_own(replicas, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 1, 5, 4})
    words = ["--replicas", str(replicas)]
    config = parse_fleet([*words, "--cpu-pinning"])
    assert [config.replica_cores(number) for number in range(replicas)] == cores
    assert int(after(config.replica_command(0), "--cpu-threads")) == len(cores[0])
    assert parse_fleet(words).replica_cores(0) == set(), "the system deals out, as it does well"


@pytest.mark.skipif(
    sys.platform != "linux", reason="where a process may run is told on Linux alone"
)
async def test_a_member_runs_on_its_cores_alone():
    class Told(Member):
        stdout = asyncio.subprocess.PIPE

    core = max(os.sched_getaffinity(0))
    program = "import os; print(os.sched_getaffinity(0))"
    member = Told("one", [sys.executable, "-c", program], dict(os.environ), frozenset({core}))
    told, _ = await (await member.start()).communicate()
    assert told.decode().strip() == str({core})


def config_of_a_replica(words, monkeypatch):
    """What the server of a replica is told, by its command line and environment."""
    config = parse_fleet(words)
    for name, value in config.replica_environment(0).items():
        monkeypatch.setenv(name, value)
    return parse_args(config.replica_command(0)[4:])


def test_replicas_have_the_packed_weights_in_memory_once(monkeypatch):
    assert config_of_a_replica([], monkeypatch).runner.share_weights


def test_streams_wait_for_their_first_token_so_that_the_router_can_ask_elsewhere(monkeypatch):
    assert config_of_a_replica([], monkeypatch).sse_keepalive == 0.0


@pytest.mark.parametrize("seconds", [5.0, 7.0])
def test_keep_alives_that_are_asked_for_are_sent_by_the_replicas(seconds, monkeypatch):
    words = ["--sse-keepalive", str(seconds)]
    assert config_of_a_replica(words, monkeypatch).sse_keepalive == seconds


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--replicas", "0"], "replicas: got 0, must be at least 1"),
        (["--devices", "0", "--device", "cpu"], "devices: they are GPUs, but the device is cpu"),
        (["--port", "0"], "port 0"),
        (["--port", "65534"], "port 65534"),
        (["--uds", "/tmp/x"], "uds"),
        (["--kv-events", "tcp://*:1"], "kv_events"),
        (["--page-sise", "1"], "unknown option --page-sise; did you mean --page-size?"),
    ],
)
def test_what_a_fleet_cannot_do_is_told_in_one_line(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_fleet(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_missing_router_is_named_with_the_way_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(Exception, match=r"sglang-router is not installed; pip install"):
        Fleet(parse_fleet([]))


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Stands for the router: takes any options, and does what is written into it."""
    path = tmp_path / "sglang-router"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    monkeypatch.setattr(fleet_options, "router_program", lambda: str(path))
    return path


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_taken_port_is_told_before_anything_is_started(program, monkeypatch, capsys):
    monkeypatch.setattr(Fleet, "run", lambda _: pytest.fail("it was started"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run_fleet(parse_fleet(["--port", str(port)])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"loomserve: cannot listen on 127.0.0.1:{port}: address already in use"


def test_every_port_of_the_fleet_is_tried_before_it_starts(program, monkeypatch):
    tried: list[tuple[str, int]] = []

    def listen(*address):
        tried.append(address)
        return []

    async def run(_):
        return len(tried)

    monkeypatch.setattr(fleet_options, "listen", listen)
    monkeypatch.setattr(Fleet, "run", run)
    assert run_fleet(parse_fleet(["--port", "9000", "--host", "0.0.0.0"])) == 4
    replicas = [("127.0.0.1", 9001), ("127.0.0.1", 9002)]
    assert tried == [("0.0.0.0", 9000), *replicas, ("0.0.0.0", 9003)]


def without_replicas(port):
    return replace(parse_fleet(["--port", str(port)]), replicas=0)


def test_a_router_that_cannot_start_ends_the_fleet_with_its_status(program, capsys):
    program.write_text("#!/bin/sh\nexit 3\n")
    assert run_fleet(without_replicas(free_port())) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "loomserve: the router could not start: it ended with status 3"


@pytest.mark.parametrize("body", ['{"detail": "Not Found"}', "[]", "<html>"])
def test_what_answers_as_no_router_does_ends_the_fleet_in_one_error(body, program):
    async def run():
        app = web.Application()
        app.router.add_get("/workers", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        try:
            async with asyncio.timeout(60):
                await Fleet(without_replicas(port)).run()
        finally:
            await runner.cleanup()

    async def answer(_):
        return web.Response(text=body, status=404)

    port = free_port()
    with pytest.raises(ConfigError, match=r"/workers is not answered as by sglang-router: .* 404"):
        asyncio.run(run())
