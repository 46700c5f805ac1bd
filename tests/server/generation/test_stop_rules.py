"""Stops in text that comes in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from server.generation.stop_rules import StopScanner, compile_stops


def scan(pieces, strings=(), expressions=(), include=False):
    """Text shown after each piece, then the flush, and what matched."""
    scanner = StopScanner(compile_stops(tuple(strings), tuple(expressions), include))
    shown = []
    for piece in pieces:
        shown.append(scanner.feed(piece))
        if scanner.matched is not None:
            return shown, scanner.matched
    return [*shown, scanner.flush()], scanner.matched


def expected(text, strings):
    """The text before the stop that starts first; the longer one where two start together."""
    hits = [(text.find(s), -len(s), s) for s in strings if s in text]
    return (text[: min(hits)[0]], min(hits)[2]) if hits else (text, None)


LETTERS = st.text(alphabet="ab", max_size=12)


@settings(max_examples=500, deadline=None)
@given(text=LETTERS, strings=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_one_character_at_a_time_finds_the_stop_that_completes_first(text, strings):
    shown, matched = scan(text, strings)
    # Fed by characters, the first stop to be complete ends the text, at its earliest start.
    for end in range(len(text) + 1):
        if any(s in text[:end] for s in strings):
            assert ("".join(shown), matched) == expected(text[:end], strings)
            return
    assert "".join(shown) == text
    assert matched is None


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(LETTERS, max_size=5), strings=st.lists(st.just("aab"), max_size=1))
def test_nothing_of_a_stop_is_ever_shown(pieces, strings):
    shown, matched = scan(pieces, strings)
    joined = "".join(shown)
    assert (joined, matched) == expected("".join(pieces), strings)


def test_text_that_cannot_begin_a_stop_is_not_held_back():
    shown, _ = scan(["one ", "two ", "@", "three"], ["@@@@"])
    assert shown == ["one ", "two ", "", "@three", ""]


def test_held_text_comes_at_the_end():
    assert scan(["almost ST", "O"], ["STOP"]) == (["almost ", "", "STO"], None)


def test_stop_can_be_part_of_the_output():
    assert scan(["a STO", "P b"], ["STOP"], include=True) == (["a ", "STOP"], "STOP")


@pytest.mark.parametrize(
    ("expression", "pieces", "text", "matched"),
    [
        pytest.param(r"\d{3}", ["a1", "2", "b", "12", "34"], "a12b", True, id="digits"),
        pytest.param(r"\n\n", ["a\n", "b", "\n", "\nc"], "a\nb", True, id="blank-line"),
        pytest.param(r"(?<=x)y", ["x", "y"], "x", True, id="look-behind-over-shown-text"),
        pytest.param(r"\bend\b", ["bend", " en", "d."], "bend ", True, id="word"),
        pytest.param(r"z+", ["abc"], "abc", False, id="no-match"),
    ],
)
def test_stop_expressions(expression, pieces, text, matched):
    shown, found = scan(pieces, expressions=[expression])
    assert "".join(shown) == text
    assert (found == expression) is matched


@pytest.mark.parametrize(
    ("expression", "reason"), [("([", "stop_regex"), ("a*", "empty text"), ("", "empty text")]
)
def test_expressions_that_cannot_be_used_are_refused(expression, reason):
    with pytest.raises(InvalidRequest, match=reason):
        compile_stops((), (expression,))


def test_an_expression_that_takes_too_long_matches_nothing():
    """Nested repetition takes exponential time; the loop that serves everybody must go on."""
    shown, matched = scan(["a" * 40 + "b"], expressions=[r"(a|a)*(a|aa)*(aa|a)+c"])
    assert matched is None
    assert "".join(shown) == "a" * 40 + "b"
