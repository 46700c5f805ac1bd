"""Which beginnings of a rendered prompt its client asked to be kept in the prefix cache.

A breakpoint stands in a message or behind a tool; templates put the message's text wherever they
like. So where the part before it ends is found by rendering the conversation again with the texts
behind the breakpoint replaced: both prompts begin with the same tokens up to there. A breakpoint
keeps the prompt to the end of its message; one of a tool, whatever stands before the first message
that is not the system's, since most templates show tools there.

Of two breakpoints the longer covers the shorter unless the shorter is to be kept for longer. Most
conversations end with one, or have one only, so that nothing is rendered again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.errors import InvalidRequest
from runtime.request import PromptPin
from server.api.fields.caching import asked_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from server.api.fields.caching import Caching
    from server.text.chat_template import Message

_OTHER_TEXT = "\ue000"  # private use: no text that anybody wrote begins with it


def prompt_pins(
    given: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    caching: Caching,
    messages: Sequence[Message],
    ids: Sequence[int],
    encode: Callable[[list[Message]], Sequence[int]],
) -> tuple[PromptPin, ...]:
    """What is to be kept, the shortest first.

    Args:
        given, tools: as the client sent them, in OpenAI's form, breakpoints included.
        caching: what it asks for beside these.
        messages: parallel to `given`, as templates take them; ids: of their prompt.
        encode: gives the ids of the prompt that other messages would make.
    """
    last = len(messages)
    asked: dict[int, float] = {}  # by the number of messages before the breakpoint
    for count, message in enumerate(given, 1):
        asked[count] = _longest_s(message, caching.point_s)
    leading = next((i for i, m in enumerate(messages) if m["role"] != "system"), last)
    in_tools = max((asked_s(tool, caching.point_s) for tool in tools), default=0.0)
    asked[leading] = max(asked.get(leading, 0.0), in_tools)
    pins = []
    if caching.whole_s and caching.key:
        pins.append(PromptPin(len(ids), caching.whole_s, caching.key))
    else:
        asked[last] = max(asked[last], caching.whole_s)
    covered_s = 0.0
    for count in sorted(asked, reverse=True):
        if asked[count] > covered_s:
            covered_s = asked[count]
            pins.append(PromptPin(_tokens_before(count, messages, ids, encode), covered_s))
    return tuple(sorted(pins, key=lambda pin: pin.tokens))


def _longest_s(message: Mapping[str, Any], point_s: float) -> float:
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if type(content) is list else []
    return max(asked_s(holder, point_s) for holder in [message, *parts])


def _tokens_before(
    count: int,
    messages: Sequence[Message],
    ids: Sequence[int],
    encode: Callable[[list[Message]], Sequence[int]],
) -> int:
    """Tokens of the prompt up to the end of the first `count` messages."""
    if count == len(messages):
        return len(ids)
    others = [{**message, "content": ""} for message in messages[count:]]
    others[0]["content"] = _OTHER_TEXT
    try:
        return _shared(ids, encode([*messages[:count], *others]))
    except InvalidRequest:
        return len(ids)  # the template refuses such a conversation


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
