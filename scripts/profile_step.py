#!/usr/bin/env python3
"""Host time of a streamed token: what the server itself costs, with a model that costs nothing.

    scripts/profile_step.py
    scripts/profile_step.py --streams 1,256 --seconds 5 --endpoint chat

A server whose runner gives every token at once runs in a process of its own; this one opens so many
streams and throws away what comes. All figures are microseconds of the server's processor time per
streamed token, in the best of eight windows: what else a machine does only ever adds to it. The
windows of `floor`, of loomserve and of loomserve with timers take turns; meanwhile the others stop.

    floor       a bare aiohttp application: handlers woken for each token that write the same bytes
    all         loomserve, without any timer in the way
    kernel      of these, system time, nearly all of it within `write`
    plan        the scheduler plans the next step
    launch      the step is handed to the runner, which is done with it at once
    commit      the scheduler appends the step's tokens
    detokenise  tokens become text, stops are looked for, metrics counted
    encode      the text becomes an event of the protocol
    write       the event goes into the connection
    loop        the rest: waking each stream's task

The parts are timed in a run of their own, since their timers cost as much as some of them; a
timer's cost is taken off. `idle` is the server's processor time, in percent of a core, while nobody
asks anything. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._profiled_server import CONTEXT_TOKENS, PARTS, PATHS

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = 8
SETTLE_SECONDS = 0.5
LOOK_SECONDS = 0.005
BUFFER_BYTES = 1 << 20
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "hello"},
    "chat": {"messages": [{"role": "user", "content": "hello"}]},
}
Used = dict[str, float]


class ServerProcess:
    """A server of `_profiled_server.py`, which runs only while it is wanted; to be used as a
    context."""

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def __enter__(self) -> ServerProcess:
        self._process = subprocess.Popen(
            [sys.executable, ROOT / "scripts" / "_profiled_server.py", self._mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.port = int(self._line())
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()
        self._process.communicate()

    def pause(self) -> None:
        """It gets no processor time until it is to go on."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def used(self) -> Used:
        """So far."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        found: Used = json.loads(self._line())
        return found

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("profile_step.py: the server has ended")
        return line


class Streams:
    """So many streams of a server. They are looked at now and again and what came is thrown away:
    a client that waits would have to be woken at each write, at the server's cost."""

    def __init__(self, server: ServerProcess, count: int, endpoint: str) -> None:
        self._server = server
        self._events = 0
        self._windows: list[Used] = []
        server.go_on()
        self._sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(count)]
        for one in self._sockets:
            one.sendall(request_bytes(endpoint))
        for one in self._sockets:
            while b"data: " not in one.recv(BUFFER_BYTES):
                pass
            one.setblocking(False)
        self._read_for(SETTLE_SECONDS)
        server.pause()

    def measure(self, seconds: float) -> None:
        """One window."""
        self._server.go_on()
        self._read_for(seconds / 10)  # its caches are cold
        before, self._events = self._server.used(), 0
        self._read_for(seconds)
        after = self._server.used()
        self._server.pause()
        used = {name: after[name] - before[name] for name in after}
        used["events"] = self._events
        self._windows.append({name: 1e6 * used[name] / used["tokens"] for name in used})

    def close(self) -> Used:
        """Per token, in microseconds, in the window in which it used least."""
        for one in self._sockets:
            one.close()
        self._server.go_on()
        return min(self._windows, key=lambda used: used["all"])

    def _read_for(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for one in self._sockets:
                with contextlib.suppress(BlockingIOError):
                    self._events += one.recv(BUFFER_BYTES).count(b"data: ")
            time.sleep(LOOK_SECONDS)


def request_bytes(endpoint: str) -> bytes:
    more = {"stream": True, "ignore_eos": True, "max_tokens": CONTEXT_TOKENS // 2}
    body = json.dumps({**BODIES[endpoint], **more}).encode()
    head = f"POST {PATHS[endpoint]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def measure(
    counts: list[int], endpoint: str, seconds: float, idle_seconds: float
) -> dict[str, Any]:
    """Microseconds per token by number of streams, and the idle share."""
    with (
        ServerProcess("bare") as bare,
        ServerProcess("plain") as plain,
        ServerProcess("timed") as timed,
    ):
        time.sleep(SETTLE_SECONDS)
        before = plain.used()
        time.sleep(idle_seconds)
        after = plain.used()
        share = 100 * (after["all"] - before["all"]) / (after["wall"] - before["wall"])
        rows = {}
        for count in counts:
            for server in (bare, plain, timed):
                server.pause()
            streams = [Streams(server, count, endpoint) for server in (bare, plain, timed)]
            for _ in range(WINDOWS):
                for one in streams:
                    one.measure(seconds / WINDOWS)
            rows[count] = _row(*(one.close() for one in streams))
    return {"idle_percent": round(share, 3), "streams": rows}


def _row(floor: Used, whole: Used, parts: Used) -> dict[str, float]:
    row = {"floor": floor["all"], "all": whole["all"], "kernel": whole["kernel"]}
    row |= {part: parts[part] for part in PARTS}
    row["loop"] = row["all"] - sum(row[part] for part in PARTS)
    row["events_per_token"] = whole["events"] / 1e6
    return {name: round(value, 2) for name, value in row.items()}


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    names = ("floor", "all", "kernel", *PARTS, "loop")
    lines = ["| streams | " + " | ".join(names) + " |", "|---:" * (len(names) + 1) + "|"]
    for n, row in found["streams"].items():
        lines.append(f"| {n} | " + " | ".join(f"{row[name]:.1f}" for name in names) + " |")
    return "\n".join([*lines, "", f"idle: {found['idle_percent']:.2f} % of a core"])


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--streams", default="1,4,16,64,256", metavar="N,...", help="how many at once")
    add("--endpoint", choices=tuple(PATHS), default="completions")
    add("--seconds", type=float, default=3.0, help="for each figure (3)")
    add("--idle-seconds", type=float, default=5.0, help="without a request (5)")
    options = parser.parse_args(argv)
    try:
        options.streams = [int(word) for word in options.streams.split(",")]
    except ValueError:
        options.streams = []
    if not options.streams or not all(1 <= n <= 512 for n in options.streams):
        parser.error("--streams: must be whole numbers from 1 to 512")
    for name in ("seconds", "idle_seconds"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')}: must be above 0")
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    found = measure(options.streams, options.endpoint, options.seconds, options.idle_seconds)
    print(table(found))
    about = {"endpoint": options.endpoint, "python": platform.python_version()}
    print(json.dumps({**about, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
