"""Branches of oneOf: those that exclude each other are served, also behind references."""

from __future__ import annotations

import random

import jsonschema
import pytest

from server.grammars.json_schema import json_schema
from server.grammars.library_errors import in_words
from server.grammars.one_of import Definitions
from tests.effort import tries
from tests.server.grammars.library import compiled, takes

PLACE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
DEFS = {
    "Place": PLACE,
    "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
    "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
    "Pet": {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]},
    "Link": {"$ref": "#/$defs/Place", "description": "a place"},
    "Tree": {
        "type": "object",
        "properties": {"next": {"oneOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    },
    "Loop": {"$ref": "#/$defs/Loop"},
}


def ref(name):
    return {"$ref": f"#/$defs/{name}"}


def served(branches):
    return compiled(json_schema({"$defs": DEFS, "oneOf": branches}, "x"))


@pytest.mark.parametrize(
    ("branches", "yes", "no"),
    [
        ([{"type": "integer"}, ref("Place")], ["5", "[1, 2]"], ["[1]", "null"]),
        ([ref("Place"), {"type": "null"}], ["[1, 2]", "null"], ["5"]),
        ([ref("Link"), {"type": "null"}], ["[1, 2]", "null"], ["5"]),
        ([ref("Cat"), ref("Dog")], ['{"kind": "cat"}', '{"kind": "dog"}'], ['{"kind": "cow"}']),
        ([ref("Pet"), {"type": "string"}], ['{"kind": "cat"}', '"a"'], ['{"kind": "cow"}']),
        ([ref("Tree"), {"type": "null"}], ['{"next": {"next": null}}', "null"], ["{}"]),
        ([{"const": 1}, {"enum": [2, 3]}, {"type": "string"}], ["1", "2", '"a"'], ["4"]),
        ([{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}], ["3", "5"], ["4"]),
        (
            [{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 3}],
            ['"a"'],
            ['"ab"'],
        ),
        ([ref("Place"), {"type": "array", "minItems": 3}], ["[1, 2]", "[1, 2, 3]"], ["[1]"]),
        ([{"type": "string"}], ['"a"'], ["5"]),
    ],
)
def test_branches_that_exclude_each_other_are_served(branches, yes, no):
    matcher = served(branches)
    assert all(takes(matcher, text) for text in yes)
    assert not any(takes(matcher, text) for text in no)


def test_constants_of_any_size_are_told_apart():
    branches = [{"const": 10**400}, {"const": float("inf")}, {"const": 1}, {"const": 1.5}]
    assert Definitions({}).disjoint(branches)
    assert not Definitions({}).disjoint([{"const": 1}, {"const": 1.0}])
    assert Definitions({}).disjoint(
        [{"const": 1}, {"const": True}, {"const": "1"}, {"const": None}]
    )


def test_one_of_beside_any_of_holds_both():
    schema = {
        "oneOf": [{"type": "integer"}, ref("Place")],
        "anyOf": [{"type": "integer", "minimum": 5}, {"type": "array"}],
        "$defs": DEFS,
    }
    matcher = compiled(json_schema(schema, "x"))
    assert [takes(matcher, text) for text in ("5", "4", "[1, 2]", "[1]")] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{}, {"type": "null"}],
        [ref("Cat"), {"type": "object"}],
        [ref("Place"), ref("Link")],
        [ref("Loop"), {"type": "null"}],
        [ref("Nowhere"), {"type": "null"}],
    ],
    ids=["integers-are-numbers", "anything", "object", "same", "loop", "nowhere"],
)
def test_branches_that_may_both_hold_are_refused_in_plain_words(branches):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its words are looked at)
        served(branches)
    message = in_words(str(caught.value))
    assert "coerce_one_of" not in message
    assert "anyOf" in message or "Nowhere" in message


def test_what_is_proven_disjoint_shares_no_value():
    """Random schemas and values: no value follows two branches that are said to be apart."""
    rng = random.Random(0)
    values = [
        None,
        True,
        0,
        1,
        1.0,
        2.5,
        "",
        "a",
        "bcd",
        [],
        [1],
        [1, "a"],
        {},
        {"a": 1},
        {"b": "a"},
        {"a": 1, "b": 2},
    ]
    proven = 0
    for _ in range(tries(1500)):
        branches = [_some_schema(rng, 0) for _ in range(2)]
        whole = {"$defs": {"A": _some_schema(rng, 1), "B": _some_schema(rng, 1)}, "oneOf": branches}
        if not Definitions(whole).disjoint(branches):
            continue
        proven += 1
        both = [{**whole, "oneOf": [branch]} for branch in branches]
        for value in values:
            valid = [_valid(schema, value) for schema in both]
            assert not all(valid), (branches, value)
    assert proven > tries(300)


def _valid(schema, value):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def _some_schema(rng, depth):
    kind = rng.randrange(11 if depth < 2 else 7)
    types = ("null", "boolean", "integer", "number", "string", "array", "object")
    if kind < 2:
        return {"type": rng.choice(types)}
    if kind == 2:
        return {"type": rng.sample(types, 2)}
    if kind == 3:
        return {"enum": rng.sample([None, True, 1, 1.0, "a", "bcd", [1], {"a": 1}], 2)}
    if kind == 4:
        low, high = sorted(rng.sample(range(4), 2))
        of, names = rng.choice(
            [
                ("integer", ("minimum", "maximum")),
                ("string", ("minLength", "maxLength")),
                ("array", ("minItems", "maxItems")),
            ]
        )
        return {"type": of} | dict(zip(names, (low, high), strict=True))
    if kind < 7:
        name = rng.choice("ab")
        closed = {"additionalProperties": False} if rng.random() < 0.5 else {}
        inner = _some_schema(rng, depth + 1) if depth < 2 else {"type": "integer"}
        return {"type": "object", "properties": {name: inner}, "required": [name], **closed}
    if kind == 7:
        return {"$ref": f"#/$defs/{rng.choice('AB')}"} if depth == 0 else {"const": 1}
    key = ("anyOf", "oneOf", "allOf")[kind - 8]
    return {key: [_some_schema(rng, depth + 1) for _ in range(2)]}
