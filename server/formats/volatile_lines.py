"""Lines that differ from request to request, kept out of what the prefix cache can hold.

A prompt is found in the cache up to its first difference from earlier ones. A clock in the system
message, which stands first, voids it for the whole conversation with every request. Lines that the
operator names (`--volatile-line`) are taken out of the system message and told at the end of the
last message, word for word and marked as a reminder of the system's: the model knows as much as
before, and all that stands in between stays the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import re2

from runtime.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.text.chat_template import Message

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_REMINDER = "<system-reminder>\n{lines}\n</system-reminder>"
# Behind what others said nothing may be put into their mouths.
_TAKES_REMINDER = ("user", "tool")


class VolatileLines:
    """The lines that are moved.

    Args: expressions: RE2's, each of which matches a whole line.
    Raises: ConfigError: one that is wrong.
    """

    def __init__(self, expressions: Sequence[str] = ()) -> None:
        self._expressions = [_compiled(source) for source in expressions]

    def moved(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages as they are to be rendered. Where the last one is neither the user's nor a
        tool's, or is a system message itself, nothing is moved.

        Args: messages: their contents are strings.
        """
        if not self._expressions or messages[-1]["role"] not in _TAKES_REMINDER:
            return messages
        found: list[str] = []
        kept = list(messages)
        for index, message in enumerate(messages):
            if message["role"] != "system":
                break
            kept[index] = {**message, "content": self._without(message["content"], found)}
        if not found:
            return messages
        last = kept[-1]
        told = _REMINDER.format(lines="\n".join(found))
        kept[-1] = {**last, "content": f"{last['content']}\n\n{told}".lstrip("\n")}
        return kept

    def _without(self, text: str, found: list[str]) -> str:
        """The text without its volatile lines, which are added to `found`."""
        lines = text.split("\n")
        volatile = [self._is_volatile(line) for line in lines]
        found += [line for line, moves in zip(lines, volatile, strict=True) if moves]
        return "\n".join([line for line, moves in zip(lines, volatile, strict=True) if not moves])

    def _is_volatile(self, line: str) -> bool:
        return any(one.fullmatch(line) for one in self._expressions)


def _compiled(source: str) -> re2._Regexp:
    try:
        return re2.compile(source, _OPTIONS)
    except re2.error as error:
        told = error.args[0] if error.args else error
        told = told.decode("utf-8", "replace") if isinstance(told, bytes) else str(told)
        raise ConfigError(f"volatile_line {shown(source)}: no regular expression: {told}") from None
