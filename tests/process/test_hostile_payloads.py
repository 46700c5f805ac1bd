"""Nothing that one client sends holds up the event loop, and with it everybody else.

A server in a process of its own gets each payload while another client streams and /health is
asked again and again. What is asserted is processor time: of the event loop's thread between two of
its beats, which does not depend on what else the machine does. Lags by the clock are printed, and
/health's of 99 in 100, of each payload and of all: the bounds that an idle machine keeps are 20 ms for
the loop and 100 ms for /health.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import pytest

from tests.process.hostile_payloads import PAYLOADS
from tests.process.server_process import ServerProcess
from tests.security.raw_requests import RAW

pytestmark = pytest.mark.slow

# Twice the bound, and the beat itself: a loop that is always at work uses all of its 20 ms.
MOST_CPU_S = 0.06
COMMAND = [sys.executable, "-m", "tests.process.simulated_server"]
Answer = tuple[int, Any]  # its status, and what came with it
PATIENCE_S = 5.0  # for an answer; who leaves is served no longer


class Client:
    """One keep-alive connection."""

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        parts = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)

    def send(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        if body is not None and body.startswith(b"\x1f\x8b"):
            headers["Content-Encoding"] = "gzip"
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()


class Bystanders:
    """Others who use the server meanwhile: one asks for its health, one reads a stream."""

    def __init__(self, url: str) -> None:
        self.health_s: list[float] = []  # how long each took, since it was last cleared
        self.streams = self.broken = 0
        self.statuses: set[int] = set()
        self._url = url
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(ask,)) for ask in (self._health, self._stream)
        ]

    def __enter__(self) -> Bystanders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, ask) -> None:
        client = Client(self._url)
        while not self._ended.wait(0.005):
            ask(client)
        client.close()

    def _health(self, client: Client) -> None:
        begun = time.perf_counter()
        status, _ = client.send("GET", "/health")
        self.statuses.add(status)
        self.health_s.append(time.perf_counter() - begun)

    def _stream(self, client: Client) -> None:
        body = {
            "prompt": "y", "max_tokens": 60, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        status, text = client.send("POST", "/v1/completions", json.dumps(body).encode())
        self.statuses.add(status)
        *events, usage, done = text.removesuffix(b"\n\n").split(b"\n\n")
        self.broken += not (
            b'"finish_reason":"length"' in events[-1]
            and b'"completion_tokens":60' in usage
            and done == b"data: [DONE]"
        )
        self.streams += 1


def histogram(client: Client, name: str) -> dict[float, float]:
    """Observations up to each bound."""
    _, text = client.send("GET", "/metrics")
    found = re.findall(rf'^loomserve:{name}_bucket{{le="(\S+?)",.*}} (\S+)$', text.decode(), re.M)
    return {float(bound): float(count) for bound, count in found}


def largest(before: dict[float, float], after: dict[float, float]) -> float:
    """The least bound that no observation in between was above."""
    total = after[float("inf")] - before[float("inf")]
    return min(bound for bound in after if after[bound] - before[bound] == total)


def prepared(url: str, name: str) -> Callable[[], Answer]:
    """Sends a payload that is made now: making it keeps this process from asking for its health."""
    return partial(send_payload, url, *PAYLOADS[name]())


def send_payload(url: str, path: str, body: bytes) -> Answer:
    sender = Client(url, PATIENCE_S)
    try:
        return sender.send("POST", path, body)
    except ConnectionError:  # refused by its length: it need not be read to its end
        return 413, b""
    except TimeoutError:  # it is being served
        return 200, b""
    finally:
        sender.close()


def send_raw(url: str, name: str) -> Answer:
    """Ten times, one after another, so that others have been asked meanwhile."""
    parts = urllib.parse.urlsplit(url)
    answers = []
    for _ in range(10):
        with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S) as sock:
            try:
                sock.sendall(RAW[name])
                answers.append(sock.recv(1000))
            except ConnectionError:  # closed while more was on its way
                answers.append(b"")
    statuses = [int(answer.split(b" ")[1]) if answer else 0 for answer in answers]
    return max(statuses), answers[-1]


class Measured:
    """How long something held up the server: processor time, lag, and its answer."""

    def __init__(self, client: Client, others: Bystanders, send: Callable[[], Answer]) -> None:
        names = ("event_loop_cpu_seconds", "event_loop_lag_seconds")
        before = [histogram(client, one) for one in names]
        others.health_s.clear()
        self.status, self.answer = send()
        self.cpu_s, self.lag_s = (
            largest(old, histogram(client, one)) for old, one in zip(before, names, strict=True)
        )
        self.health_s = sorted(others.health_s) or [0.0]

    def __str__(self) -> str:
        return (
            f"loop busy {1e3 * self.cpu_s:5.0f} ms or less, late {1e3 * self.lag_s:5.0f} or less,"
            f" /health p99 {self.health_ms(0.99):5.0f}, largest {self.health_ms(1):5.0f}"
        )

    def health_ms(self, share: float) -> float:
        """What /health took at most, in that share of all times."""
        return 1e3 * _at(self.health_s, share)


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def test_nothing_that_a_client_sends_holds_up_the_others(capsys):
    worse: dict[str, float] = {}
    all_health: list[float] = []
    with ServerProcess(command=COMMAND) as server:
        url = server.url()
        client = Client(url)
        with Bystanders(url) as others:
            sends: dict[str, Callable[[], Callable[[], Answer]]]
            sends = {name: partial(prepared, url, name) for name in PAYLOADS}
            sends |= {f"raw: {name}": partial(partial, send_raw, url, name) for name in RAW}
            for name, prepare in sends.items():
                send = prepare()
                # A fault of the machine's does not come three times.
                found = [Measured(client, others, send)]
                while found[-1].cpu_s > MOST_CPU_S and len(found) < 3:
                    found.append(Measured(client, others, send))
                best = min(found, key=lambda one: one.cpu_s)
                with capsys.disabled():
                    print(f"{name:30} {best.status}: {best}")
                all_health += best.health_s
                assert best.status < 500, (name, best.answer[:300])
                if best.cpu_s > MOST_CPU_S:
                    worse[name] = best.cpu_s
        assert others.statuses == {200}
        assert others.streams > 10
        assert others.broken == 0
        client.close()
        with capsys.disabled():
            p99_ms = 1e3 * _at(sorted(all_health), 0.99)
            print(f"/health during all of it: p99 {p99_ms:.0f} ms; {others.streams} streams whole")
    assert not worse


def schema(number: int) -> dict:
    fields = {f"field_{number}_{i}": {"type": "string", "maxLength": 20 + i} for i in range(12)}
    return {"type": "object", "properties": fields, "required": [f"field_{number}_0"]}


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> int:
    body = {"prompt": "x", "max_tokens": 4, "guided_json": schema(number)}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def a_thousand_and_one(url: str) -> tuple[int, tuple[list[int], int]]:
    """200, and statuses of a thousand requests of one address, each with a schema of its own, and how many
    of them had ended when one of another address had."""
    elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as many,
        aiohttp.ClientSession(connector=elsewhere) as other,
    ):
        tasks = [asyncio.create_task(ask(many, url, number)) for number in range(1000)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert await ask(other, url, 1000) == 200
        ended = sum(task.done() for task in tasks)
        return 200, (await asyncio.gather(*tasks), ended)


def test_a_thousand_schemas_at_once_do_not_stand_before_another_client_s_one(capsys):
    with ServerProcess(command=COMMAND) as server:
        url = server.url()
        client = Client(url)
        with Bystanders(url) as others:
            found = Measured(client, others, lambda: asyncio.run(a_thousand_and_one(url)))
        client.close()
        statuses, ended = found.answer
    with capsys.disabled():
        print(f"a thousand schemas: {found}; another client's one came after {ended} of them")
    assert others.statuses == {200}
    assert others.broken == 0
    assert statuses == [200] * 1000
    assert ended < 500
    assert found.cpu_s <= 2 * MOST_CPU_S  # a thousand connections are taken in a turn or two
