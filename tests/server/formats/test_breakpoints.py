"""Breakpoints in conversations under the templates of real families: what is kept of the prompt is
what all conversations have in common that begin alike up to there."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.request import PromptPin
from server.api.fields.caching import Caching
from server.api.prompt_pins import prompt_pins
from server.formats.conversation import parse_messages
from server.formats.tools import parse_tools
from tests.server.formats.random_chats import own_templates
from tests.server.formats.test_model_format import served

TOOLS: Any = [{"type": "function", "function": {"name": "look", "description": "Looks."}}]
SHORT = {"type": "ephemeral"}


def history(said: str, kept: int | None = None) -> list[dict[str, Any]]:
    """A conversation with a call and its result; from the fourth message on it says `said`.

    Args: kept: the message with a breakpoint."""
    call = {"id": "a1B2c3D4e", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief, and look first."},
        {"role": "user", "content": "What is there?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1B2c3D4e", "content": f"{said} was found"},
        {"role": "assistant", "content": f"{said} is there."},
        {"role": "user", "content": f"{said}, and what else?"},
    ]
    if kept is not None:
        messages[kept]["cache_control"] = SHORT
    return messages


def prompt(served_by, given, tools):
    """(ids of the prompt, what makes such ids of other messages, the parsed messages)."""
    model_format, tokenizer = served_by
    offered = parse_tools(tools)
    messages = parse_messages(given)

    def encode(messages):
        fitted, options = model_format.conversation(messages, offered)
        return tokenizer.encode_chat(fitted, **options)

    return encode(messages), encode, messages


@pytest.mark.parametrize("template", sorted(own_templates()))
def test_what_is_kept_is_what_other_endings_share(template):
    first = 1 if template == "gemma" else 0  # it takes no system message
    with served(template) as model:
        for kept in range(first, 3):
            given = history("Xylophones", kept)[first:]
            ids, encode, messages = prompt(model, given, TOOLS)
            [pin] = prompt_pins(given, TOOLS, Caching(), messages, ids, encode)
            others = history("Kettles")[first:]
            if kept == 0:
                others[1]["content"] = "Or is nothing there?"
            other = prompt(model, others, TOOLS)[0]
            assert ids[: pin.tokens] == other[: pin.tokens]
            text = bytes(token for token in ids[: pin.tokens] if token < 256).decode()
            # Mistral's shows what the system says beside the newest question.
            if (template, kept) != ("mistral", 0):
                assert ("Be brief", "What is there?", "look")[kept] in text


def test_a_breakpoint_at_the_end_renders_nothing_again():
    with served("qwen3") as model:
        given = history("Xylophones", 5)
        ids, _, messages = prompt(model, given, TOOLS)

        def never(messages):
            raise AssertionError("rendered again")

        pins = prompt_pins(given, TOOLS, Caching(), messages, ids, never)
    assert pins == (PromptPin(len(ids), 300.0),)


def test_where_the_template_refuses_such_a_conversation_all_of_it_is_kept():
    def refuse(messages):
        raise InvalidRequest("messages: are refused")

    given = history("Xylophones", 1)
    pins = prompt_pins(given, [], Caching(), parse_messages(given), list(range(90)), refuse)
    assert pins == (PromptPin(90, 300.0),)
