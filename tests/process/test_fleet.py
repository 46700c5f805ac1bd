"""Two replicas of a tiny model behind the real routers: what comes through, and what a death costs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.process.routers import router_bin
from tests.process.server_process import PATIENCE_S, ServerProcess

pytestmark = pytest.mark.slow

MODEL = "tiny-llama"


def free_ports(count):
    """The first of so many ports in a row that nobody listens on."""
    for first in range(21000 + os.getpid() % 5000, 60000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def prompt(number):
    """One of five shared prefixes of 100 tokens, and an end of its own."""
    return f"{number % 5}" * 100 + f" and {number}"


def ask(url, number, max_tokens=24):
    """(text, whole): a streamed completion; whole: it ended as one should. None: it never began."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    body = {"model": MODEL, "prompt": prompt(number), "stream": True, "temperature": 0}
    body |= {"max_tokens": max_tokens, "ignore_eos": True}
    text, whole = None, False
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            return None
        for line in answer:
            if line.startswith(b"data: {") and (choices := json.loads(line[6:]).get("choices")):
                text = (text or "") + choices[0]["text"]
            whole = whole or line.startswith(b"data: [DONE]")
    except (OSError, HTTPException):
        pass  # what was read of the stream is what the client has
    finally:
        connection.close()
    return None if text is None else (text, whole)


def ask_many(url, numbers, at_once=8, **options):
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda number: ask(url, number, **options), numbers))


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def wait_until(true, what):
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, what
        threading.Event().wait(0.1)


class Router(ServerProcess):
    """A router in front of engines."""

    def __init__(self, command, urls, port):
        program = [str(router_bin() / command[0]), *command[1:]]
        words = ["--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--prometheus-port", str(port + 1), "--worker-startup-check-interval", "1"]
        words += ["--health-check-endpoint", "/ready", "--policy", "cache_aware"]
        super().__init__(command=[*program, *words])
        self.address = f"http://127.0.0.1:{port}"

    def ready(self):
        """Its workers, once both are healthy."""
        found: list[dict] = []

        def both():
            with suppress(OSError):
                found[:] = get(self.address + "/workers")["workers"]
            return sum(one["is_healthy"] for one in found) == 2

        wait_until(both, "the router does not find both engines")
        return found


@contextmanager
def engines(options):
    with ExitStack() as stack:
        yield [
            stack.enter_context(ServerProcess(*options, "--access-log", "--cpu-threads", "1"))
            for _ in range(2)
        ]


def asked(engine):
    """(path, status) of everything that an engine was asked."""
    lines = [json.loads(line) for line in engine.lines if line.startswith('{"time"')]
    return {(line["path"], line["status"]) for line in lines}


def test_both_routers_find_what_they_ask_for_and_answers_are_one_process_s(options):
    router_bin()
    with engines(options) as (one, other), ExitStack() as stack:
        urls = [one.url(), other.url()]
        alone = ask_many(urls[0], range(20))
        assert all(whole for _, whole in alone)
        first = free_ports(4)
        for at, command in enumerate((["sglang-router", "launch"], ["vllm-router"])):
            router = stack.enter_context(Router(command, urls, first + 2 * at))
            workers = router.ready()
            if command[0] == "sglang-router":  # the other one asks nothing of the kind
                assert {worker["model_id"] for worker in workers} == {MODEL}
                loads = get(router.address + "/get_loads")["workers"]
                assert [load["load"] for load in loads] == [0, 0]
            assert ask_many(router.address, range(20)) == alone
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            sent = urllib.request.Request(
                router.address + "/v1/chat/completions",
                json.dumps(chat).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(sent, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 2
        assert {status for engine in (one, other) for _, status in asked(engine)} == {200}
        assert ("/v1/completions", 200) in asked(one) & asked(other), "only one was asked"


@contextmanager
def fleet(options, port):
    env = {**os.environ, "PATH": f"{router_bin()}:{os.environ['PATH']}"}
    words = [*options, "--port", str(port), "--cpu-threads", "1", "--drain-timeout", "60"]
    with ServerProcess("fleet", "--replicas", "2", *words, env=env) as process:
        process.wait_for("loomserve fleet is ready")
        try:
            yield process
        finally:
            process.terminate()
            assert process.exit_status() == 0, process.output


class Load(threading.Thread):
    """Asks on and on, four at a time, until it is stopped."""

    def __init__(self, url):
        super().__init__()
        self.url = url
        self.answers = {}
        self.stopped = threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.join()

    def run(self):
        number = 0
        while not self.stopped.is_set():
            numbers = range(number, number + 4)
            self.answers |= zip(numbers, ask_many(self.url, numbers, at_once=4), strict=True)
            number += 4


def test_a_fleet_restarts_one_by_one_and_outlives_a_kill(options):
    port = free_ports(4)
    url = f"http://127.0.0.1:{port}"
    alone = f"http://127.0.0.1:{port + 1}"  # the first replica, past the router
    with fleet(options, port) as process:
        command = shlex.split(process.wait_for(r"^\s*curl "))
        assert command[2].startswith(url)
        assert json.loads(command[-1])["model"] == MODEL, "which the router needs"
        assert process.output.count("curl ") == 1, "clients are not sent to a replica"
        with Load(url) as load:
            process.send(signal.SIGHUP)
            process.wait_for("all replicas were restarted")
        answers = load.answers
        assert len(answers) > 8
        assert [n for n, answer in answers.items() if answer is None or not answer[1]] == []
        assert list(answers.values()) == ask_many(alone, answers)

        with Load(url) as load:
            wait_until(lambda: load.answers, "no answers")
            os.kill(pid_of(port + 2), signal.SIGKILL)
            process.wait_for("replica 1 ended with status -9")
            process.wait_for("replica 1 takes requests")
        assert [n for n, answer in load.answers.items() if answer is None] == [], "not begun, lost"
        whole = dict(zip(load.answers, ask_many(alone, load.answers), strict=True))
        for number, (text, complete) in load.answers.items():
            expected = whole[number][0]
            assert text == expected if complete else expected.startswith(text.rstrip("\ufffd"))


def pid_of(port):
    """The process that listens on a port of this machine."""
    entries = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = next(e[9] for e in entries if e[1].endswith(f":{port:04X}") and e[3] == "0A")
    for link in (path for pid in os.listdir("/proc") if pid.isdigit() for path in fds(pid)):
        if os.path.exists(link) and os.readlink(link) == f"socket:[{inode}]":
            return int(link.split("/")[2])
    raise AssertionError(f"nobody listens on {port}")


def fds(pid):
    try:
        return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []
