"""What the served model brings as defaults applies on every generating route, unless asked otherwise."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from server.generation.params import SamplingDefaults
from tests.fakes import fake_server, make_fake_service

DEFAULTS = SamplingDefaults(
    temperature=0.25, top_p=0.75, top_k=7, min_p=0.125, repetition_penalty=1.5, max_new_tokens=5
)
USER = [{"role": "user", "content": "x"}]
# Each route with its smallest body, and the name of its bound on new tokens.
ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": USER}, "max_tokens"),
    "/v1/completions": ({"prompt": "x"}, "max_tokens"),
    "/v1/responses": ({"input": "x"}, "max_output_tokens"),
    "/v1/messages": ({"messages": USER, "max_tokens": 5}, "max_tokens"),
    "/generate": ({"text": "x"}, "max_new_tokens"),
}


def served(**options):
    """A service whose model brings defaults."""
    service = make_fake_service(**options)
    service.limits = service.generator.limits = dataclasses.replace(
        service.limits, defaults=DEFAULTS
    )
    return fake_server(service)


async def sampled(server, path, body):
    """The sampling parameters and the bound on new tokens that a request gets."""
    seen = []
    submit = server.service.engine.submit

    def watch(specs, *more):
        seen.extend(specs)
        return submit(specs, *more)

    server.service.engine.submit = watch
    status, answer = await server.post(path, body)
    server.service.engine.submit = submit
    assert status == 200, answer
    return seen[0].sampling


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_that_says_nothing_gets_the_model_s(path):
    async with served() as server:
        found = await sampled(server, path, ROUTES[path][0])
        assert (found.temperature, found.top_p, found.top_k) == (0.25, 0.75, 7)
        assert (found.min_p, found.repetition_penalty) == (0.125, 1.5)
        assert found.max_new_tokens == 5


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_that_says_otherwise_is_obeyed(path):
    body, most = ROUTES[path]
    asked = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, most: 3}
    inside = {"sampling_params": asked} if path == "/generate" else asked
    async with served() as server:
        found = await sampled(server, path, {**body, **inside})
        assert (found.temperature, found.top_p, found.top_k) == (0, 1, 0)
        assert (found.min_p, found.repetition_penalty) == (0, 1)
        assert found.max_new_tokens == 3


async def test_a_default_gives_way_to_what_fits_and_a_wish_does_not():
    async with served(context_length=20) as server:
        whole = await server.complete("x" * 18)
        assert whole["usage"]["completion_tokens"] == 2
        status, answer = await server.post("/v1/completions", {"prompt": "x" * 18, "max_tokens": 5})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        status, answer = await server.post("/v1/completions", {"prompt": "x" * 20})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_defaults_are_told():
    async with served() as server:
        _, info = await server.get("/server_info")
        assert info["sampling_defaults"] == dataclasses.asdict(DEFAULTS)
        _, described = await server.get("/openapi.json")
        for body in ("ChatBody", "CompletionBody", "ResponseBody", "MessageBody", "NativeSampling"):
            fields = described["components"]["schemas"][body]["properties"]
            told = {name: fields[name]["default"] for name in ("temperature", "top_p", "top_k")}
            assert told == {"temperature": 0.25, "top_p": 0.75, "top_k": 7}
        _, response = await server.post("/v1/responses", {"input": "x"})
        assert (response["temperature"], response["top_p"]) == (0.25, 0.75)


@pytest.mark.parametrize("path", ROUTES)
async def test_waiting_is_told_on_every_route_where_it_is_asked_for(path):
    async with fake_server() as server:
        body, most = ROUTES[path]
        few = {"sampling_params": {most: 1}} if path == "/generate" else {most: 1}
        for asked in (True, False):
            status, answer = await server.post(path, {**body, **few, "include_wait_times": asked})
            assert status == 200
            told = answer["meta_info"] if path == "/generate" else answer["usage"]
            assert ("wait_seconds" in told) is asked


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_can_be_ended_by_the_name_that_its_body_gave(path):
    async with fake_server() as server:
        for name in ("rid", "request_id"):
            body, most = ROUTES[path]
            many = {"sampling_params": {most: 900}} if path == "/generate" else {most: 900}
            request = {**body, **many, "stream": True, name: "mine"}
            async with server.client.post(server.url + path, json=request) as answer:
                await answer.content.readline()
                _, found = await server.post("/abort_request", {"rid": "mine"})
                assert found == {"aborted": 1}
                await answer.read()
        await server.wait_idle()
