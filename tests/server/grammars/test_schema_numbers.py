"""Numbers of schemas: what the grammar takes follows them to the last digit."""

from __future__ import annotations

import random
from decimal import Decimal

import pytest

from runtime.errors import InvalidRequest
from server.grammars.json_schema import json_schema
from tests.effort import tries
from tests.server.grammars.library import compiled, takes

BITS = (31, 53, 54, 60, 62, 63, 64)
INTEGERS = sorted({2**b + d for b in BITS for d in (-1024, -1023, -1, 0, 1, 2)} | {0, 5, 10**18})
FRACTIONS = (0.5, 1e-3, 1e-13, 1e-300, 3.3e18, 1e300, 123456.789)


def follows(schema, text):
    """Whether a number, read exactly, follows the schema."""
    value = Decimal(text)
    bounds = {key: Decimal(repr(bound)) for key, bound in schema.items() if key != "type"}
    return (
        (schema["type"] == "number" or value == value.to_integral_value())
        and value >= bounds.get("minimum", value)
        and value <= bounds.get("maximum", value)
        and ("exclusiveMinimum" not in bounds or value > bounds["exclusiveMinimum"])
        and ("exclusiveMaximum" not in bounds or value < bounds["exclusiveMaximum"])
    )


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_random_bounds_let_nothing_through(kind):
    rng = random.Random(0)
    taken = 0
    for _ in range(tries(120)):
        values = INTEGERS if kind == "integer" or rng.random() < 0.6 else FRACTIONS
        keys = rng.sample(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), 2)
        schema = {"type": kind} | {key: rng.choice(values) * rng.choice((1, -1)) for key in keys}
        try:
            matcher = compiled(json_schema(schema, "x"))
        except InvalidRequest:
            continue
        except ValueError as error:
            if "Unsatisfiable" not in str(error):
                raise
            continue
        near = [int(bound) for key, bound in schema.items() if key != "type" and abs(bound) < 1e20]
        for number in {value + d for value in [*near, 0] for d in (-1500, -1024, -1, 0, 1, 1024)}:
            right = follows(schema, str(number))
            found = takes(matcher, str(number))
            taken += found
            assert right or not found, (schema, number)
            if abs(number) < 2**53 and kind == "integer":
                assert found == right, (schema, number)
    assert taken > tries(120)


@pytest.mark.parametrize(
    ("low", "high"),
    [(-(2**63), 2**63 - 1), (0, 2**63 - 1), (0, 2**64 - 1), (-(2**31), 2**31 - 1)],
    ids=["int64", "positive", "uint64", "int32"],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_machine_types(kind, low, high):
    schema = {"type": kind, "minimum": low, "maximum": high}
    matcher = compiled(json_schema(schema, "x"))
    for number in (0, 1, 2**31 - 1, 2**53 - 1, 10**15):
        assert takes(matcher, str(number)) == (number <= high)
        if number:
            assert takes(matcher, str(-number)) == (-number >= low)
    assert not takes(matcher, str(high + 1))
    assert not takes(matcher, str(low - 1))
    if kind == "integer" and high == 2**63 - 1:
        assert takes(matcher, str(high))


@pytest.mark.parametrize(
    "value", [0, -5, 2**53, 2**62, 2**63 - 1, -(2**62), 1.5, "9223372036854775808"]
)
def test_constants_are_themselves(value):
    for schema in ({"const": value}, {"enum": [value, None]}, {"const": [value]}):
        matcher = compiled(json_schema(schema, "x"))
        text = f'"{value}"' if isinstance(value, str) else str(value)
        assert takes(matcher, f"[{text}]" if schema == {"const": [value]} else text)


# Each of these ended the process, or let another number through.
@pytest.mark.parametrize("value", [2**53 + 1, 2**63, -(2**63), -(2**63) - 1, 2**64, -9.3e18, 1e300])
def test_constants_that_the_library_would_change_are_refused(value):
    for schema in (
        {"const": value},
        {"type": "integer", "enum": [1, value]},
        {"properties": {"a": {"const": {"b": [value]}}}},
    ):
        with pytest.raises(InvalidRequest, match=r"the constant .* cannot be enforced"):
            json_schema(schema, "x")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)},
        {"type": "integer", "maximum": -(2**63)},
        {"type": "integer", "minimum": 2**63},
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
        {"type": "number", "minimum": 1e300},
        {"type": "number", "maximum": -1e300},
        {"type": "number", "maximum": float("inf")},
        {"type": "string", "minLength": 2**40},
    ],
)
def test_bounds_beyond_what_can_be_enforced_are_refused(schema):
    with pytest.raises(
        InvalidRequest, match=r"cannot be enforced|can be enforced|must be a number"
    ):
        json_schema(schema, "x")


def test_counts_may_be_whole_floats_and_larger_than_any_answer():
    matcher = compiled(json_schema({"type": "string", "minLength": 1.0, "maxLength": 2**63}, "x"))
    assert takes(matcher, '"a"')
    assert not takes(matcher, '""')
    assert takes(compiled(json_schema({"type": "array", "maxItems": 2**64}, "x")), "[]")
