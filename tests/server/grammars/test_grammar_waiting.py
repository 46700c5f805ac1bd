"""A request waits in the queue for its grammar: seen, charged, and in nobody's way."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from runtime.errors import EngineDead
from server.generation.output import ChoiceRules
from server.grammars import compiler as compiler_module
from server.grammars import sources
from server.http import heartbeat
from tests.effort import tries
from tests.fakes import fake_server, live

BOTH_LOOPS = pytest.mark.parametrize("disable_overlap", [False, True], ids=["overlap", "no-overlap"])  # fmt: skip
COLOURS = {"guided_choice": ["red", "green"]}
MESSAGES = [{"role": "user", "content": "hello"}]


class Gate:
    """Holds every compilation until it is opened; knows what was compiled."""

    def __init__(self, original) -> None:
        self._original = original
        self._open = threading.Event()
        self.begun: list[Any] = []

    def __call__(self, tokenizer, source, words):
        self.begun.append(source)
        assert self._open.wait(30)
        return self._original(tokenizer, source, words)

    def open(self):
        self._open.set()


@pytest.fixture
def gate(monkeypatch):
    found = Gate(compiler_module._compile)
    monkeypatch.setattr(compiler_module, "_compile", found)
    yield found
    found.open()


async def until(condition):
    """Waits for what no event tells of: it happens between two turns of the loop."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@asynccontextmanager
async def waiting_server(count, gate, ask, choices=1, **options):
    """A server on which `count` requests wait for their grammars, and their answers."""
    async with fake_server(**options) as server:
        tasks = [asyncio.create_task(ask(server, i)) for i in range(count)]
        statistics = server.service.engine.scheduler.statistics
        await until(lambda: statistics().waiting_grammar == count * choices)
        await until(lambda: gate.begun)
        yield server, tasks


async def post(server, body, path="/v1/completions"):
    return await server.post(path, {"prompt": "hello", "max_tokens": 8, **body})


@BOTH_LOOPS
async def test_it_is_seen_and_charged_while_others_are_served(gate, disable_overlap):
    async def ask(server, i):
        return await post(server, {**COLOURS, "include_wait_times": True})

    async with waiting_server(1, gate, ask, disable_overlap=disable_overlap) as (server, tasks):
        free = await server.complete("free", max_tokens=30)
        assert free["usage"]["completion_tokens"] == 30
        (waiting,) = (await server.get("/debug/requests"))[1]["requests"]
        assert (waiting["state"], waiting["blocked_by"]) == ("waiting", "grammar")
        async with server.client.get(server.url + "/metrics") as answer:
            assert 'vllm:num_requests_waiting{model_name="fake"} 1.0' in await answer.text()
        gate.open()
        status, body = await tasks[0]
        assert status == 200
        assert body["choices"][0]["text"] in ("red", "green")
        assert body["usage"]["wait_seconds"]["grammar"] > 0
        await server.wait_idle()
        # What is compiled makes nobody wait.
        status, body = await ask(server, 1)
        assert "grammar" not in body["usage"]["wait_seconds"]
        assert len(gate.begun) == 1
        await server.wait_idle()


async def test_equal_grammars_are_compiled_once_at_a_time(gate):
    async def ask(server, i):
        return await post(server, {**COLOURS, "n": 2, "temperature": 1})

    async with waiting_server(3, gate, ask, choices=2) as (server, tasks):
        gate.open()
        for status, body in await asyncio.gather(*tasks):
            assert status == 200
            assert all(choice["text"] in ("red", "green") for choice in body["choices"])
        assert len(gate.begun) == 1
        await server.wait_idle()


async def test_it_keeps_its_place_in_the_queue(gate):
    """Who came first is served first, though its grammar took longer than the other's arrival."""
    async with fake_server(scheduler={"max_running_requests": 1}) as server:
        scheduler = server.service.engine.scheduler
        runs = asyncio.create_task(post(server, {"max_tokens": 1500, "ignore_eos": True}))
        await until(lambda: scheduler.statistics().running)
        ended: list[str] = []

        async def note(name, body):
            assert (await post(server, body))[0] == 200
            ended.append(name)

        first = asyncio.create_task(note("grammar", COLOURS))
        await until(lambda: scheduler.statistics().waiting_grammar)
        second = asyncio.create_task(note("free", {}))
        await until(lambda: scheduler.statistics().waiting == 1)
        gate.open()
        await until(lambda: scheduler.statistics().waiting == 2)
        runs.cancel()
        await asyncio.gather(first, second)
        assert ended == ["grammar", "free"]
        await server.wait_idle()


BAD = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "guided_json": BAD},
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}},
    },
    "/generate": {"text": "x", "sampling_params": {"json_schema": json.dumps(BAD)}},
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_schema_that_soon_does_not_compile_is_a_400(path, streamed, monkeypatch):
    monkeypatch.setattr(heartbeat, "OPEN_AFTER_S", 20.0)  # soon is a matter of the machine
    async with fake_server() as server:
        good = asyncio.create_task(post(server, {"max_tokens": 40}))
        status, body = await server.post(path, {**BODIES[path], "stream": streamed})
        assert status == 400
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["param"].endswith(("guided_json", "schema"))
        assert "unsatisfiable" in body["error"]["message"].lower()
        assert (await good)[0] == 200
        await server.wait_idle()


@pytest.mark.parametrize("path", BODIES)
async def test_a_schema_whose_compilation_takes_long_fails_in_the_stream(gate, path):
    """Its headers are there before it is compiled, and the error is what a whole answer's is."""
    async with fake_server() as server:
        body = {**BODIES[path], "stream": True}
        async with server.client.post(server.url + path, json=body) as answer:
            assert answer.status == 200
            gate.open()
            text = await answer.text()
        status, whole = await server.post(path, BODIES[path])
        assert status == 400
        assert json.loads(text.removeprefix("data: ")) == whole
        await server.wait_idle()


@BOTH_LOOPS
async def test_all_who_wait_for_a_bad_schema_get_the_same_400(gate, disable_overlap):
    async def ask(server, i):
        return await post(server, {"guided_json": BAD})

    async with waiting_server(3, gate, ask, disable_overlap=disable_overlap) as (server, tasks):
        gate.open()
        answers = await asyncio.gather(*tasks)
        assert [status for status, _ in answers] == [400] * 3
        assert len({json.dumps(body) for _, body in answers}) == 1
        assert len(gate.begun) == 1
        await server.wait_idle()


async def test_what_is_wrong_on_its_face_is_refused_without_compiling(gate):
    async with fake_server() as server:
        bodies: list[dict[str, Any]] = [{"guided_json": 7}, {"guided_regex": "x" * 200_000}]
        for body in [*bodies, {"guided_choice": []}]:
            status, answer = await post(server, body)
            assert status == 400, answer
        assert gate.begun == []
        assert not server.service.engine.scheduler.has_unfinished


async def test_a_client_that_leaves_takes_its_compilation_along(gate):
    async def ask(server, i):
        return await post(server, {"guided_choice": [f"choice {i}"]})

    async with waiting_server(6, gate, ask) as (server, tasks):
        compiler = server.service.model_format._compiler
        await until(lambda: len(gate.begun) == 2)  # as many as there are threads
        for task in tasks[1:]:
            task.cancel()
        await until(lambda: live(server.service) == 1)
        await until(lambda: len(compiler._going_on) == 2)  # the others had not begun
        gate.open()
        status, body = await tasks[0]
        assert (status, body["choices"][0]["text"]) == (200, "choice 0")
        await server.wait_idle()
        await until(lambda: not compiler._going_on)  # nor is the one that nobody waits for
        assert len(gate.begun) == 2


async def test_a_time_limit_rules_the_wait(gate):
    async with fake_server() as server:
        status, body = await post(server, {**COLOURS, "timeout": 0.05})
        assert (status, body["error"]["code"]) == (504, "timeout")
        gate.open()
        await server.wait_idle()


async def test_the_queue_s_cap_counts_who_waits_for_a_grammar(gate):
    async def ask(server, i):
        return await post(server, COLOURS)

    async with waiting_server(2, gate, ask, scheduler={"max_queued_requests": 2}) as (
        server,
        tasks,
    ):
        assert (await post(server, {}))[0] == 503
        gate.open()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]
        await server.wait_idle()


async def test_the_server_stops_while_a_grammar_is_compiled(gate):
    async def ask(server, i):
        return await post(server, COLOURS)

    async with waiting_server(1, gate, ask) as (server, tasks):
        await server.service.engine.stop()
        status, body = await tasks[0]
        assert (status, body["error"]["code"]) == (503, "engine_dead")
        with pytest.raises(EngineDead):
            server.service.engine.submit([], ChoiceRules())
        gate.open()


async def test_a_compiler_that_breaks_is_a_500_of_that_request(monkeypatch):
    def broken(tokenizer, source, words):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(compiler_module, "_compile", broken)
    async with fake_server() as server:
        status, body = await post(server, COLOURS)
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert "secret" not in json.dumps(body)
        assert (await post(server, {}))[0] == 200
        await server.wait_idle()


def one_choice(text):
    return sources.choice([text], "x")


async def compiled_in_order(gate, asked):
    """Names of what is compiled, in order: each of `asked` is (client, name, length), all of them
    asked for while both threads are held."""
    async with fake_server() as server:
        compiler = server.service.model_format._compiler
        held = [
            compiler.grammar(one_choice(f"held {i}"), "x", "holder").matcher() for i in range(2)
        ]
        for one in held:
            one.start(lambda: None)
        await until(lambda: len(gate.begun) == 2)
        ended: list[str] = []
        for client, name, length in asked:
            text = name.ljust(length, ".")
            made = compiler.grammar(one_choice(text), "x", client).matcher()
            made.start(partial(ended.append, name))
        gate.open()
        await until(lambda: len(ended) == len(asked))
        texts = [json.dumps(source) for source in gate.begun[2:]]
        names = {name for _, name, _ in asked}
        return [next(name for name in names if f"{name}." in text) for text in texts]


async def test_nobody_s_thousand_schemas_stand_before_another_s_one(gate):
    count = tries(1000)
    asked = [("a", f"a{i}", 50) for i in range(count)]
    order = await compiled_in_order(gate, [*asked, ("b", "b0", 5000)])
    assert order.index("b0") <= 2
    assert len(order) == count + 1


async def test_of_one_client_s_the_shortest_goes_first(gate):
    order = await compiled_in_order(
        gate, [("a", "long", 9000), ("a", "middle", 900), ("a", "short", 90)]
    )
    assert order == ["short", "middle", "long"]


async def test_what_one_client_may_have_waiting_has_a_bound(gate):
    async def ask(server, i):
        return await post(server, {"guided_choice": [f"{i:03}" + "x" * 149_000]})

    async with fake_server() as server:
        tasks = [asyncio.create_task(ask(server, i)) for i in range(60)]
        done, waiting = await asyncio.wait(tasks, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        (status, body) = next(iter(done)).result()
        assert (status, body["error"]["type"]) == (503, "overloaded_error")
        assert "wait to be compiled" in body["error"]["message"]
        assert (await post(server, {}))[0] == 200  # who asks for no grammar is served
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        gate.open()
        await server.wait_idle()
