"""Messages of the grammar library, as the library gives them today, in words for clients."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from server.grammars.library_errors import in_words
from tests.server.grammars.library import tokenizer

LARGE = {
    "allOf": [
        {"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(8)
    ]
}
PARTS = " & ".join(f"/.*a.{{{i}}}b/" for i in range(12))
RULES = "\n".join(
    f'r{i}: "a" r{(i * 7 + 1) % 400} | "a" r{(i * 11 + 3) % 400} | "a"' for i in range(400)
)


def said(grammar, text=""):
    """What the library says of a grammar, or of a text that follows it so far."""
    key = "lark_grammar" if isinstance(grammar, str) else "json_schema"
    source = json.dumps({"grammars": [{"name": "x", key: grammar}]})
    matcher = LLMatcher(tokenizer(), source, log_level=0)
    matcher.compute_bitmask()
    for byte in text.encode():
        matcher.consume_token(byte)
    assert matcher.is_error()
    return matcher.get_error()


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: /(/", "a regular expression in it cannot be enforced: unclosed group"),
        ("start: /a(?=b)/", "look-around"),
        ("start: (", "line 1, column 9: Expected token ')'"),
        ("start: foo", 'line 1, column 8: unknown name: "foo"'),
        ("start: a\na: a", "no text satisfies it"),
        ("start: X\nX: " + PARTS, "too ambiguous"),
        ({"pattern": "(?<!a)b"}, "look-around"),
        (
            {"not": {}, "uniqueItems": True},
            "keywords of the schema that cannot be enforced: not, uniqueItems",
        ),
        ({"oneOf": [{}, {}]}, "branches of oneOf that may hold at once"),
        (
            {"type": "string", "format": "email", "pattern": "^[a-z]+$"},
            "all that it says of a string",
        ),
        (LARGE, "too large"),
        ({"enum": []}, "empty list"),
    ],
)
def test_a_grammar_that_is_refused(grammar, words):
    message = in_words(said(grammar))
    assert words in message
    assert "\n" not in message
    assert len(message) < 200
    assert "coerce" not in message


def test_a_grammar_that_fails_while_running():
    rules = "start: (" + "|".join(f"r{i}" for i in range(400)) + ")*\n" + RULES
    assert in_words(said(rules, "aa")) == "the output has become too ambiguous under it"
    assert in_words(said('start: "a"', "b")) == "the output does not follow it"


def test_what_is_unknown_is_cut_to_one_line():
    assert in_words("new trouble\n<state>secret") == "new trouble"
    assert in_words("x" * 1000) == "x" * 200
    assert in_words("<state>secret") == "the grammar cannot be compiled"
