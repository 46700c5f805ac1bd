"""The processes of a fleet: engines, routers in front of them, or both as `loomserve fleet`."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.process.fleet.environments import router_bin
from tests.process.server_process import PATIENCE_S, ServerProcess


def free_ports(count: int) -> int:
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


def get(url: str):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def wait_until(true, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, what
        threading.Event().wait(0.1)


class Router(ServerProcess):
    """A router in front of engines."""

    def __init__(
        self, command: Sequence[str], engines: Sequence[str], port: int, policy: str = "cache_aware"
    ) -> None:
        program = [str(router_bin() / command[0]), *command[1:]]
        words = ["--worker-urls", *engines, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--prometheus-port", str(port + 1), "--worker-startup-check-interval", "1"]
        words += ["--health-check-endpoint", "/ready", "--policy", policy]
        super().__init__(command=[*program, *words])
        self.address = f"http://127.0.0.1:{port}"
        self._count = len(engines)

    def ready(self) -> list[dict]:
        """Its workers, once all are healthy."""
        found: list[dict] = []

        def there() -> bool:
            with suppress(OSError):
                found[:] = get(self.address + "/workers")["workers"]
            return sum(one["is_healthy"] for one in found) == self._count

        wait_until(there, "the router does not find all engines")
        return found


@contextmanager
def engines(options: Sequence[str], count: int = 2) -> Iterator[list[ServerProcess]]:
    """So many servers of one thread each. They start at once: wait for each one's `url`."""
    words = [*options, "--access-log", "--cpu-threads", "1"]
    with ExitStack() as stack:
        yield [stack.enter_context(ServerProcess(*words)) for _ in range(count)]


@contextmanager
def fleet(
    options: Sequence[str], port: int, replicas: int = 2, router: Sequence[str] = ()
) -> Iterator[ServerProcess]:
    """`loomserve fleet` of so many replicas of one thread each, ready; drained in the end.

    Args:
        port: of its router; it takes the `replicas` + 1 behind it, too.
        router: options of the router.
    """
    env = {**os.environ, "PATH": f"{router_bin()}:{os.environ['PATH']}"}
    words = [*options, "--port", str(port), "--cpu-threads", "1", "--drain-timeout", "60"]
    words += ["--replicas", str(replicas), "--", *router]
    with ServerProcess("fleet", *words, env=env) as process:
        process.wait_for("loomserve fleet is ready")
        try:
            yield process
        finally:
            process.terminate()
            assert process.exit_status() == 0, process.output


def pid_of(port: int) -> int:
    """The process that listens on a port of this machine."""
    entries = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = next(e[9] for e in entries if e[1].endswith(f":{port:04X}") and e[3] == "0A")
    for link in (path for pid in os.listdir("/proc") if pid.isdigit() for path in _files(pid)):
        if os.path.exists(link) and os.readlink(link) == f"socket:[{inode}]":
            return int(link.split("/")[2])
    raise AssertionError(f"nobody listens on {port}")


def _files(pid: str) -> list[str]:
    try:
        return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []
