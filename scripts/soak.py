#!/usr/bin/env python
"""Loads a server with mixed traffic for as long as it is told, and tells whether anything grows.

    scripts/soak.py --minutes 120                 a tiny model with random weights
    scripts/soak.py --minutes 120 -- --model ~/models/Qwen3-0.6B

What stands behind `--` are options of `serve`. Beside plain requests of every protocol there are
disconnects, slow readers, floods, aborts, grammars and bad bodies. Every so often the traffic stops
until nothing runs; then memory, files, threads, tasks and KV are looked at. In the end the server
is told to stop while requests run. The exit status is 1 where an answer was wrong, memory, files,
threads or tasks grew by more than 2 % from the first third to the last, or KV was not given back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.parse import urlsplit

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.process.server_process import ServerProcess, write_tiny_model

CLIENTS = 24
MOST_GROWTH = 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    """What the idle server has.

    Args:
        files, tasks: beside connections.
        kv_lost: KV tokens that are neither free nor cached, or locked.
    """

    at_s: float
    memory_mib: float
    files: int
    threads: int
    tasks: int
    connections: int
    kv_lost: int


@dataclass
class Soak:
    """Args: url: of the server; pid: its process."""

    url: str
    pid: int
    rng: random.Random
    session: aiohttp.ClientSession
    sent: Counter[str] = field(default_factory=Counter)
    came_back: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def _prompt(self) -> str:
        shared = "The quick brown fox jumps over the lazy dog. " * self.rng.choice((0, 1, 4, 12))
        return shared + f"{self.rng.random():.6f}"

    def _body(self) -> tuple[str, dict[str, Any]]:
        prompt, most = self._prompt(), self.rng.choice((1, 8, 24, 60))
        said = [{"role": "user", "content": prompt}]
        plain = {"stream": self.rng.random() < 0.5, "temperature": self.rng.choice((0, 1))}
        return self.rng.choice(
            [
                ("/v1/completions", {"prompt": prompt, "max_tokens": most, **plain}),
                ("/v1/completions", {"prompt": prompt, "max_tokens": most, "n": 3, **plain}),
                ("/v1/chat/completions", {"messages": said, "max_tokens": most, **plain}),
                ("/v1/messages", {"messages": said, "max_tokens": most, **plain}),
                ("/v1/responses", {"input": prompt, "max_output_tokens": most, **plain}),
            ]
        )

    async def ask(self, path: str, body: Any, *, statuses: tuple[int, ...] = (200,)) -> None:
        async with self.session.post(self.url + path, json=body) as answer:
            data = await answer.read()
            self.came_back[str(answer.status)] += 1
            if answer.status not in statuses:
                self.wrong.append(f"{path}: {answer.status} {data[:200]!r}")
            elif not data:
                self.wrong.append(f"{path}: an empty answer")

    async def plain(self) -> None:
        path, body = self._body()
        await self.ask(path, body, statuses=(200, 503))

    async def grammar(self) -> None:
        kind = self.rng.choice(("regex", "guided_choice"))
        rule = "[a-f]{3,9}" if kind == "regex" else ["one", "two", f"three{self.rng.random()}"]
        body = {"prompt": self._prompt(), "max_tokens": 40, kind: rule}
        await self.ask("/v1/completions", body, statuses=(200, 503))

    async def bad(self) -> None:
        await self.ask("/v1/completions", {"prompt": [], "n": -1}, statuses=(400,))

    async def flood(self) -> None:
        await asyncio.gather(*(self.plain() for _ in range(60)))

    async def abort(self) -> None:
        name = f"soak-{self.rng.random()}"
        body = {"prompt": self._prompt(), "max_tokens": 200, "request_id": name}
        asked = asyncio.create_task(self.ask("/v1/completions", body, statuses=(200, 503)))
        await asyncio.sleep(self.rng.uniform(0, 0.2))
        await self.ask("/abort_request", {"rid": name})
        await asked

    async def _raw(self, use: Callable[[asyncio.StreamReader], Awaitable[None]]) -> None:
        """A stream over a connection of its own, which is dropped after its use."""
        address = urlsplit(self.url)
        body = json.dumps({"prompt": self._prompt(), "max_tokens": 200, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: soak\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            cut = self.rng.choice((10, len(head) + len(body)))
            writer.write((head.encode() + body)[:cut])
            if cut > 10:
                await use(reader)
        finally:
            writer.transport.abort()

    async def disconnect(self) -> None:
        async def use(reader: asyncio.StreamReader) -> None:
            await reader.read(self.rng.choice((1, 300, 2000)))

        await self._raw(use)
        self.came_back["left"] += 1

    async def slow_reader(self) -> None:
        async def use(reader: asyncio.StreamReader) -> None:
            for _ in range(20):
                await reader.read(100)
                await asyncio.sleep(0.1)

        await self._raw(use)
        self.came_back["left"] += 1

    async def client(self, until_s: float) -> None:
        """One client after another, until the time is over."""
        acts = [self.plain] * 8 + [self.grammar, self.bad, self.abort, self.slow_reader]
        acts += [self.disconnect] * 3
        while time.monotonic() < until_s:
            act = self.flood if self.rng.random() < 0.002 else self.rng.choice(acts)
            self.sent[act.__name__] += 1
            await act()

    async def sample(self, started_s: float) -> None:
        """Waits until nothing runs, and looks."""
        async with asyncio.timeout(120):
            found = await self._idle()
            while found is None:
                await asyncio.sleep(0.05)
                found = await self._idle()
        connections, tasks = await self._gauges("loomserve:connections", "loomserve:tasks")
        memory_mib, threads, files = process_figures(self.pid)
        self.samples.append(
            Sample(
                at_s=time.monotonic() - started_s,
                memory_mib=memory_mib,
                files=files - connections,
                threads=threads,
                tasks=tasks - connections,
                connections=connections,
                kv_lost=found["capacity_tokens"]
                - found["free_tokens"]
                - found["cached_tokens"]
                - found["reserved_tokens"]
                + found["protected_tokens"],
            )
        )

    async def _idle(self) -> dict[str, Any] | None:
        async with self.session.get(self.url + "/server_info") as answer:
            found: dict[str, Any] = (await answer.json())["statistics"]
        busy = ("running", "prefilling", "waiting", "waiting_grammar", "in_flight")
        return None if any(found[name] for name in busy) else found

    async def _gauges(self, *names: str) -> list[int]:
        async with self.session.get(self.url + "/metrics") as answer:
            lines = [line.split() for line in (await answer.text()).splitlines()]
        values = {line[0].partition("{")[0]: line[-1] for line in lines}
        return [int(float(values[name])) for name in names]


def process_figures(pid: int) -> tuple[float, int, int]:
    """Resident memory in MiB, threads and open files of a process."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    lines = dict(line.split(":", 1) for line in status)
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(lines["VmRSS"].split()[0]) / 1024, int(lines["Threads"]), files


def judge(samples: list[Sample]) -> list[str]:
    """What is not flat. The first sample is left out: memory is filled then for the first time."""
    problems = [
        f"{s.kv_lost} KV tokens are lost after {s.at_s:.0f} s" for s in samples if s.kv_lost
    ]
    third = max(1, (len(samples) - 1) // 3)
    early, late = samples[1 : 1 + third], samples[-third:]
    if len(samples) < 4:
        return [*problems, "too short to tell whether anything grows"]
    for name in ("memory_mib", "files", "threads", "tasks"):
        before, after = (mean(getattr(s, name) for s in part) for part in (early, late))
        if after > before * (1 + MOST_GROWTH):
            problems.append(f"{name} grew from {before:.1f} to {after:.1f}")
    return problems


def table(soak: Soak) -> str:
    lines = [
        "| minute | memory, MiB | files | threads | tasks | KV tokens lost |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    step = max(1, len(soak.samples) // 20)
    shown = [*soak.samples[:-1:step], *soak.samples[-1:]]
    for s in shown:
        counts = (s.files, s.threads, s.tasks, s.kv_lost)
        figures = [f"{s.at_s / 60:.1f}", f"{s.memory_mib:.1f}", *map(str, counts)]
        lines.append(f"| {' | '.join(figures)} |")
    lines += ["", "Sent: " + ", ".join(f"{name} {n:,}" for name, n in sorted(soak.sent.items()))]
    lines.append("Came back: " + ", ".join(f"{k} {n:,}" for k, n in sorted(soak.came_back.items())))
    return "\n".join(lines)


async def drain(soak: Soak, server: ServerProcess) -> None:
    """The server is told to stop while requests run; those end well."""
    asked = [asyncio.create_task(soak.plain()) for _ in range(8)]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    server.terminate()
    for result in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, aiohttp.ClientError):
            soak.wrong.append(f"in the drain: {result!r}")
    soak.came_back["drained"] += len(asked)


async def run(server: ServerProcess, url: str, minutes: float, pause_s: float, seed: int) -> Soak:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)
    ) as session:
        soak = Soak(url, server.pid, random.Random(seed), session)
        started = time.monotonic()
        while time.monotonic() < started + 60 * minutes:
            until = min(time.monotonic() + pause_s, started + 60 * minutes)
            await asyncio.gather(*(soak.client(until) for _ in range(CLIENTS)))
            await soak.sample(started)
        await drain(soak, server)
        return soak


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0, help="how long (default 120)")
    parser.add_argument("--pause", type=float, default=20.0, help="seconds between two looks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="of the server, behind --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.options or ["--model", str(write_tiny_model(Path(folder) / "tiny"))]
        with ServerProcess("--port", "0", "--max-queued-requests", "200", *model) as server:
            url = server.url()
            soak = asyncio.run(run(server, url, given.minutes, given.pause, given.seed))
            status = server.exit_status()
    problems = [*soak.wrong[:20], *judge(soak.samples)]
    if status:
        problems.append(f"the server ended with status {status}")
    print(table(soak))
    print(*(f"WRONG: {problem}" for problem in problems), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
