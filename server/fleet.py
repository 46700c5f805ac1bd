"""`loomserve fleet`: N servers on this machine and SGLang's router in front of them.

    clients -> router (--host, --port) -> replica 0 (127.0.0.1, port + 1), replica 1 (port + 2), ...

What is here starts processes, starts those again that end, and tells the router who is there; which
replica gets a request is the router's decision alone. SIGHUP restarts the replicas one after the
other: each is taken out of the router, drains, and comes back before the next one goes.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import math
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from runtime.errors import ConfigError
from server.args import parse_args
from server.console import progress, tell_ready
from server.http.sockets import listen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.config import ServerConfig

ROUTER = "sglang-router"
POLL_SECONDS = 0.1  # nothing tells when a process begins to listen
FIRST_DELAY_S, LAST_DELAY_S = 1.0, 30.0  # before a process that ended is started again
STABLE_S = 60.0  # who has run for so long begins with the first delay again
KILL_SECONDS = 5.0  # that a process gets beyond its own drain


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """What a fleet is told beside the options of its servers.

    Args:
        devices: GPUs, dealt out to the replicas in turn; empty: what each finds.
        words: the servers' options as they were given, which `server` is made of.
        router_words: options of the router, as it documents them.
    """

    replicas: int
    devices: tuple[str, ...]
    server: ServerConfig
    words: tuple[str, ...]
    router_words: tuple[str, ...]

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.server.port + 1 + number}"

    @property
    def router_url(self) -> str:
        anywhere = self.server.host in ("0.0.0.0", "::", "")
        host = "127.0.0.1" if anywhere else self.server.host
        return f"http://{host}:{self.server.port}"

    def replica_command(self, number: int) -> list[str]:
        words = ["--host", "127.0.0.1", "--port", str(self.server.port + 1 + number)]
        if self.devices:
            words += ["--device", "cuda"]  # which refuses where there is none, as auto would not
        elif not self.server.runner.cpu_threads:
            cores = len(os.sched_getaffinity(0))
            words += ["--cpu-threads", str(max(1, cores // self.replicas))]
        # -P: a folder of this name where the fleet was started is not meant.
        return [sys.executable, "-P", "-m", "server", *self.words, *words]

    def replica_environment(self, number: int) -> dict[str, str]:
        if not self.devices:
            return dict(os.environ)
        device = self.devices[number % len(self.devices)]
        return {**os.environ, "CUDA_VISIBLE_DEVICES": device}

    def router_command(self) -> list[str]:
        drain_s = math.ceil(self.server.drain_timeout)
        return [
            *(_router_program(), "launch"),
            *("--host", self.server.host, "--port", str(self.server.port)),
            *("--prometheus-port", str(self.server.port + 1 + self.replicas)),
            *("--worker-startup-check-interval", "1"),
            *("--health-check-endpoint", "/ready", "--health-check-interval-secs", "2"),
            *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
            *("--shutdown-grace-period-secs", str(drain_s), "--log-level", "warn"),
            *self.router_words,
        ]


def _router_program() -> str:
    """Raises: ConfigError: it is not installed."""
    beside = Path(sys.executable).with_name(ROUTER)
    found = shutil.which(ROUTER) or (str(beside) if beside.exists() else None)
    if found is None:
        raise ConfigError(f"{ROUTER} is not installed; pip install -e '.[fleet]'")
    return found


def parse_fleet(argv: Sequence[str], prog: str = "loomserve fleet") -> FleetConfig:
    """What the command line asks for; ends the process with status 2 and one line where it cannot
    be: [--replicas N] [--devices I,J,...] [OPTIONS OF SERVE] [-- THE ROUTER'S]."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    words, router_words = words[:end], tuple(words[end + 1 :])
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--replicas N] [--devices I,J,...] [OPTIONS OF SERVE] [-- THE ROUTER'S]",
        description="Serve a model by several processes behind a router.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--replicas", type=int, default=2, metavar="N", help="processes, each with the whole model"
    )
    parser.add_argument(
        "--devices", default="", metavar="I,J,...", help="GPUs, dealt out to the replicas in turn"
    )
    given, words = parser.parse_known_args(words)
    server = parse_args(words, prog)
    devices = tuple(filter(None, given.devices.split(",")))
    try:
        _check(given.replicas, devices, server)
    except ConfigError as error:
        parser.exit(2, f"{prog}: error: {error}\n")
    return FleetConfig(given.replicas, devices, server, tuple(words), router_words)


def _check(replicas: int, devices: tuple[str, ...], server: ServerConfig) -> None:
    if devices and server.runner.device == "cpu":
        raise ConfigError("devices: they are GPUs, but the device is cpu")
    if replicas < 1:
        raise ConfigError(f"replicas: got {replicas}, must be at least 1")
    last = server.port + 1 + replicas
    if server.port == 0 or last > 65535:
        raise ConfigError(
            f"port {server.port}: the fleet takes it and the {replicas + 1} behind it"
        )
    for name in ("uds", "ssl_certfile", "record", "kv_events"):
        if getattr(server, name) is not None:
            raise ConfigError(f"{name}: the replicas of a fleet cannot share it")


def _check_ports(config: FleetConfig) -> None:
    """Raises: ConfigError: one that the fleet takes is somebody else's."""
    port, behind = config.server.port, config.replicas + 1
    for one in range(port, port + 1 + behind):
        # The router's metrics are for everybody, as its own option has it.
        host = "0.0.0.0" if one == port + behind else "127.0.0.1"
        for taken in listen(config.server.host if one == port else host, one):
            taken.close()


_LIBRARY = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Run by a new process: it gets SIGTERM should the fleet be killed, and frees its port."""
    _LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Member:
    """A process of the fleet. It has a group of its own, so that Ctrl-C reaches the fleet alone."""

    stdout: int | None = None  # the fleet's own

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self.process: asyncio.subprocess.Process | None = None
        self.asked_to_end = False
        self._command = command
        self._environment = environment

    async def start(self) -> asyncio.subprocess.Process:
        self.asked_to_end = False
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            env=self._environment,
            stdout=self.stdout,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        return self.process

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def end(self, patience_s: float) -> None:
        """Lets it drain; by force where that takes too long."""
        self.asked_to_end = True
        if self.process is None:
            return
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience_s):
                await self.process.wait()
        except TimeoutError:
            progress(f"{self.name} did not end in {patience_s:g} s and is killed")
            self.signal(signal.SIGKILL)
            await self.process.wait()


class Replica(Member):
    """A server. `ready` is set while it takes requests and the router knows it."""

    stdout = asyncio.subprocess.DEVNULL  # its ready line names an address that is not for clients

    def __init__(self, config: FleetConfig, number: int) -> None:
        command, environment = config.replica_command(number), config.replica_environment(number)
        super().__init__(f"replica {number}", command, environment)
        self.url = config.url(number)
        self.ready = asyncio.Event()


class Fleet:
    """Keeps the replicas and the router running until it is told to stop."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.replicas = [Replica(config, number) for number in range(config.replicas)]
        self.router = Member("the router", config.router_command(), dict(os.environ))
        self._stop = asyncio.Event()
        self._status = 0
        self._model: dict[str, Any] = {}  # as the replicas describe it
        self._client: aiohttp.ClientSession
        self._rolling: asyncio.Task[None] | None = None
        self._patience_s = config.server.drain_timeout + KILL_SECONDS

    async def run(self) -> int:
        """Returns the exit status: 0 after a drain, that of a replica or router that could not
        start.

        Raises: ConfigError: what answers on the router's port is no router.
        """
        self._on_signals()
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout) as self._client:
            lead = asyncio.create_task(self._lead())
            lead.add_done_callback(self._stop_at_fault)
            await self._stop.wait()
            tasks = [task for task in (lead, self._rolling) if task is not None]
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            # The router first: it takes nothing new, and what runs ends through it.
            await self.router.end(self._patience_s)
            await asyncio.gather(*(one.end(self._patience_s) for one in self.replicas))
        for fault in ends:
            while isinstance(fault, ExceptionGroup):
                fault = fault.exceptions[0]
            if isinstance(fault, Exception):
                raise fault
        return self._status

    def _stop_at_fault(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._stop.set()

    def _on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        loop.add_signal_handler(signal.SIGHUP, self._roll_once)

    def _interrupted(self) -> None:
        if self._stop.is_set():
            for member in (self.router, *self.replicas):
                member.signal(signal.SIGKILL)
            os._exit(130)
        progress("finishing what runs; press Ctrl-C again to stop at once")
        self._stop.set()

    async def _lead(self) -> None:
        """The first replica alone, which fills the caches that all share; then the others; then
        the router."""
        async with asyncio.TaskGroup() as group:
            for at, replica in enumerate(self.replicas):
                group.create_task(self._keep(replica))
                if at == 0:
                    await replica.ready.wait()
            await asyncio.gather(*(one.ready.wait() for one in self.replicas))
            group.create_task(self._keep_router())

    # Keeping them

    async def _keep(self, replica: Replica) -> None:
        delay_s = FIRST_DELAY_S
        first = True
        while True:
            started = time.monotonic()
            process = await replica.start()
            await self._until_ready(replica)
            status = await process.wait()
            never_ready = first and not replica.ready.is_set()
            first = False
            replica.ready.clear()
            if replica.asked_to_end:
                continue
            if never_ready:
                self._status = status or 1
                self._stop.set()
                return
            await self._deregister(replica)
            if time.monotonic() - started > STABLE_S:
                delay_s = FIRST_DELAY_S
            progress(f"{replica.name} ended with status {status}; again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_DELAY_S)

    async def _until_ready(self, replica: Replica) -> None:
        """Returns when it takes requests and the router knows, or when it has ended."""
        assert replica.process is not None
        while replica.process.returncode is None:
            if await self._answers(replica.url + "/ready") and await self._describes(replica):
                await self._register(replica)
                replica.ready.set()
                progress(f"{replica.name} takes requests at {replica.url}")
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _keep_router(self) -> None:
        delay_s = FIRST_DELAY_S
        was_ready = False
        while True:
            process = await self.router.start()
            while process.returncode is None and await self._known() is None:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
            if process.returncode is None:
                was_ready = True
                there = [one for one in self.replicas if one.ready.is_set()]
                await asyncio.gather(*(self._register(one) for one in there))
                self._announce()
            status = await process.wait()
            if not was_ready:
                progress(f"the router could not start: it ended with status {status}")
                self._status = status or 1
                self._stop.set()
                return
            progress(f"the router ended with status {status}; again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_DELAY_S)

    def _announce(self) -> None:
        model, chat = self._model["served_model_name"], self._model["capabilities"]["chat"]
        server = self.config.server
        tell_ready("loomserve fleet", self.config.router_url, model, server, chat=chat)

    # A rolling restart

    def _roll_once(self) -> None:
        if self._rolling is None or self._rolling.done():
            self._rolling = asyncio.create_task(self._roll())
            self._rolling.add_done_callback(self._stop_at_fault)

    async def _roll(self) -> None:
        if len(self.replicas) < 2:
            progress("one replica alone is not restarted: nobody would answer meanwhile")
            return
        for replica in self.replicas:
            others = [one for one in self.replicas if one is not replica]
            await asyncio.gather(*(one.ready.wait() for one in others))
            progress(f"{replica.name} is restarted")
            await self._deregister(replica)
            replica.ready.clear()
            await replica.end(self._patience_s)
            await replica.ready.wait()
        progress("all replicas were restarted")

    # What the router knows

    async def _answers(self, url: str) -> bool:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._client.get(url) as answer:
                return answer.status == 200
        return False

    async def _describes(self, replica: Replica) -> bool:
        """Whether it tells what it serves, which is kept."""
        key = self.config.server.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._client.get(replica.url + "/model_info", headers=headers) as answer:
                if answer.status == 200:
                    self._model = await answer.json()
                    return True
        return False

    async def _known(self) -> dict[str, dict[str, Any]] | None:
        """The workers that the router has, by their address; None: it does not answer.

        Raises: ConfigError: it answers otherwise than this router does.
        """
        url = self.config.router_url + "/workers"
        try:
            async with self._client.get(url) as answer:
                text = await answer.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError):
            return None
        try:
            return {worker["url"]: worker for worker in json.loads(text)["workers"]}
        except (ValueError, KeyError, TypeError):
            told = f"status {answer.status}, {text[:100]!r}"
            raise ConfigError(f"{url} is not answered as by {ROUTER}: {told}") from None

    async def _register(self, replica: Replica) -> None:
        """Where there is no router yet it learns of the replica when it starts."""
        known = await self._known()
        while known is not None and not known.get(replica.url, {}).get("is_healthy"):
            if replica.url not in known:
                await self._ask("post", "/workers", json={"url": replica.url})
            await asyncio.sleep(POLL_SECONDS)
            known = await self._known()

    async def _deregister(self, replica: Replica) -> None:
        known = await self._known()
        while known and replica.url in known:
            await self._ask("delete", "/workers/" + known[replica.url]["id"])
            await asyncio.sleep(POLL_SECONDS)
            known = await self._known()

    async def _ask(self, method: str, path: str, **options: Any) -> None:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._client.request(
                method, self.config.router_url + path, **options
            ) as answer:
                await answer.read()


def run_fleet(config: FleetConfig) -> int:
    """Runs the fleet until it is told to stop. Returns the exit status."""
    try:
        fleet = Fleet(config)
        _check_ports(config)
        return asyncio.run(fleet.run())
    except ConfigError as error:
        print(f"loomserve: {error}", file=sys.stderr)
        return 2
