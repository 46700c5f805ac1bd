"""Faults that the simulation has found, each by itself. The seed that showed it is beside it."""

from __future__ import annotations

import asyncio
import contextlib
import random

from runtime.request import SamplingParams
from server.app import app_runner, start_listening
from server.generation.params import GenerationParams
from tests.fakes import fake_server, make_fake_service
from tests.world.loop import WorldLoop
from tests.world.network import ListeningSocket, Network


def test_a_connection_whose_last_answer_is_never_read_is_given_up():
    """Seed 426: it was closed when it had been idle for long enough, and stayed open for ever, since
    a transport closes once all is sent. Each took one of the connections that may be open."""
    loop = WorldLoop(random.Random(0))
    network = loop.network = Network(loop, random.Random(0), lambda *_: None)
    times = {}

    async def main():
        service = make_fake_service(idle_timeout=4.0, slow_reader_timeout=3.0)
        service.engine.start()
        runner = app_runner(service)
        await runner.setup()
        await start_listening(service, runner, [ListeningSocket()])  # type: ignore[list-item]
        slow, never = [await network.connect(capacity=50) for _ in range(2)]
        for one in (slow, never):
            await one.send(b"GET /version HTTP/1.1\r\nHost: world\r\n\r\n")
        await asyncio.sleep(4.5)
        assert len(service.connections) == 2, "what was written is still to be sent"
        for _ in range(5):
            await asyncio.sleep(2.0)
            assert await slow.receive(20)
        times["never"] = never.lost
        times["slow"] = slow.lost
        while await slow.receive(50):
            pass
        await asyncio.sleep(0.1)
        times["open"] = len(service.connections)
        await service.engine.stop()
        await runner.cleanup()
        service.model_format.close()
        service.tokenizer.close()

    loop.run(main())
    assert times == {"never": 1, "slow": 0, "open": 0}


def test_a_request_that_came_while_the_process_was_held_up_is_answered():
    """Seed 1348: after a time longer than a head may take, timers come before what lies in the
    sockets, so connections were closed that had sent everything in time."""
    loop = WorldLoop(random.Random(0))
    network = loop.network = Network(loop, random.Random(0), lambda *_: None)
    answers = []

    async def main():
        service = make_fake_service(header_timeout=3.0)
        service.engine.start()
        runner = app_runner(service)
        await runner.setup()
        await start_listening(service, runner, [ListeningSocket()])  # type: ignore[list-item]
        client = await network.connect(capacity=1000)
        await asyncio.sleep(1.0)
        await client.send(b"GET /version HTTP/1.1\r\nHost: world\r\n\r\n")
        loop.stall(5.0)
        answers.append(await client.receive(1000))
        await service.engine.stop()
        await runner.cleanup()
        service.model_format.close()
        service.tokenizer.close()

    loop.run(main())
    assert answers[0].startswith(b"HTTP/1.1 200")


async def test_requests_that_are_aborted_together_end_in_the_order_in_which_they_came():
    """Seed 56: their order was that of a set, which memory addresses gave."""
    params = GenerationParams(sampling=SamplingParams(max_new_tokens=1000))
    names = [f"r{number}" for number in range(20)]
    async with fake_server() as server:
        generator, scheduler = server.service.generator, server.service.engine.scheduler
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(generator.start([[1]], params, name))
            aborted, original = [], scheduler.abort

            def abort(name, *told):
                aborted.append(name)
                return original(name, *told)

            scheduler.abort = abort
            assert generator.abort(None) == len(names)
        assert [name.rpartition("-")[0] for name in aborted] == names
        await server.wait_idle()
