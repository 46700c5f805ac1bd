"""The first byte of a stream comes at once, and something comes all the time until its end."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from runtime.simulation.sim_runner import SimRunner
from server.api import chat_plan
from server.http import heartbeat
from tests.fakes import BODIES, IM_END, fake_runner, fake_server
from tests.server.server_kit import CHATML_TOOLS, say, sim_server

PROGRESS = {"stream": True, "stream_options": {"include_progress": True}}


class HeldRunner(SimRunner):
    """Gives no step's output before it is let go, but of the first `free` steps."""

    def __init__(self, free: int = 0) -> None:
        self.go = threading.Event()
        self.free = free
        super().__init__(lambda _, index: 65 if index < 3 else IM_END, vocab_size=258,
                         step_seconds=lambda batch: 0.0)  # fmt: skip

    def run(self, batch, masks):
        self.free -= 1
        assert self.free >= 0 or self.go.wait(30)
        return super().run(batch, masks)


@pytest.fixture
def held():
    runner = HeldRunner()
    yield runner
    runner.go.set()


def ask(server, path, **more):
    return server.client.post(server.url + path, json={**BODIES[path], "stream": True, **more})


def data_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", BODIES)
async def test_the_headers_come_while_the_prompt_is_computed(path, held):
    async with asyncio.timeout(20), fake_server(runner=held) as server:
        async with ask(server, path) as answer:
            assert answer.status == 200
            assert not held.go.is_set(), "no step has given anything"
            held.go.set()
            assert (await answer.text()).count("A") >= 3
        await server.wait_idle()


async def test_the_headers_come_while_long_prompts_are_computed(held):
    async with asyncio.timeout(20), fake_server(runner=held) as server:
        long = [
            await server.client.post(
                server.url + "/v1/completions", json={"prompt": letter * 1500, "stream": True}
            )
            for letter in "abcd"
        ]
        async with ask(server, "/v1/chat/completions") as answer:
            assert not held.go.is_set()
            held.go.set()
            await answer.read()
        for one in long:
            await one.read()
        await server.wait_idle()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_the_headers_do_not_wait_long_for_the_tokenizer(path, monkeypatch):
    """What is then found to be wrong is an event, with the body that a whole answer would have."""
    go = asyncio.Event()
    plan_chat = chat_plan.plan_chat

    async def slow_plan(*given):
        await go.wait()
        return await plan_chat(*given)

    monkeypatch.setattr(chat_plan, "plan_chat", slow_plan)
    async with asyncio.timeout(20), fake_server() as server:
        long = "x" * 9000
        wrong: dict[str, Any] = {"messages": [{"role": "user", "content": long}]}
        if path == "/v1/responses":
            wrong = {"input": long}
        async with ask(server, path, **wrong) as answer:
            assert answer.status == 200
            assert not go.is_set()
            go.set()
            (told,) = data_of(await answer.text())
        status, whole = await server.post(path, {**BODIES[path], **wrong})
        assert status == 400
        assert told["error"] == whole["error"]
        await server.wait_idle()


async def test_what_is_wrong_on_its_face_is_a_status():
    async with fake_server() as server:
        for path in ("/v1/chat/completions", "/v1/messages"):
            async with ask(server, path, temperature=-1) as answer:
                assert answer.status == 400
                assert "temperature" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_silent_stream_says_that_it_is_still_there(path, held):
    async with asyncio.timeout(20), fake_server(runner=held, sse_keepalive=0.01) as server:
        async with ask(server, path) as answer:
            silence = b""
            while silence.count(b"\n\n") < 3:
                silence += await answer.content.readany()
            held.go.set()
            rest = await answer.read()
        beat = b'event: ping\ndata: {"type":"ping"}\n\n' if path == "/v1/messages" else b": keep-alive\n\n"  # fmt: skip
        assert silence.replace(beat, b"") == b""
        assert b"A" in rest
        await server.wait_idle()


async def test_a_client_of_the_old_protocol_is_kept_alive_without_chunks(held):
    async with asyncio.timeout(20), fake_server(runner=held, sse_keepalive=0.01) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps({**BODIES["/v1/completions"], "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(data))
        writer.write(data)
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(28) == b": keep-alive\n\n" * 2
        held.go.set()
        assert b"[DONE]" in await reader.read()
        writer.close()
        await server.wait_idle()


@pytest.mark.parametrize("path", BODIES)
async def test_without_keep_alives_the_headers_wait_for_the_first_token(path, held, monkeypatch):
    """What a router has had no byte of, it asks elsewhere when this server dies."""
    monkeypatch.setattr(heartbeat, "OPEN_AFTER_S", 0.0)
    async with asyncio.timeout(20), fake_server(runner=held, sse_keepalive=0) as server:
        address = urlsplit(server.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        data = json.dumps({**BODIES[path], "stream": True}).encode()
        writer.write(f"POST {path} HTTP/1.0\r\nContent-Length: {len(data)}\r\n\r\n".encode())
        writer.write(data)
        while not server.service.generator.live:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)  # whoever would send something has had its turns
        nothing_yet = asyncio.ensure_future(reader.read(1))
        assert not (await asyncio.wait([nothing_yet], timeout=0))[0]
        held.go.set()
        whole = await nothing_yet + await reader.read()
        writer.close()
        assert whole.startswith(b"HTTP/1.0 200")
        assert b"\n:" not in whole
        assert b"ping" not in whole
        await server.wait_idle()


async def test_without_keep_alives_what_is_refused_late_has_its_status(monkeypatch):
    plan_chat = chat_plan.plan_chat

    async def slow_plan(*given):
        for _ in range(50):
            await asyncio.sleep(0)
        return await plan_chat(*given)

    monkeypatch.setattr(heartbeat, "OPEN_AFTER_S", 0.0)
    monkeypatch.setattr(chat_plan, "plan_chat", slow_plan)
    long = {"messages": [{"role": "user", "content": "x" * 9000}]}
    async with asyncio.timeout(20), fake_server(sse_keepalive=0) as server:
        async with ask(server, "/v1/chat/completions", **long) as answer:
            assert answer.status == 400
        await server.wait_idle()


async def test_whole_answers_send_nothing_early(held):
    async with asyncio.timeout(20), fake_server(runner=held, sse_keepalive=0.01) as server:
        body = {**BODIES["/v1/chat/completions"], "stream_options": {"include_progress": True}}
        task = asyncio.create_task(server.post("/v1/chat/completions", body))
        # A stream that came later has had its keep-alives meanwhile.
        async with ask(server, "/v1/completions") as other:
            assert await other.content.readany()
            assert not task.done()
            held.go.set()
            await other.read()
        status, whole = await task
        assert (status, whole["choices"][0]["message"]["content"]) == (200, "AAA")
        await server.wait_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_progress_tells_the_place_and_the_tokens(path, held):
    """One row: the second one waits for the first, whose prompt is being computed."""
    options: dict[str, Any] = {
        "runner": held, "sse_keepalive": 0.01, "scheduler": {"max_running_requests": 1},
    }  # fmt: skip
    async with asyncio.timeout(20), fake_server(**options) as server:
        async with ask(server, path, **PROGRESS) as first:
            told: dict[str, Any] = {}
            while not told.get("prefilled_tokens"):
                told = data_of((await first.content.readuntil(b"\n\n")).decode())[-1].get(
                    "progress", {}
                )
            assert told["queue_position"] == 0
            assert told["prefilled_tokens"] == told["prompt_tokens"] > 0
            async with ask(server, path, **PROGRESS) as second:
                told = {}
                while not told:
                    told = data_of((await second.content.readuntil(b"\n\n")).decode())[-1].get(
                        "progress", {}
                    )
                assert (told["queue_position"], told["prefilled_tokens"]) == (1, 0)
                held.go.set()
                await second.read()
            await first.read()
        await server.wait_idle()


async def test_the_first_token_is_expected_where_the_pace_is_known():
    runner = fake_runner(step_seconds=lambda batch: 0.002)
    async with asyncio.timeout(20), fake_server(runner=runner) as server:
        await server.complete("warm", max_tokens=20)
        (first, *_) = await server.events("/v1/completions", {**BODIES["/v1/completions"], **PROGRESS})  # fmt: skip
        progress = json.loads(first)["progress"]
        assert progress["prompt_tokens"] == len("hello")
        assert progress["expected_first_token_s"] > 0
        await server.wait_idle()


async def test_the_first_token_is_expected_while_nobody_decodes():
    """Five chunks of 64 tokens are done, and the sixth takes its time."""
    runner = HeldRunner(free=5)
    async with asyncio.timeout(20), fake_server(runner=runner, sse_keepalive=0.01) as server:
        body = {**BODIES["/v1/completions"], **PROGRESS, "prompt": "x" * 1000}
        async with server.client.post(server.url + "/v1/completions", json=body) as answer:
            expected = None
            while expected is None:
                (told,) = data_of((await answer.content.readuntil(b"\n\n")).decode())
                expected = told["progress"]["expected_first_token_s"]
            assert 0 < told["progress"]["prefilled_tokens"] < 1000
            assert expected >= 0
            runner.go.set()
            await answer.read()
        await server.wait_idle()


class SlowRunner(SimRunner):
    """Steps that last, so that clients see keep-alives between any two events."""

    def __init__(self, *given, **options) -> None:
        super().__init__(*given, step_seconds=lambda batch: 0.02, **options)


@pytest.fixture(scope="module")
def kept_alive():
    with sim_server(CHATML_TOOLS, runner_class=SlowRunner, sse_keepalive=0.002) as served:
        yield served


STRICT: dict[str, Any] = {
    "api_key": "none", "max_retries": 0, "_strict_response_validation": True,
}  # fmt: skip
ASKED: Any = [{"role": "user", "content": say("Hello")}]


@pytest.mark.parametrize("options", [{}, {"include_progress": True}], ids=["plain", "progress"])
def test_openai_s_client_reads_over_it(kept_alive, options):
    more: Any = {"stream": True, "stream_options": options}
    with openai.OpenAI(base_url=kept_alive.url + "/v1", **STRICT) as client:
        chunks = list(
            client.chat.completions.create(model=kept_alive.model, messages=ASKED, **more)
        )
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert text == "Hello"
        events = list(client.responses.create(model=kept_alive.model, input=say("Hello"), **more))
        assert events[-1].response.output_text == "Hello"
        shown = [one for one in [*chunks, *events] if (one.model_extra or {}).get("progress")]
        assert bool(shown) == bool(options)
        assert [one.sequence_number for one in events] == list(range(len(events)))


def test_anthropic_s_client_reads_over_it(kept_alive):
    with (
        anthropic.Anthropic(base_url=kept_alive.url, **STRICT) as client,
        client.messages.stream(model=kept_alive.model, max_tokens=20, messages=ASKED) as stream,
    ):
        assert "".join(stream.text_stream) == "Hello"


def test_clients_raise_what_comes_late(kept_alive, monkeypatch):
    """The prompt is found to be too long after the headers."""
    monkeypatch.setattr(heartbeat, "OPEN_AFTER_S", 0.0)
    plan_chat = chat_plan.plan_chat

    async def later(*given):
        for _ in range(50):
            await asyncio.sleep(0)  # the headers go out
        return await plan_chat(*given)

    monkeypatch.setattr(chat_plan, "plan_chat", later)
    long = "x" * 9000
    asked: Any = [{"role": "user", "content": long}]
    with pytest.raises(openai.APIError) as caught:
        list(kept_alive.chat(long, stream=True))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIError) as caught:
        list(kept_alive.openai.responses.create(model="fake", input=long, stream=True))
    assert caught.value.code == "context_length_exceeded"
    with (
        pytest.raises(anthropic.APIStatusError, match="invalid_request_error"),
        kept_alive.anthropic.messages.stream(model="fake", max_tokens=9, messages=asked) as stream,
    ):
        list(stream)
