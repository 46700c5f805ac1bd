"""How deep a schema, an expression or a grammar is nested, references followed.

The grammar library goes into all of these by recursion. Too deep a nesting is an error message of
some kilobytes, or an overflow of its stack, which ends the process; so it is measured before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_REGEX_NESTING = 100
# Levels of references within references, each with the levels that it is nested itself. llguidance
# 1.9 overflows a stack of 8 MiB at some three times as many.
MAX_REFERENCES = 800

# What is not closed goes to the end, and nothing is tried twice: a client may send anything.
_IN_REGEX = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)|[()]", re.DOTALL)
# Lark: comments, texts and expressions, in which brackets and names say nothing; then both.
_IN_LARK = re.compile(
    r"""//[^\n]*+|\#[^\n]*+|"(?:\\.|[^"\\\n])*+(?:["\n]|\\?\Z)"""
    r"""|/(?![*/])(?:\\.|[^/\\\n])*+(?:[/\n]|\\?\Z)|[\w-]++|[()\[\]{}]""",
    re.DOTALL,
)
_LARK_RULE = re.compile(r"^[ \t]*+[?!]?([A-Za-z_][\w-]*+)[^\n:\"/|]*+:", re.MULTILINE)


def regex_nesting(pattern: str) -> int:
    """How many groups of an expression stand within one another."""
    return _bracket_depth(_IN_REGEX.findall(pattern))


def _bracket_depth(tokens: Iterable[str]) -> int:
    depth = deepest = 0
    for token in tokens:
        if token in ("(", "[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token in (")", "]", "}"):
            depth -= 1
    return deepest


def lark_nesting(text: str) -> int:
    """The deepest way through a grammar's rules and terminals, with the brackets around each."""
    begins = list(_LARK_RULE.finditer(text))
    ends = [*(begin.start() for begin in begins), len(text)][1:]
    weights: dict[str, int] = defaultdict(int)
    references: dict[str, set[str]] = defaultdict(set)
    for begin, end in zip(begins, ends, strict=True):
        tokens = _IN_LARK.findall(text, begin.end(), end)
        weights[begin[1]] = max(weights[begin[1]], 1 + _bracket_depth(tokens))
        references[begin[1]].update(tokens)
    return longest_way(weights, references)


def schema_nesting(schema: dict[str, Any]) -> tuple[int, int]:
    """(levels of the JSON itself, levels with references followed) of a JSON schema."""
    weights: dict[str, int] = {}
    references: dict[str, set[str]] = {}
    pending = ["#"]
    while pending:
        pointer = pending.pop()
        if pointer not in weights:
            weights[pointer], references[pointer] = _levels(target_of(schema, pointer))
            pending += references[pointer]
    return weights["#"], longest_way(weights, references)


def _levels(schema: Any) -> tuple[int, set[str]]:
    """How deep a schema's JSON is, and what it refers to."""
    deepest = 0
    found: set[str] = set()
    pending = [(schema, 1)]
    while pending:
        value, level = pending.pop()
        deepest = max(deepest, level)
        if isinstance(value, dict):
            if isinstance(pointer := value.get("$ref"), str):
                found.add(pointer)
            pending += ((child, level + 1) for child in value.values())
        elif isinstance(value, list):
            pending += ((child, level + 1) for child in value)
    return deepest, found


def target_of(schema: Any, pointer: str) -> Any:
    """What a reference within a schema leads to; None where it leads nowhere or elsewhere."""
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isascii() and name.isdecimal():
            schema = schema[int(name)] if int(name) < len(schema) else None
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def longest_way(weights: Mapping[str, int], references: Mapping[str, Iterable[str]]) -> int:
    """The weight of the heaviest way along references. Names that refer to one another in a circle
    are all on it."""
    forward = {name: [r for r in references[name] if r in weights] for name in weights}
    backward: dict[str, list[str]] = {name: [] for name in weights}
    for name, others in forward.items():
        for other in others:
            backward[other].append(name)
    # Kosaraju: what is reached backwards from the last finished, and not yet placed, is a circle.
    ways: dict[str, int] = {}
    placed: set[str] = set()
    circles = [
        _finished([name], backward, placed)
        for name in reversed(_finished(weights, forward, set()))
        if name not in placed
    ]
    for circle in reversed(circles):  # from the ends backwards
        beyond = [ways[other] for name in circle for other in forward[name] if other in ways]
        way = sum(weights[name] for name in circle) + max(beyond, default=0)
        ways.update(dict.fromkeys(circle, way))
    return max(ways.values(), default=0)


def _finished(starts: Iterable[str], graph: Mapping[str, list[str]], seen: set[str]) -> list[str]:
    """What is reached from the starts and not seen before, each after all that it leads to."""
    found: list[str] = []
    for start in starts:
        if start in seen:
            continue
        seen.add(start)
        path = [(start, iter(graph[start]))]
        while path:
            name, rest = path[-1]
            following = next((other for other in rest if other not in seen), None)
            if following is None:
                path.pop()
                found.append(name)
            else:
                seen.add(following)
                path.append((following, iter(graph[following])))
    return found
