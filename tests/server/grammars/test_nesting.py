"""Nesting that the library would follow until its stack overflows is measured and refused."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from server.grammars.grammar_text import context_free, regex
from server.grammars.json_schema import json_schema
from server.grammars.nesting import lark_nesting, longest_way, regex_nesting, schema_nesting
from tests.server.grammars.library import compiled, takes


def chained_rules(count, body='"a"', name="r"):
    rules = [f"{name}{i}: {body} {name}{i + 1}" for i in range(count)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{count}: "b"'])


def chained_schema(count):
    defs = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {"type": "integer"}}}


def in_arrays(count):
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(count):
        schema = {"type": "array", "items": schema}
    return schema


# Each ended the process, or was answered with kilobytes of brackets.
@pytest.mark.parametrize(
    ("make", "given"),
    [
        pytest.param(context_free, chained_rules(5000), id="rules"),
        pytest.param(context_free, chained_rules(5000, name="T"), id="terminals"),
        pytest.param(
            context_free, chained_rules(50, "(" * 90 + '"a"' + ")" * 90), id="rules-in-brackets"
        ),
        pytest.param(context_free, chained_rules(3000) + '\n| "c" r0', id="circle"),
        pytest.param(
            context_free,
            "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(5000)),
            id="gbnf",
        ),
        pytest.param(context_free, "root ::= " + "(" * 20_000, id="gbnf-brackets"),
        pytest.param(context_free, 'root ::= "' + '\\"' * 20_000, id="gbnf-quotes"),
        pytest.param(context_free, 'a ::= "b"\n' * 6000, id="gbnf-lines"),
        pytest.param(context_free, "root ::= " + "a" * 50_000, id="gbnf-name"),
        pytest.param(context_free, "start: " + "(" * 100_000, id="brackets"),
        pytest.param(
            context_free, 'start: %json {"const": -9223372036854775808}', id="schema-in-lark"
        ),
        pytest.param(
            context_free,
            "start: %json " + json.dumps(chained_schema(3000)),
            id="long-schema-in-lark",
        ),
        pytest.param(context_free, "start: %json {", id="broken-schema-in-lark"),
        pytest.param(regex, "(" * 4000 + "a" + ")" * 4000, id="groups"),
        pytest.param(
            json_schema, {"type": "string", "pattern": "(" * 4000 + ")" * 4000}, id="pattern"
        ),
        pytest.param(
            json_schema, {"patternProperties": {"(" * 4000 + ")" * 4000: {}}}, id="pattern-of-keys"
        ),
        pytest.param(json_schema, chained_schema(3000), id="references"),
        pytest.param(json_schema, in_arrays(100), id="arrays"),
        pytest.param(json_schema, {"const": json.loads("[" * 500 + "]" * 500)}, id="constant"),
        pytest.param(json_schema, {"enum": [json.loads("[" * 500 + "]" * 500)]}, id="enum"),
        pytest.param(json_schema, {"default": json.loads("[" * 500 + "]" * 500)}, id="annotation"),
        pytest.param(json_schema, "[" * 100_000, id="text"),
    ],
)
@pytest.mark.sampled(8)
def test_what_is_nested_too_deeply_is_refused_in_a_sentence(make, given):
    with pytest.raises(InvalidRequest) as caught:
        make(given, "here")
    assert str(caught.value).startswith("here")
    assert len(str(caught.value)) < 250
    assert caught.value.param == "here"


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        pytest.param(context_free, chained_rules(300), "a" * 300 + "b", id="rules"),
        pytest.param(context_free, chained_rules(300, name="T"), "a" * 300 + "b", id="terminals"),
        pytest.param(context_free, 'start: "(" start ")" | "a"', "(((a)))", id="recursive"),
        pytest.param(
            context_free,
            'root ::= "a" b' + "\n" * 20_000 + 'b ::= "c"',
            "ac",
            id="gbnf-blank-lines",
        ),
        pytest.param(regex, "(" * 90 + "a" + ")" * 90, "a", id="groups"),
        pytest.param(json_schema, chained_schema(150), "5", id="references"),
        pytest.param(json_schema, in_arrays(50), "[" * 50 + "1" + "]" * 50, id="arrays"),
        pytest.param(
            context_free,
            'start: "x" %json {"type": "string", "format": "path"}',
            'x"a"',
            id="schema-in-lark",
        ),
    ],
)
def test_what_grammars_need_is_served(make, given, text):
    assert takes(compiled(make(given, "x")), text)


def test_brackets_in_texts_and_expressions_are_none():
    assert regex_nesting(r"(a(b)\(\((c))[((]") == 2
    assert lark_nesting('start: "((((" /\\((a|b)/ (x | "b")  // ((((\nx: "a" # ((\n') == 3
    assert lark_nesting("0") == lark_nesting("") == 0, "no rule at all"


def test_schema_levels():
    assert schema_nesting({"a": [{"b": 1}]}) == (4, 4)
    assert schema_nesting(chained_schema(10))[1] > schema_nesting(chained_schema(5))[1] > 15


def test_longest_way_is_the_heaviest_of_all_ways():
    """Compared with every way through small random graphs without circles."""
    rng = random.Random(0)
    for _ in range(200):
        names = [str(i) for i in range(6)]
        weights = {name: rng.randrange(5) for name in names}
        edges = {name: [o for o in names if o > name and rng.random() < 0.4] for name in names}
        ways = [
            way
            for size in range(1, 7)
            for way in itertools.combinations(names, size)
            if all(b in edges[a] for a, b in itertools.pairwise(way))
        ]
        assert longest_way(weights, edges) == max(sum(weights[n] for n in way) for way in ways)


def test_a_circle_counts_with_all_its_members():
    weights = dict.fromkeys("abcd", 1)
    assert longest_way(weights, {"a": "b", "b": "c", "c": "ad", "d": ""}) == 4
    assert longest_way(weights, {"a": "a", "b": "", "c": "b", "d": "x"}) == 2
