"""What parsers do with long text, in pieces as tokens come.

Counted are the characters that methods of `str` are given, so that no machine's speed is in it. A
parser that goes through, or copies, what it holds back with each piece would come to half the text a piece, each time that it does so.
"""

from __future__ import annotations

import pytest

from server.formats.events import Reasoning, Text
from server.formats.json_calls import GraniteParser, HermesParser, Llama3JsonParser, MistralParser
from server.formats.model_format import AnswerParser
from server.formats.pythonic_calls import PythonicParser
from server.formats.reasoning import REASONING_FAMILIES, ReasoningParser

SHORT, LONG = 30_000, 500_000
PIECE = 16
# A parser may look some times at a piece, and at what waits for the next one, which has a bound.
MOST_A_PIECE = 6000
KNOWN = {"f": ("a", "b")}

BEGINNINGS = {
    HermesParser: ("", "<tool_call>", '<tool_call>{"name": "f", "arguments": ', "x</tool_call>"),
    Llama3JsonParser: ("", '{"name": "f", "parameters": {}}', '{"name": "f", "parameters": {}};'),
    MistralParser: ("", "[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS]f", "[TOOL_CALLS]f{"),
    GraniteParser: ("<|tool_call|>", '<|tool_call|>[{"name": "f", "arguments": {}}'),
    PythonicParser: ("", "[", "[f(", "[f(a=", "[f(a=1, ", '[f(a="', "[f(a=1)"),
}
# What goes on and on after it.
ENDLESS = (" ", "\n x", "x", "[", '{"', '{"a": ', '"\\', "a, ", "f(), ", "x=[1], ", "<tool_")
CASES = [(parser, begin, on) for parser, begins in BEGINNINGS.items() for begin in begins
         for on in ENDLESS]  # fmt: skip


class Counted(str):
    """A text that counts, in all, the characters that its methods are given."""

    __slots__ = ()
    total = 0


def _counted(name):
    method = getattr(str, name)

    def call(self, *arguments):
        Counted.total += len(self)
        found = method(self, *arguments)
        return Counted(found) if isinstance(found, str) else found

    return call


for _name in ("lstrip", "rstrip", "strip", "find", "index", "startswith", "endswith", "isspace",
              "removeprefix", "split", "partition", "__getitem__", "__add__"):  # fmt: skip
    setattr(Counted, _name, _counted(_name))


def _added_to(self, left):
    Counted.total += len(self) + len(left)
    return Counted(str.__add__(left, self))


Counted.__radd__ = _added_to  # type: ignore[attr-defined]


def characters_read(read, text: str) -> int:
    Counted.total = 0
    for begin in range(0, len(text), PIECE):
        read(Counted(text[begin : begin + PIECE]))
    return Counted.total


def long_text(begin: str, on: str, characters: int = SHORT) -> str:
    return begin + on * ((characters - len(begin)) // len(on))


@pytest.mark.parametrize(("parser", "begin", "on"), CASES)
@pytest.mark.sampled(40)
def test_a_tool_parser_reads_each_piece_and_not_what_came_before(parser, begin, on):
    text = long_text(begin, on)
    made = parser(KNOWN)
    assert characters_read(made.feed, text) < MOST_A_PIECE * len(text) / PIECE
    made.finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parser", "begin"), [(parser, begins[-1]) for parser, begins in BEGINNINGS.items()]
)
@pytest.mark.parametrize("on", [" ", "x", '{"a": "'])
def test_half_a_megabyte_costs_as_much_a_piece(parser, begin, on):
    text = long_text(begin, on, LONG)
    made = parser(KNOWN)
    assert characters_read(made.feed, text) < MOST_A_PIECE * len(text) / PIECE
    made.finish()


@pytest.mark.parametrize("begin", ["", "<think>", "<think>x", "<think>x</think>"])
@pytest.mark.parametrize("on", [" ", " x", "</thin", "x"])
def test_a_reasoning_parser_reads_each_piece_and_not_what_came_before(begin, on):
    text = long_text(begin, on)
    made = ReasoningParser(REASONING_FAMILIES["qwen3"])
    assert characters_read(made.feed, text) < MOST_A_PIECE * len(text) / PIECE
    made.finish()


def test_all_that_was_held_back_comes_in_the_end():
    parser = AnswerParser(ReasoningParser(REASONING_FAMILIES["qwen3"]), HermesParser(KNOWN))
    text = "<think>" + " " * 5000 + "a" + "\n" * 5000 + "b</think>" + " " * 5000 + "c <tool_call>{"
    events = [
        one for at in range(0, len(text), 7) for one in parser.read(text[at : at + 7], ended=False)
    ]
    events += parser.read("", ended=True)
    assert "".join(one.text for one in events if isinstance(one, Reasoning)) == (
        "a" + "\n" * 5000 + "b"
    )
    assert "".join(one.text for one in events if isinstance(one, Text)) == "c <tool_call>{"
