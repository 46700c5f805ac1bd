"""The Ray Serve application of deploy/: it streams, grows with the engine's queue, finds prefixes
again, and outlives a death."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.process.fleet.asking import MODEL, Question, shared_prompts
from tests.process.fleet.deaths import Load, answers_of, kill_while_it_answers, what_is_wrong
from tests.process.fleet.environments import ray_bin
from tests.process.fleet.processes import free_ports, wait_until
from tests.process.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.slow
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise the controller is told of queues every ten seconds.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}


@contextmanager
def application(*words: str) -> Iterator[ServerProcess]:
    program = str(ROOT / "tests/process/fleet/ray_application.py")
    command = [str(ray_bin() / "python"), "-P", program, *words]
    with ServerProcess(command=command, env={**os.environ, **ENVIRONMENT}) as process:
        try:
            yield process
        finally:
            process.send(signal.SIGTERM)
            process.exit_status()


def engines() -> list[int]:
    """The processes of the replicas, by the names that Ray gives them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            name = path.read_bytes()
        except OSError:
            continue
        if name.startswith(b"ray::ServeReplica:loomserve:Engine"):
            found.append(int(path.parent.name))
    return sorted(found)


def leave_after_the_first_token(url: str) -> None:
    """Of an answer that takes far longer than the test."""
    body = Question("x", max_tokens=4000).body
    sent = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(sent) as answer:
        assert answer.readline().startswith(b"data: ")


def aborted(url: str) -> int:
    """Requests that an engine has ended since their clients had left."""
    with urllib.request.urlopen(url + "/metrics") as answer:
        text = answer.read().decode()
    found = re.search(r'^loomserve:requests_total{.*"abort".*} (\d+)', text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def cached_share(url: str, prompts: list[str]) -> float:
    """Of the prompts' tokens, those that were found in a prefix cache."""
    tokens = cached = 0
    for prompt in prompts:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        with urllib.request.urlopen(url + "/v1/completions", json.dumps(body).encode()) as answer:
            usage = json.load(answer)["usage"]
        tokens += usage["prompt_tokens"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
    return cached / tokens


def test_it_streams_grows_finds_prefixes_again_and_outlives_a_death(tiny_model, tmp_path):
    words = [f"model={tiny_model}", f"cache_dir={tmp_path}", "cpu_kernels=torch", "cpu_threads=1"]
    words += ["max_running_requests=2", "max_replicas=2", "upscale_delay_s=0"]
    words += ["look_back_period_s=1", "metrics_interval_s=0.5", "downscale_delay_s=600"]
    with application(str(free_ports(1)), *words) as process:
        url = process.url()
        process.wait_for("engines that run: 1")
        with pytest.raises(HTTPError, match="400"):
            urllib.request.urlopen(url + "/v1/completions", b'{"prompt": 3}')
        leave_after_the_first_token(url)
        wait_until(lambda: aborted(url) == 1, "it goes on for nobody")
        expected = answers_of(url)
        with Load(url, clients=8) as load:
            process.wait_for("engines that run: 2")
        assert what_is_wrong(load.answers, expected, None) == []
        # Of 20 prefixes all but the first request; routed at random, two engines find 0.4.
        assert cached_share(url, shared_prompts(20, 3)) > 0.6
        death = kill_while_it_answers(url, engines(), random.Random(0))
        assert what_is_wrong(death.answers, expected, death.at_s) == []
        process.wait_for("engines that run: 2")
