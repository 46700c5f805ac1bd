"""A signal that comes while the server starts ends it, wherever it strikes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from server import launcher
from server.args import make_config
from server.http.sockets import listen
from server.serving import serve
from server.stop_signals import StopSignals
from tests.fakes import make_fake_service


@pytest.fixture(autouse=True)
def handlers():
    """The process's own are there again after each test."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    kept = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


class SignalledWhenFinalized:
    """What its finalizer raises goes no further, as Python has it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


@pytest.fixture
def steps(monkeypatch):
    """The steps of a start, each to be replaced, and none with effects beyond the test."""
    names = ("load", "make_service", "serve", "set_up_logging", "gc", "progress", "uvloop")
    for name in (*names, "listen"):
        monkeypatch.setattr(launcher, name, Mock())
    monkeypatch.setattr(launcher, "answering_probes", lambda *_: nullcontext())
    monkeypatch.setattr(sys, "setswitchinterval", Mock())
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return launcher


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("step", ["load", "make_service", "progress"])
def test_a_signal_whose_exception_is_swallowed_ends_the_start(steps, monkeypatch, step, number):
    def finalize(*_: object) -> Mock:
        SignalledWhenFinalized(number)
        return Mock()

    monkeypatch.setattr(launcher, step, finalize)
    with pytest.raises(SystemExit) as end:
        launcher.run(make_config({"port": 0}))
    assert end.value.code == 0
    assert not steps.serve.called


def test_a_signal_right_before_serving_ends_it_as_a_later_one_would(caplog):
    caplog.set_level("INFO", "loomserve")
    signals = StopSignals()
    signals.hold()
    os.kill(os.getpid(), signal.SIGTERM)

    (sock,) = listen("127.0.0.1", 0)

    async def served() -> None:
        async with asyncio.timeout(60):
            await serve(make_fake_service(), [sock], signals=signals)

    with sock:
        asyncio.run(served())
    assert "drained in" in caplog.text
