"""What every test keeps to, read from the sources of the tests.

A test says what must be true: it asserts, expects an error, or calls something whose name says that
it checks (`check...`, `assert...`). A helper of that name under tests/ must do so itself. No test
waits by the clock: what sleeps is slow where it passes and wrong where the machine is busy. It waits
for what it needs to see; where nothing tells of that, it looks again and again. A test that is
skipped says why.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CHECKS = re.compile(r"_?(check|assert)(_|$)|(raises|warns|fail)$", re.IGNORECASE)
LONGEST_LOOK_S = 0.5  # between two looks
TAKES_TIME = {"sim_runner.py"}  # a device: its steps take as long as they are told to
VIRTUAL_TIME = "world/"  # where to sleep is to set a clock


@pytest.fixture(scope="module", autouse=True)
def syntax_trees():
    """A million objects, none of which is garbage before the last test here is over."""
    gc.disable()
    yield
    for kept in (trees, nodes, helpers):
        kept.cache_clear()
    gc.enable()


@cache
def trees() -> dict[str, ast.Module]:
    paths = sorted(TESTS.rglob("*.py"))
    return {str(path.relative_to(TESTS)): ast.parse(path.read_text()) for path in paths}


@cache
def nodes(root: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(root))


def named(source: str, node: ast.stmt | ast.expr) -> str:
    return f"tests/{source}:{node.lineno}: {ast.unparse(node).splitlines()[-1].strip()}"


def calls(root: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the last name of what is called: `raises` of `pytest.raises`."""
    for node in nodes(root):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr, node
            elif isinstance(node.func, ast.Name):
                yield node.func.id, node


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in nodes(tree) if isinstance(node, Function))


@cache
def helpers() -> dict[str, list[Function]]:
    """The functions under tests/ whose names say that they check."""
    found: dict[str, list[Function]] = {}
    for tree in trees().values():
        for function in functions(tree):
            if CHECKS.match(function.name):
                found.setdefault(function.name, []).append(function)
    return found


def says_what_must_be_true(function: Function, within: Sequence[Function] = ()) -> bool:
    """Whether it asserts, or calls what does; a call of what is not defined under tests/ is taken
    by its name. within: what it was called by."""
    if any(isinstance(node, ast.Assert) for node in nodes(function)):
        return True
    within = [*within, function]
    for name in (name for name, _ in calls(function) if CHECKS.match(name)):
        known = helpers().get(name)
        if known is None:
            return True
        if any(says_what_must_be_true(one, within) for one in known if one not in within):
            return True
    return False


def test_every_test_says_what_must_be_true():
    silent = [
        f"tests/{source}:{node.lineno}: {node.name}"
        for source, tree in trees().items()
        for node in functions(tree)
        if node.name.startswith("test_") and not says_what_must_be_true(node)
    ]
    assert silent == []


def seconds(call: ast.Call) -> float:
    """How long a call of `sleep` takes; for ever where that is not written there."""
    match call.args:
        case [ast.Constant(value=int() | float() as known)]:
            return known
    return float("inf")


def sleeps(tree: ast.AST) -> Iterator[ast.Call]:
    return (call for name, call in calls(tree) if name == "sleep" and seconds(call) > 0)


def test_no_test_waits_by_the_clock():
    found = []
    for source, tree in trees().items():
        if source in TAKES_TIME or source.startswith(VIRTUAL_TIME):
            continue
        loops = [node for node in nodes(tree) if isinstance(node, ast.While)]
        looks = {call for loop in loops for call in sleeps(loop) if seconds(call) <= LONGEST_LOOK_S}
        found += [named(source, call) for call in sleeps(tree) if call not in looks]
    assert found == []


def test_every_skip_says_why():
    """`skip(text)` inside a test; `reason=` in a mark, which stands nowhere without its brackets."""
    found = []
    for source, tree in trees().items():
        reasons = {id(call.func) for name, call in calls(tree) if gives_a_reason(name, call)}
        found += [
            named(source, node)
            for node in nodes(tree)
            if isinstance(node, ast.Attribute)
            and node.attr in ("skip", "skipif", "xfail")
            and ast.unparse(node).startswith("pytest.")
            and id(node) not in reasons
        ]
    assert found == []


def gives_a_reason(name: str, call: ast.Call) -> bool:
    reasons = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
    if name == "skip":
        reasons += call.args[:1]
    return any(not isinstance(value, ast.Constant) or bool(value.value) for value in reasons)
