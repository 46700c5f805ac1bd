"""/openapi.json agrees with the routes, and answers agree with it whatever is sent."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from urllib.request import urlopen

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from server.api.chat import ChatBody
from server.api.completions import CompletionBody
from server.api.docs.field_table import markdown
from server.api.docs.openapi import ROUTES, document
from server.api.docs.pages import docs_page
from server.api.fields.grammar import GrammarFields
from server.api.messages import MessageBody
from server.api.responses import ResponseBody
from server.app import make_app
from server.generation.params import ApiLimits
from tests.server.server_kit import sim_server
from tests.values import present

LIMITS = ApiLimits(model="m", vocab_size=100, context_length=1000)


def test_the_table_holds_exactly_the_application_s_routes(sim):
    routes = {
        (route.method, re.sub(r"\{(\w+):[^}]*\}", r"{\1}", present(route.resource).canonical))
        for route in make_app(sim.service).router.routes()
        if route.method != "HEAD"
    }
    assert routes == {(route.method, route.path) for route in ROUTES}


def test_the_description_refers_to_nothing_that_is_not_there():
    described = document("1", LIMITS)
    names = set(re.findall(r"#/components/schemas/(\w+)", str(described)))
    schemas = described["components"]["schemas"]
    assert names == set(schemas), "each schema is used, and each use has a schema"
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_docs_page_names_every_route_and_loads_nothing(sim):
    with urlopen(sim.url + "/docs") as answer:
        assert answer.headers["Content-Type"].startswith("text/html")
        page = answer.read().decode()
    assert all(route.path in page for route in ROUTES)
    assert not re.search("https?://|<script|<img", page)
    with urlopen(sim.url + "/openapi.json") as answer:
        described = json.load(answer)
    limits = sim.service.limits
    assert described == document(described["info"]["version"], limits)
    assert page == docs_page(described["info"]["version"], limits)


def test_the_table_of_docs_is_the_declarations_own():
    written = Path(__file__).parents[4] / "docs" / "request-fields.md"
    assert written.read_text(encoding="utf-8") == markdown(), (
        "run: python -m server.api.docs.field_table > docs/request-fields.md"
    )


@pytest.fixture(scope="module")
def small():
    """A server on which no request can run for long, whatever it asks for."""
    with sim_server(context_length=1024, max_n=4) as served:
        yield served


def whole(value):
    """2.0 is an integer to JSON Schema, and refused here."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value


def make_sensible(body):
    """Takes out what is valid by itself but makes nearly every request a refused one."""
    body.pop("timeout", None)  # one too short to be kept is a 504, rightly
    body.pop("model", None)
    body.pop("stop_token_ids", None)  # of the vocabulary's size, which the schema does not know
    body.pop("logit_bias", None)
    for name in body:
        body[name] = whole(body[name])
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
    for name in ("n", "best_of", *limits):
        if type(body.get(name)) is int and body[name] > 0:
            body[name] = 1 + body[name] % 4
    for name in ("best_of", "n_cmpl"):  # beside n, they nearly always make no sense
        body.pop(name, None)
    grammars = [name for name in body if name in GrammarFields.declared and body[name] is not None]
    for name in grammars[1:]:
        del body[name]
    if not body.get("tools"):
        body.pop("tool_choice", None)
    if body.get("logprobs") is not True:
        body.pop("top_logprobs", None)
    if body.get("continue_final_message") is True:
        body.pop("add_generation_prompt", None)
    if isinstance(body.get("messages"), list):
        body["messages"] = body["messages"][-3:]  # more would not fit
        for message in body["messages"]:
            # What an assistant's message may do without is not in the schema.
            if isinstance(message, dict) and message.get("role") == "assistant":
                message["content"] = message.get("content") or "a"


GENERATING = (ChatBody, CompletionBody, ResponseBody, MessageBody)
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


# They watch until their reader leaves, or for as long as they are told to.
WATCHING = ("/debug/live", "/debug/trace")


@pytest.mark.slow
@pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if route.path not in WATCHING],
    ids=lambda route: f"{route.method} {route.path}",
)
def test_whatever_is_sent_no_5xx_and_no_answer_against_its_schema(small, route):
    schema = schemathesis.openapi.from_dict(document("1", small.service.limits))
    schema.config.update(base_url=small.url)
    operation = schema[route.path][route.method]
    modes = [GenerationMode.POSITIVE]
    if route.request or any(place == "query" for _, place, _ in route.parameters):
        modes.append(GenerationMode.NEGATIVE)
    seen: Counter[int] = Counter()
    for mode in modes:

        @settings(
            max_examples=20 if route.request else 5,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def attempt(case):
            if isinstance(case.body, dict):
                make_sensible(case.body)
            response = case.call_and_validate(checks=CHECKS.get_by_names(CHECKED), timeout=20)
            seen[response.status_code] += 1

        attempt()
    if route.request in GENERATING:
        assert seen[200] >= 10, f"too few were served for the answers to be tested: {seen}"
