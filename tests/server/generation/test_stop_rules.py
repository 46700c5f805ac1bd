"""Stops in text that comes in pieces."""

from __future__ import annotations

import time

import pytest
import regex
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from server.generation.stop_expressions import LONGEST, Expression
from server.generation.stop_rules import StopScanner, compile_stops
from tests.effort import tries
from tests.values import present


def scan(pieces, strings=(), expressions=(), include=False):
    """Text shown after each piece, then the flush, and what matched."""
    scanner = StopScanner(compile_stops(tuple(strings), tuple(expressions)), include=include)
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


@settings(max_examples=tries(500), deadline=None)
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


@settings(max_examples=tries(300), deadline=None)
@given(
    pieces=st.lists(LETTERS, max_size=5),
    strings=st.lists(st.text("ab", min_size=1, max_size=5), max_size=6),
)
def test_nothing_of_a_stop_is_ever_shown(pieces, strings):
    shown, matched = scan(pieces, strings)
    for end in range(len(pieces) + 1):
        text, stop = expected("".join(pieces[:end]), strings)
        if stop is not None:
            break  # the first piece that completes a stop ends the text
    assert ("".join(shown), matched) == (text, stop)


@settings(max_examples=tries(300), deadline=None)
@given(text=LETTERS, strings=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_as_little_as_possible_is_held_back(text, strings):
    scanner = StopScanner(compile_stops(tuple(strings)))
    shown = ""
    for end, character in enumerate(text, 1):
        shown += scanner.feed(character)
        if scanner.matched is not None:
            return
        held = next(i for i in range(end + 1) if any(s.startswith(text[i:end]) for s in strings)
                    or i == end)  # fmt: skip
        assert shown == text[:held]


def test_the_work_does_not_grow_with_the_number_of_stops():
    """Beginnings that match for long and then do not: each step back pays for a step on."""

    class Counting(list):
        steps_back = 0

        def __getitem__(self, index):
            self.steps_back += 1
            return super().__getitem__(index)

    stops = tuple("a" * length + "b" for length in range(10, 120))
    rules = compile_stops(stops)
    automaton = present(rules.automaton)
    automaton._fallback = counting = Counting(automaton._fallback)
    scanner = StopScanner(rules)
    text = ("a" * 200 + "c") * 20
    assert scanner.feed(text) + scanner.flush() == text
    assert counting.steps_back <= len(text)


def test_more_stop_text_than_can_be_prepared_is_refused():
    with pytest.raises(InvalidRequest, match="stop: has 20000 characters in all; at most 8192"):
        compile_stops(tuple(f"{i:04}" * 50 for i in range(100)))


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
        pytest.param(r"\By", ["x", "y"], "x", True, id="place-after-shown-text"),
        pytest.param(
            r"(?i)straße", ["Die ST", "RASS", "E, STRA", "ßE"], "Die STRASSE, ", True, id="case"
        ),
        pytest.param(r"(?s)<(a|b.)+?>", ["x<a", "b\n", "a>", "y"], "x", True, id="group"),
        pytest.param(r"[^\]a-c\d]{2,}", ["1a]", "-", "^"], "1a]", True, id="set"),
        pytest.param(r"\bend\b", ["bend", " en", "d."], "bend ", True, id="word"),
        pytest.param(r"z+", ["abc"], "abc", False, id="no-match"),
    ],
)
def test_stop_expressions(expression, pieces, text, matched):
    shown, found = scan(pieces, expressions=[expression])
    assert "".join(shown) == text
    assert (found == expression) is matched


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        pytest.param("([", "unterminated character set", id="syntax"),
        pytest.param("a*", "empty text", id="matches-nothing"),
        pytest.param("", "empty text", id="empty"),
        pytest.param("(" * 4000, "has 4000 characters in all", id="deep"),
        pytest.param("a" * 513, "has 513 characters in all; at most 512", id="long"),
        pytest.param("((a{999}){999}){999}", "invalid repetition size", id="memory"),
        pytest.param("(?:" * 10 + "a" + "){2,3}" * 10, "invalid repetition size", id="doubling"),
        pytest.param("(?:" * 60 + "a" + "b)*c" * 60, "10 levels deep", id="nested"),
        pytest.param("(a{900}|b{900})", "too large once its repetitions", id="large"),
        pytest.param("(a(?=b)|c)+", "assert is not supported", id="look-ahead"),
        pytest.param("(?<=x)y", "assert is not supported", id="look-behind"),
        pytest.param(r"(a|b)\1", "groupref is not supported", id="reference-back"),
        pytest.param("a++", "possessive repeat is not supported", id="possessive"),
        pytest.param(r"\p{Nonsense}", "bad escape", id="not-of-python"),
    ],
)
def test_expressions_that_cannot_be_used_are_refused(expression, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compile_stops((), (expression,))
    assert caught.value.param == "stop_regex"
    assert len(str(caught.value)) < 200


def test_the_bound_on_expressions_is_on_all_of_them_together():
    compile_stops((), ("(?i)" + "ab" * 250,))
    with pytest.raises(InvalidRequest, match="has 1008 characters in all"):
        compile_stops((), ("(?i)" + "ab" * 250,) * 2)
    with pytest.raises(InvalidRequest, match="too large once its repetitions"):
        compile_stops((), ("a{400}", "b{400}"))


# What RE2 and `regex` read alike, without the places in a text that tell the two apart.
ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^b]", "é", "(?i:B)"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}", "*?", "{2,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=tries(400), deadline=None)
@given(source=EXPRESSIONS, text=st.text("abéB", max_size=8))
@example(source="(?:a)*?a", text="aB")
def test_as_much_is_undecided_as_may_begin_a_match(source, text):
    reference = regex.compile(source)
    assume(reference.fullmatch("") is None)
    expression = Expression(source)
    # `regex` finds partial matches of lazy repetitions that are none ("aB" for "a*?a"). What a text
    # may begin does not depend on who is lazy.
    begins = regex.compile(source.replace("*?", "*"))
    wanted = next(
        (i for i in range(len(text)) if begins.fullmatch(text[i:], partial=True)), len(text)
    )
    assert expression.undecided_from(text, 0) == wanted
    found = reference.search(text)
    assert expression.find(text, 0) == (None if found is None else found.span())


def test_no_expression_is_held_back_for_or_looked_at_without_an_end():
    """What others backtrack over for ever is found in time that grows with the text, which is let
    through where a match would be longer than is looked for."""
    scanner = StopScanner(compile_stops((), (r"(a|a)*(a|aa)*(aa|a)+c", r"(.|\w)*(.|a)*~")))
    started = time.thread_time()
    shown = [scanner.feed("aaaa") for _ in range(1000)]
    assert time.thread_time() - started < 10, "it would take for ever"
    assert len("".join(shown)) == 4000 - LONGEST
    scanner.feed("ac")
    assert scanner.matched == r"(a|a)*(a|aa)*(aa|a)+c"
