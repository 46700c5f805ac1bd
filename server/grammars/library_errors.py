"""What the grammar library says went wrong, in a sentence for the client."""

from __future__ import annotations

import json
import re

_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
_EXPRESSION = re.compile(r"regex parse error:.*?\nerror: ([^\n]+)", re.DOTALL)
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\)[:,] (?:at EOF: )?")
_MOST_CHARACTERS = 200

# Parts of messages, and what they mean.
_MEANINGS = (
    ("NoExtensionBias", "no text satisfies it"),
    ("Regex is empty", "no text satisfies all that it says of a string"),
    (
        "coerce_one_of",
        "branches of oneOf that may hold at once cannot be enforced; anyOf takes them",
    ),
    ("Unsatisfiable schema: anyOf is empty", "no text satisfies an empty list of alternatives"),
    ("number out of range", "a number in it is out of range"),
    ("schema too large", "the schema is too large to be enforced"),
    ("fuel exhausted", "it is too ambiguous to be enforced"),
    ("items; max is", "the output has become too ambiguous under it"),
    ("satisfy the grammar", "the output does not follow it"),
)


def in_words(message: str) -> str:
    """One sentence, without the library's state: that may hold what the prompt holds."""
    if found := _UNIMPLEMENTED.search(message):
        keys = ", ".join(json.loads(found[1]))
        return f"keywords of the schema that cannot be enforced: {keys}"
    if found := _EXPRESSION.search(message):
        return f"a regular expression in it cannot be enforced: {found[1]}"
    for part, meaning in _MEANINGS:
        if part in message:
            return meaning
    line = re.split(r"\n| \(at \"|<(?:state|backtrace|non-verbose)", message.strip())[0].strip()
    if place := _PLACE.match(line):
        line = f"line {place[1]}, column {place[2]}: {line[place.end() :]}"
    return line[:_MOST_CHARACTERS] or "the grammar cannot be compiled"
