"""What the scripts of this folder share.

The server's simulated model answers with the text of the last SAY[...]SAY in its prompt, so each
script knows what its library must give, to the character.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any

URL, MODEL = sys.argv[1:3]
KEY = "none"


def say(text: str) -> str:
    """A text that makes the model answer with this one."""
    return f"SAY[{text}]SAY"


def call(name: str, arguments: str) -> str:
    """A text that makes the model call a tool."""
    return say(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')


TEXT = "It is 21 °C in Paris."
QUESTION = say(TEXT)
CALL = call("get_weather", '{"city": "Paris"}')
FORECAST = "Rain in Paris."  # said once the tool has given `say(FORECAST)`
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
PERSON = '{"name": "Ada", "born": 1815}'
PERSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "born": {"type": "integer"}},
    "required": ["name", "born"],
    "additionalProperties": False,
}


def equal(found: Any, wanted: Any) -> None:
    """Says both where they differ."""
    assert found == wanted, f"got {found!r}, wanted {wanted!r}"


def run(*checks: Callable[[], Any]) -> None:
    """Runs every check, and ends with status 1 where one fails."""
    with asyncio.Runner() as loop:
        for check in checks:
            if inspect.iscoroutinefunction(check):
                loop.run(check())
            else:
                check()
            print("passed:", check.__name__, flush=True)
