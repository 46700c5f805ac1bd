"""`loomserve fleet` with three replicas of a tiny model: what a restart and a death cost."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal

import pytest

from tests.process.fleet.asking import MODEL
from tests.process.fleet.deaths import (
    Load,
    answers_of,
    kill_while_it_answers,
    what_is_wrong,
)
from tests.process.fleet.processes import fleet, free_ports, pid_of

pytestmark = pytest.mark.slow
REPLICAS = 3


@pytest.fixture(scope="module")
def port():
    return free_ports(REPLICAS + 2)


@pytest.fixture(scope="module")
def process(tiny_model, tmp_path_factory, port):
    """Each replica runs two requests at a time, so that others wait."""
    words = ["--model", str(tiny_model), "--cache-dir", str(tmp_path_factory.mktemp("cache"))]
    words += ["--cpu-kernels", "torch", "--max-running-requests", "2"]
    with fleet(words, port, REPLICAS) as process:
        command = shlex.split(process.wait_for(r"^\s*curl "))
        assert command[2].startswith(f"http://127.0.0.1:{port}")
        assert json.loads(command[-1])["model"] == MODEL, "which the router needs"
        assert process.output.count("curl ") == 1, "clients are not sent to a replica"
        yield process


@pytest.fixture(scope="module")
def expected(process, port):
    """The answers of the first replica alone."""
    return answers_of(f"http://127.0.0.1:{port + 1}")


def test_replicas_restart_one_by_one_without_losing_a_request(process, port, expected):
    with Load(f"http://127.0.0.1:{port}", clients=4) as load:
        process.send(signal.SIGHUP)
        process.wait_for("all replicas were restarted")
    assert len(load.answers) > 8
    assert what_is_wrong(load.answers, expected, None) == []


def test_a_death_costs_the_streams_that_had_begun_and_nothing_else(process, port, expected):
    draw = random.Random(0)
    for _ in range(3):
        pids = [pid_of(port + 1 + number) for number in range(REPLICAS)]
        death = kill_while_it_answers(f"http://127.0.0.1:{port}", pids, draw)
        assert what_is_wrong(death.answers, expected, death.at_s) == []
        process.wait_for(f"replica {death.number} ended with status -9")
        process.wait_for(f"replica {death.number} takes requests")


def test_a_router_that_dies_is_started_again_and_knows_the_replicas(process, port, expected):
    """Last, since a router that has lived for under a minute is waited for longer each time."""
    os.kill(pid_of(port), signal.SIGKILL)
    process.wait_for("the router ended with status -9")
    process.wait_for(r"^\s*curl ")
    assert answers_of(f"http://127.0.0.1:{port}") == expected
