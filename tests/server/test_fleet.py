"""What the fleet's command line becomes: the commands of its processes."""

from __future__ import annotations

import os

import pytest

from server.fleet import Fleet, parse_fleet


def after(words, name):
    """The value behind an option, its last."""
    return words[len(words) - 1 - words[::-1].index(name) + 1]


def test_replicas_get_the_options_of_serve_and_ports_behind_the_router_s():
    words = ["m", "--replicas", "3", "--port", "9000", "--page-size", "32", "--host", "0.0.0.0"]
    config = parse_fleet([*words, "--", "--policy", "random"])
    for number in range(3):
        command = config.replica_command(number)
        assert command[3:][:1] == ["m"]
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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--replicas", "0"], "replicas: got 0, must be at least 1"),
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
