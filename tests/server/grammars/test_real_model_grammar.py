"""The embedded model under grammars, at temperature 1: what ends by itself is what was asked for."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
from jsonschema.validators import validator_for

SCHEMAS = json.loads((Path(__file__).parent / "json_schemas.json").read_text(encoding="utf-8"))
AT_ONCE = 24
pytestmark = pytest.mark.slow


def ask(served, name, seed):
    """The answer to one schema's prompt."""
    wish = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[name]}}
    prompt = f"Write an example of {name.replace('-', ' ')} as JSON."
    answer = served.chat(
        prompt, response_format=wish, temperature=1, max_tokens=64, seed=seed, timeout=300
    )
    return answer.choices[0]


def test_every_answer_that_ends_by_itself_validates(real):
    jobs = [(name, seed) for seed in (1, 2) for name in SCHEMAS]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        choices = list(pool.map(lambda job: ask(real, *job), jobs))
    ended = set()
    for (name, _), choice in zip(jobs, choices, strict=True):
        assert choice.finish_reason in ("stop", "length")
        if choice.finish_reason == "stop":
            schema = SCHEMAS[name]
            kind = validator_for(schema, default=jsonschema.Draft202012Validator)
            value = json.loads(choice.message.content)
            kind(schema, format_checker=kind.FORMAT_CHECKER).validate(value)
            ended.add(name)
    # Else the test would prove nothing; what does not end are free texts and numbers.
    assert len(ended) >= 0.8 * len(SCHEMAS), sorted(set(SCHEMAS) - ended)


def test_required_calls_of_the_real_model(real):
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    choice = real.chat("Weather in Paris?", **fields, temperature=1, max_tokens=80).choices[0]
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_choice_regex_and_grammar_with_several_choices(real):
    for fields, allowed in (
        ({"guided_choice": ["red", "green"]}, {"red", "green"}),
        ({"guided_regex": "(yes|no)\\."}, {"yes.", "no."}),
        ({"guided_grammar": 'start: "a" | "b"'}, {"a", "b"}),
    ):
        answer = real.chat("Pick one.", n=4, temperature=1, max_tokens=8, extra_body=fields)
        assert {choice.message.content for choice in answer.choices} <= allowed
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
