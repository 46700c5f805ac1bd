"""`loomserve fleet`: N servers on this machine and SGLang's router in front of them.

    clients -> router (--host, --port) -> replica 0 (127.0.0.1, port + 1), replica 1 (port + 2), ...

What is here starts processes, starts those again that end, and tells the router who is there; which
replica gets a request is the router's decision alone. SIGHUP restarts the replicas one after the
other: each is taken out of the router, drains, and comes back before the next one goes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import aiohttp

from runtime.errors import ConfigError
from server.console import progress, tell_ready
from server.fleet.member import Member, RestartDelay
from server.fleet.options import FleetConfig, check_ports
from server.fleet.replica import Replica
from server.fleet.rolling_restart import restart_in_turn
from server.fleet.router import RouterClient

POLL_SECONDS = 0.1  # nothing tells when a process begins to listen
KILL_SECONDS = 5.0  # that a process gets beyond its own drain


def run_fleet(config: FleetConfig) -> int:
    """Runs the fleet until it is told to stop. Returns the exit status."""
    try:
        fleet = Fleet(config)
        check_ports(config)
        return asyncio.run(fleet.run())
    except ConfigError as error:
        print(f"loomserve: {error}", file=sys.stderr)
        return 2


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
        self._at_router: RouterClient
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
            self._at_router = RouterClient(self._client, self.config.router_url)
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

    def _roll_once(self) -> None:
        if self._rolling is None or self._rolling.done():
            roll = restart_in_turn(self.replicas, self._at_router, self._patience_s)
            self._rolling = asyncio.create_task(roll)
            self._rolling.add_done_callback(self._stop_at_fault)

    def _stop_at_fault(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
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

    async def _keep(self, replica: Replica) -> None:
        delay = RestartDelay()
        first = True
        while True:
            delay.begin()
            process = await replica.start()
            await self._until_ready(replica)
            status = await process.wait()
            never_ready = first and not replica.ready.is_set()
            first = False
            replica.ready.clear()
            if replica.asked_to_end:
                continue
            if never_ready:
                self._end_with(status)
                return
            await self._at_router.deregister(replica.url)
            await delay.wait(replica.name, status)

    async def _until_ready(self, replica: Replica) -> None:
        """Returns when it takes requests and the router knows, or when it has ended."""
        assert replica.process is not None
        while replica.process.returncode is None:
            if await replica.takes_requests(self._client):
                model = await replica.model_info(self._client)
                if model is not None:
                    self._model = model
                    await self._at_router.register(replica.url)
                    replica.ready.set()
                    progress(f"{replica.name} takes requests at {replica.url}")
                    return
            await asyncio.sleep(POLL_SECONDS)

    async def _keep_router(self) -> None:
        delay = RestartDelay()
        was_ready = False
        while True:
            delay.begin()
            process = await self.router.start()
            while process.returncode is None and await self._at_router.workers() is None:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
            if process.returncode is None:
                was_ready = True
                there = [one.url for one in self.replicas if one.ready.is_set()]
                await asyncio.gather(*(self._at_router.register(url) for url in there))
                self._announce()
            status = await process.wait()
            if not was_ready:
                progress(f"the router could not start: it ended with status {status}")
                self._end_with(status)
                return
            await delay.wait(self.router.name, status)

    def _end_with(self, status: int) -> None:
        self._status = status or 1
        self._stop.set()

    def _announce(self) -> None:
        model, chat = self._model["served_model_name"], self._model["capabilities"]["chat"]
        server = self.config.server
        tell_ready("loomserve fleet", self.config.router_url, model, server, chat=chat)
