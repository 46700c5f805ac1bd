"""Both event loops, for tests of connections."""

from __future__ import annotations

import asyncio

import pytest
import uvloop


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine on the loop that tests have by default, and on the one that serves."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run
