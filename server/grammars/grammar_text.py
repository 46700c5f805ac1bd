"""Grammars and expressions that clients write themselves: Lark, GBNF, regular expressions."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from runtime.errors import InvalidRequest
from server.grammars.json_schema import checked_schema
from server.grammars.nesting import MAX_REFERENCES, MAX_REGEX_NESTING, lark_nesting, regex_nesting

if TYPE_CHECKING:
    from server.grammars.sources import Source

_MAX_LINES = 5000
_SCHEMA_IN_LARK = re.compile(r"%json\s*+(?=\{)")


def regex(pattern: Any, param: str) -> Source:
    """The source of a regular expression that the whole output matches.

    Raises: InvalidRequest: it is none, or nested too deeply.
    """
    if not isinstance(pattern, str) or not pattern:
        raise InvalidRequest(f"{param} must be a non-empty regular expression", param=param)
    if regex_nesting(pattern) > MAX_REGEX_NESTING:
        raise InvalidRequest(
            f"{param}: the expression is nested more than {MAX_REGEX_NESTING} levels deep",
            param=param,
        )
    return [{"name": "regex", "lark_grammar": "start: /" + _slashes_escaped(pattern) + "/"}]


def _slashes_escaped(pattern: str) -> str:
    """Between Lark's slashes, a slash and a line break are written with a backslash."""
    pattern = re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], pattern, flags=re.DOTALL)
    return pattern.replace("\n", r"\n")


def context_free(text: Any, param: str) -> Source:
    """The source of a grammar in Lark's form, or in GBNF / EBNF with `::=`.

    Raises: InvalidRequest: it is none, or nested too deeply.
    """
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequest(f"{param} must be a grammar (Lark, or GBNF with ::=)", param=param)
    if "::=" in text:
        text = _lark_of(text, param)
    if lark_nesting(text) > MAX_REFERENCES:
        raise InvalidRequest(
            f"{param}: the grammar's rules refer to one another more than {MAX_REFERENCES} levels"
            " deep",
            param=param,
        )
    return [{"name": "grammar", "lark_grammar": _with_checked_schemas(text, param)}]


def _lark_of(text: str, param: str) -> str:
    """GBNF as Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    # The converter looks for the line at each step.
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > _MAX_LINES:
        raise InvalidRequest(
            f"{param}: has {len(lines)} lines; at most {_MAX_LINES} are allowed", param=param
        )
    try:
        return str(any_to_lark("\n".join(lines)))
    except (RecursionError, IndexError):
        told = "is nested too deeply, or ends within a text"
    except Exception as error:  # the converter raises Exception itself
        told = str(error).partition("\n")[0][:200]
    raise InvalidRequest(f"{param}: {told}", param=param)


def _with_checked_schemas(text: str, param: str) -> str:
    """Lark text whose JSON schemas (`%json {...}`) are such as can be enforced."""
    pieces: list[str] = []
    position = 0
    while found := _SCHEMA_IN_LARK.search(text, position):
        pieces.append(text[position : found.end()])
        try:
            schema, position = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param}: %json: {error}", param=param) from None
        pieces.append(json.dumps(checked_schema(schema, param)))
    return "".join([*pieces, text[position:]])
