"""Runs a service that is ready until it has ended: sockets, signals, the drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from typing import TYPE_CHECKING

from server.app import app_runner, start_listening
from server.console import announce, progress
from server.http.sockets import base_url

if TYPE_CHECKING:
    import socket
    import ssl

    from server.service import Service
    from server.stop_signals import StopSignals

log = logging.getLogger("loomserve")

# After the drain, what is cut off gets this long to send its last event.
SHUTDOWN_SECONDS = 2.0


async def serve(
    service: Service,
    sockets: list[socket.socket],
    *,
    signals: StopSignals,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Answers on the sockets until SIGTERM, SIGHUP or SIGINT, then drains and closes what it
    served. Args: signals: those from before it has its own handlers."""
    service.engine.start()
    runner = app_runner(service, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    stop = asyncio.Event()
    _on_signals(stop)
    if signals.received:
        stop.set()
    listeners = await start_listening(service, runner, sockets, tls)
    announce(base_url(sockets, tls=tls is not None), service)
    await stop.wait()
    await _drain(service)
    for listener in listeners:
        listener.close()
    await service.engine.stop()
    await runner.cleanup()
    service.end_traces()
    service.model_format.close()
    service.tokenizer.close()
    service.engine.runner.close()


def _on_signals(stop: asyncio.Event) -> None:
    """SIGTERM, the first SIGINT, and SIGHUP where it is not ignored (nohup does that) begin the
    drain; a second SIGINT ends the process at once."""

    def interrupted() -> None:
        if stop.is_set():
            os._exit(130)
        progress("finishing what runs; press Ctrl-C again to stop at once")
        stop.set()

    def terminated(name: str) -> None:
        if not stop.is_set():
            log.info("%s: finishing what runs, taking nothing new", name)
        stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, terminated, "SIGTERM")
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, terminated, "SIGHUP")
    loop.add_signal_handler(signal.SIGINT, interrupted)


async def _drain(service: Service) -> None:
    """Takes nothing new and waits for what runs, as long as the option allows."""
    service.draining = True
    started = time.monotonic()
    end = started + service.config.drain_timeout
    # Polled: every way in which a generation ends would have to notify.
    while service.generator.live and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    if service.generator.live:
        log.warning("cutting off %d requests after the drain", len(service.generator.live))
    log.info("drained in %.1f s", time.monotonic() - started)
