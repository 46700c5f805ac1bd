"""Numbers in JSON schemas, as the grammar library can enforce them.

llguidance 1.9 keeps numbers of a schema as float64 and compares integers as int64. A bound that is
neither is rounded, mostly outwards; a constant becomes another number; a bound near the smallest
int64 overflows the stack, which ends the process. So bounds are moved inwards to numbers that the
library keeps: whatever is written then follows the schema, and only numbers beyond 2^53 that lie
within rounding of a bound cannot be written. What cannot be enforced at all is a ValueError.
"""

from __future__ import annotations

import math
from typing import Any

from runtime.errors import shown

_EXACT = 2**53 - 1  # up to here every integer is a float64, and so is its successor
_LARGEST = 2**63 - 1
_SMALLEST = -(2**63 - 1024)  # the smallest float64 that the library negates without overflow
# Of numbers that may have a fraction, the library keeps these to the digit.
_STEPS = (_EXACT, 10**16, 10**17)
_TINY = 1e-12  # below this the expression that it makes of a bound is too deep
# Beyond these the library compiles for seconds (12 s for 1,000,003), or refuses.
_MAX_MULTIPLE = 10_000
_MAX_COUNT = 2**31  # no answer has so many characters, items or keys

_LOW = ("minimum", "exclusiveMinimum")
_HIGH = ("maximum", "exclusiveMaximum")


def fit_bounds(schema: dict[str, Any]) -> None:
    """Moves `minimum`, `maximum` and the exclusive ones to what can be enforced.

    Raises: ValueError: there is no such number on that side of the bound.
    """
    given = {key: schema[key] for key in (*_LOW, *_HIGH) if key in schema}
    for key, value in {**given, "multipleOf": schema.get("multipleOf", 1)}.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} must be a number")
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and multiple > _MAX_MULTIPLE:
        raise ValueError(
            f"multipleOf {shown(multiple)} cannot be enforced; at most {_MAX_MULTIPLE} can"
        )
    if not all(map(_is_number, given.values())):
        return  # the library says what is wrong
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if "integer" in types and "number" not in types:
        _fit_integers(schema, given)
    else:
        for key, value in given.items():
            inward = -_down(-value) if key in _LOW else _down(value)
            if not math.isfinite(inward):
                raise ValueError(f"{key} {shown(value)} cannot be enforced")
            schema[key] = inward


def _fit_integers(schema: dict[str, Any], given: dict[str, Any]) -> None:
    if all(abs(value) <= _EXACT for value in given.values()):
        return
    low, high = _SMALLEST, _LARGEST
    for key, value in given.items():
        exclusive = key.startswith("exclusive")
        if key in _LOW:
            low = max(low, math.floor(value) + 1 if exclusive else math.ceil(value))
        else:
            high = min(high, math.ceil(value) - 1 if exclusive else math.floor(value))
        del schema[key]
    if low <= high:
        # The largest is kept as it is, others as the next float64 inwards.
        high = _LARGEST if high == _LARGEST else _float_at_most(high)
        low = -_float_at_most(-low)
        schema["minimum"], schema["maximum"] = low, high
    if low > high:
        told = ", ".join(f"{key} {shown(value)}" for key, value in given.items())
        raise ValueError(f"no integer that can be enforced lies within {told}")


def _float_at_most(value: int) -> int:
    """The largest integer up to this one that is a float64."""
    near = float(value)
    return int(near if int(near) <= value else math.nextafter(near, -math.inf))


def _down(value: float) -> float:
    """The largest bound up to this one that can be enforced; -inf where there is none."""
    if abs(value) < _TINY:
        return 0 if value >= 0 else -_TINY
    if abs(value) <= _EXACT:
        return value
    if value > 0:
        return max(step for step in _STEPS if step <= value)
    return -min((step for step in _STEPS if step >= -value), default=math.inf)


def fit_counts(schema: dict[str, Any]) -> None:
    """Makes counts integers, and leaves out upper ones that no answer reaches.

    Raises: ValueError: a lower one that cannot be enforced.
    """
    for kind in ("Length", "Items", "Properties"):
        low, high = f"min{kind}", f"max{kind}"
        for key in (low, high):
            value = schema.get(key)
            if isinstance(value, float) and value.is_integer():
                schema[key] = int(value)
        if _is_number(schema.get(high)) and schema[high] > _MAX_COUNT:
            del schema[high]
        if _is_number(schema.get(low)) and schema[low] > _MAX_COUNT:
            raise ValueError(
                f"{low} {shown(schema[low])} cannot be enforced; at most {_MAX_COUNT} can"
            )
    _check_min_properties(schema)


def _check_min_properties(schema: dict[str, Any]) -> None:
    """Free keys are not kept apart by a grammar: two equal ones would count as two."""
    least, required = schema.get("minProperties"), schema.get("required")
    known = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > known + 1:
        raise ValueError(
            f"minProperties {shown(least)} with {known} required properties cannot be enforced;"
            f" at most one more than the required ones ({known + 1}) can"
        )


def check_constant(value: Any) -> None:
    """Looks through a constant. Raises: ValueError: a number that would become another."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif _is_number(value) and not (abs(value) <= _EXACT or _is_kept(value)):
            raise ValueError(
                f"the constant {shown(value)} cannot be enforced: it is no exact float64"
            )


def _is_kept(value: float) -> bool:
    """Whether a number beyond the exact integers is enforced as it is."""
    return _SMALLEST <= value <= _LARGEST and (value == _LARGEST or float(value) == value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
