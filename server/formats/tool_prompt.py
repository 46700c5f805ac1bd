"""Conversations with tools for chat templates, also for those that know none."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from server.formats.tools import Message, Tool

_INSTRUCTION = """\
You may call functions to help with the user's request. Here they are, one in each line:
<tools>
{tools}
</tools>

To call a function, answer with a JSON object of its name and arguments within these tags:
<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>"""


def knows_tools(templates: Iterable[str]) -> bool:
    """Whether one of a model's chat templates makes use of tools."""
    return any(re.search(r"\btools\b", template) for template in templates)


def told_in_text(
    messages: Sequence[Message], tools: Sequence[Tool], *, system: bool = True
) -> list[Message]:
    """The same conversation for a template that knows no tools: plain text in plain roles.

    The tools go to the system message, calls to the assistant's text, results to the user's.

    Args: system: the template takes a system message; else the first message tells of the tools.
    """
    plain = [_plain(message) for message in messages]
    if tools:
        lines = "\n".join(json.dumps(tool.openai(), ensure_ascii=False) for tool in tools)
        instruction = _INSTRUCTION.format(tools=lines)
        if plain[0]["role"] == "system" or not system:
            told = [plain[0].get("content") or "", instruction]
            head = "\n\n".join(told if system else reversed(told)).strip()
            plain[0] = {**plain[0], "content": head}
        else:
            plain.insert(0, {"role": "system", "content": instruction})
    return _joined_results(plain)


def _plain(message: Message) -> Message:
    calls = message.get("tool_calls")
    if message.get("role") == "tool":
        text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        return {"role": "user", "content": text, "result": True}
    if not calls:
        return message
    parts = [message.get("content") or ""]
    for call in calls:
        function = call["function"]
        payload = {"name": function["name"], "arguments": function["arguments"]}
        parts.append(f"<tool_call>\n{json.dumps(payload, ensure_ascii=False)}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(part for part in parts if part)}


def _joined_results(messages: list[Message]) -> list[Message]:
    """Results of parallel calls in one message: many templates want the roles to alternate."""
    joined: list[Message] = []
    for message in messages:
        result = message.pop("result", False) if "result" in message else False
        if result and joined and joined[-1].get("result"):
            joined[-1]["content"] += "\n" + message["content"]
        else:
            joined.append({**message, "result": True} if result else message)
    return [{k: v for k, v in m.items() if k != "result"} for m in joined]
