"""What /openapi.json publishes and what is accepted are the same, for every route.

Everything here is made from the served description alone: each field is sent with values just
inside and just outside of what it may be.
"""

from __future__ import annotations

import json
from itertools import zip_longest
from typing import Any

import pytest

from server.api.docs.openapi import ROUTES
from tests.fakes import byte_tokenizer, fake_runner, fake_server, make_fake_service

# Of routes that take the same body, the first.
POSTS = list({route.request: route for route in reversed(ROUTES) if route.request}.values())[::-1]
SMALL = {"max_tokens": 1}
USER = [{"role": "user", "content": "x"}]
# A body that is served, for each route.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, **SMALL},
    "/v1/completions": {"prompt": "x", **SMALL},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": USER, **SMALL},
    "/v1/messages/count_tokens": {"messages": USER},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 1}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/abort_request": {"rid": "x"},
}
TOOL = {
    "type": "function",
    "function": {"name": "f"},
    "name": "f",
    "input_schema": {},
}
GRAMMAR = 'start: "a"'
# What some fields need beside them; None takes a field out.
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "continue_final_message": {"messages": [*USER, {"role": "assistant", "content": "a"}]},
    "input_ids": {"text": None},
    "abort_all": {"rid": None},
    "request_id": {"rid": None},
    "min_tokens": {"max_tokens": 256, "max_output_tokens": 256},
    "min_new_tokens": {"max_new_tokens": 256},
    "messages": {"prompt": None},
    "max_completion_tokens": {"max_tokens": None},
    "n_predict": {"max_tokens": None},
    "n_cmpl": {"n": None},
    "best_of": {"n": None},
}
# Values that are valid by themselves, where one made from the schema asks for the impossible.
SAMPLES = {
    "model": "fake",
    "ebnf": GRAMMAR,
    "grammar": GRAMMAR,
    "guided_grammar": GRAMMAR,
    "tools": None,  # each protocol has its own form; sent by other tests
    "tool_choice": None,
    "structural_tag": {
        "structures": [{"begin": "a", "schema": {}, "end": "b"}],
        "triggers": ["a"],
    },
    "timeout": 9,
    "stop_regex": "a",
}


@pytest.fixture
async def server():
    async with fake_server(context_length=256, max_n=4) as served:
        yield served


class Published:
    """The description as a client sees it."""

    def __init__(self, document):
        self.schemas = document["components"]["schemas"]
        self.paths = document["paths"]

    def body(self, path):
        content = self.paths[path]["post"]["requestBody"]["content"]
        return self.whole(content["application/json"]["schema"])

    def whole(self, schema):
        """A schema itself, where it is a reference to one."""
        while "$ref" in schema:
            schema = self.schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def arms(self, schema):
        schema = self.whole(schema)
        if "anyOf" in schema:
            return [one for arm in schema["anyOf"] for one in self.arms(arm)]
        return [schema]

    def sample(self, schema):
        """A value that the schema takes."""
        schema = next(arm for arm in self.arms(schema) if arm.get("type") != "null")
        if "enum" in schema:
            return schema["enum"][0]
        kind = schema.get("type")
        if kind == "array":
            return [self.sample(schema["items"])] * max(1, schema["minItems"])
        if kind == "object":
            names = list(schema.get("required", ()))
            if "oneOf" in schema:
                names.append(schema["oneOf"][0]["required"][0])
            return {name: self.sample(schema["properties"][name]) for name in names}
        if kind in ("integer", "number"):
            return max(schema["minimum"], min(1, schema.get("maximum", 1)))
        return {"string": "a", "boolean": True, None: "a"}[kind]

    def limits(self, schema):
        """(value, whether it is taken) at the bounds of each of a schema's arms."""
        for arm in self.arms(schema):
            kind = arm.get("type")
            if kind in ("integer", "number"):
                step = 1 if kind == "integer" else 1e-3
                yield arm["minimum"], True
                yield arm["minimum"] - step, False
                if "maximum" in arm:
                    yield arm["maximum"], True
                    yield arm["maximum"] + step, False
            elif kind == "array":
                items = self.sample(arm["items"])
                if arm["minItems"]:
                    yield [items] * (arm["minItems"] - 1), False
                if "maxItems" in arm:
                    yield [items] * arm["maxItems"], True
                    yield [items] * (arm["maxItems"] + 1), False
            elif "maxLength" in arm:
                yield "a" * arm["maxLength"], True
                yield "a" * (arm["maxLength"] + 1), False

    def wrong_type(self, schema):
        """A value of a type that none of a schema's arms has; None: it takes every type."""
        kinds = {arm.get("type") for arm in self.arms(schema)}
        for kind, value in (("number", 0.5), ("boolean", True), ("object", {"a": 0.5})):
            if kind not in kinds and None not in kinds:
                return value
        return None


def with_field(path, name, value, inside=None):
    """The route's body with a field, at the top or in an object of it."""
    body = json.loads(json.dumps(BODIES[path]))
    holder = body if inside is None else body.setdefault(inside, {})
    for other, beside in BESIDE.get(name, {}).items():
        if beside is None:
            holder.pop(other, None)
        elif other in holder or beside is True:
            holder[other] = beside
    holder[name] = value
    return {key: held for key, held in body.items() if held is not None}


def read_fields(published, path):
    """(object, name, schema) of the fields that are read, at the top and in sampling_params."""
    properties = published.body(path)["properties"]
    found: list[tuple[str | None, str, Any]] = [
        (None, name, schema) for name, schema in properties.items()
    ]
    if path == "/generate":
        inner = published.whole(published.arms(properties["sampling_params"])[0])["properties"]
        found += [("sampling_params", name, schema) for name, schema in inner.items()]
    return [
        (inside, name, schema)
        for inside, name, schema in found
        if not schema["description"].startswith(("not served", "ignored"))
    ]


async def ask(server, path, body):
    """Status, the field that the error names, and the header of unknown fields."""
    async with server.client.post(server.url + path, json=body) as answer:
        text = await answer.text()
        if answer.status == 200:
            return 200, "", answer.headers.get("X-Loomserve-Ignored", "")
        error = json.loads(text)["error"]
        told = error.get("param") or error["message"].partition(":")[0]
        assert answer.status in (400, 404), text
        return answer.status, told, answer.headers.get("X-Loomserve-Ignored", "")


@pytest.mark.parametrize("route", POSTS, ids=lambda route: route.path)
async def test_each_field_is_read_and_its_bounds_are_the_published_ones(server, route):
    published = Published((await server.get("/openapi.json"))[1])
    fields = read_fields(published, route.path)
    assert len(fields) >= 2
    for inside, name, schema in fields:
        where = name if inside is None else f"{inside}.{name}"

        async def taken(value, inside=inside, name=name, where=where):
            body = with_field(route.path, name, value, inside)
            status, told, unknown = await ask(server, route.path, body)
            assert unknown == ""
            return status == 200 or not told.startswith(where)

        value = SAMPLES.get(name, published.sample(schema))
        if value is not None:
            assert await taken(value), (where, value)
        if (wrong := published.wrong_type(schema)) is not None:
            assert not await taken(wrong), (where, wrong)
        if name in ("prompt", "text", "messages", "tokens", "input"):
            continue
        for value, good in published.limits(schema):
            if name in ("max_tokens", "n_predict") and value == 0:
                continue  # goes with echo
            assert await taken(value) is good, (where, value, good)


@pytest.mark.parametrize("route", POSTS, ids=lambda route: route.path)
async def test_what_is_not_published_is_not_read(server, route):
    published = Published((await server.get("/openapi.json"))[1])
    known = set(published.body(route.path)["properties"])
    others = {name for one in POSTS for name in published.body(one.path)["properties"]}
    strangers = sorted((others | {"max_tokns", "nonsense"}) - known)
    assert len(strangers) > 20
    for start in range(0, len(strangers), 20):
        names = strangers[start : start + 20]
        body = {**BODIES[route.path], **dict.fromkeys(names, 1)}
        status, told, unknown = await ask(server, route.path, body)
        assert (status, told) == (200, "")
        assert unknown.split(", ") == names


@pytest.mark.parametrize("route", POSTS, ids=lambda route: route.path)
async def test_what_is_not_served_is_refused_or_ignored_as_it_is_published(server, route):
    published = Published((await server.get("/openapi.json"))[1])
    properties = published.body(route.path)["properties"].items()
    told = {name: schema["description"] for name, schema in properties}
    anything = [{"a": 0.5}]
    ignored = {name: anything for name in told if told[name].startswith("ignored: ")}
    assert await ask(server, route.path, {**BODIES[route.path], **ignored}) == (200, "", "")
    refused = {name: s["enum"] for name, s in properties if told[name].startswith("not served: ")}
    for values in zip_longest(*refused.values()):
        body = {**BODIES[route.path], **dict(zip(refused, values, strict=True))}
        assert await ask(server, route.path, body) == (200, "", ""), values
    for name in refused:
        body = {**BODIES[route.path], name: anything}
        async with server.client.post(server.url + route.path, json=body) as answer:
            assert answer.status == 400
            message = (await answer.json())["error"]["message"]
        assert message.startswith(f"{name}: got [{{'a': 0.5}}]")
        assert told[name].removeprefix("not served: ") in message


async def test_options_set_what_is_published(server):
    schemas = (await server.get("/openapi.json"))[1]["components"]["schemas"]
    chat = schemas["ChatBody"]["properties"]

    def bound(name):
        return next(arm["maximum"] for arm in chat[name]["anyOf"] if "maximum" in arm)

    assert (bound("n"), bound("top_logprobs"), bound("min_tokens")) == (4, 20, 256)
    ids = chat["stop_token_ids"]["anyOf"][0]["items"]
    assert ids["maximum"] == server.service.limits.vocab_size - 1
    assert chat["temperature"]["default"] == 1.0


async def test_strict_fields_refuses_unknown_names_and_says_what_was_meant():
    async with fake_server(strict_fields=True) as server:
        for path, body in BODIES.items():
            assert (await server.post(path, body))[0] == 200
            status, answer = await server.post(path, {**body, "max_tokns": 5})
            assert status == 400
            assert answer["error"]["message"].startswith("'max_tokns' is not a known field")
        _, answer = await server.post("/v1/completions", {"prompt": "x", "max_tokns": 5})
        assert answer["error"]["message"].endswith("did you mean max_tokens?")
        nested = {"prompt": "x", "stream_options": {"include_usge": True}}
        assert (await server.post("/v1/completions", nested))[0] == 400


async def test_names_of_unknown_fields_cannot_break_the_header():
    async with fake_server() as server:
        names = ["a\r\nX-Evil: 1", "ü", "x" * 500, *(f"n{i}" for i in range(100))]
        body = {"prompt": "x", **dict.fromkeys(names, 1), "stream": True}
        async with server.client.post(server.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200
            assert "X-Evil" not in answer.headers
            told = answer.headers["X-Loomserve-Ignored"].split(", ")
        assert told[:3] == ["a%0D%0AX-Evil%3A%201", "%C3%BC", "x" * 64]
        assert len(told) == 33
        assert told[-1] == "and 71 more"


async def test_a_name_in_every_message_is_told_once():
    async with fake_server() as server:
        messages = [{"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}]}] * 50
        body = {"messages": messages, "max_tokens": 1}
        async with server.client.post(server.url + "/v1/chat/completions", json=body) as answer:
            assert answer.headers["X-Loomserve-Ignored"] == "messages[].content[].odd"


async def test_a_name_that_the_template_never_mentions_is_told_and_one_that_it_does_is_not():
    template = "{% for m in messages %}{{ m.mood }}{{ m.content }}{% endfor %}{{ tone }}"
    service = make_fake_service(fake_runner(), byte_tokenizer(template))
    async with fake_server(service) as server:
        body = {
            "messages": [{"role": "user", "content": "x", "mood": "good", "odd": 1, "name": "I"}],
            "chat_template_kwargs": {"tone": "kind", "enable_thinking": False},
            "max_tokens": 1,
        }
        url = server.url + "/v1/chat/completions"
        async with server.client.post(url, json=body) as answer:
            assert answer.status == 200
            told = answer.headers["X-Loomserve-Ignored"]
        assert told == "messages[].odd, chat_template_kwargs.enable_thinking"


async def test_what_is_missing_is_called_missing():
    user = {"role": "user", "content": "x"}
    function = {"type": "function"}
    async with fake_server() as server:
        for body, name in (
            ({}, "messages"),
            ({"messages": None}, "messages"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
            ({"messages": [user], "tools": [function]}, "tools[0].function"),
            ({"messages": [user], "response_format": {}}, "response_format.type"),
        ):
            status, answer = await server.post("/v1/chat/completions", body)
            assert status == 400
            assert answer["error"]["param"] == name
            assert answer["error"]["message"].startswith(f"{name}: is missing; must be ")


async def test_values_are_named_as_json_has_them():
    async with fake_server() as server:
        for value, told in ((True, "true"), ([False, None], "[false, null]")):
            _, answer = await server.post("/v1/completions", {"prompt": "x", "n": value})
            assert answer["error"]["message"].startswith(f"n: got {told}, must be")
