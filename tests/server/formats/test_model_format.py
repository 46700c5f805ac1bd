"""A model's template, tools and reasoning put together."""

from __future__ import annotations

import contextlib

import pytest

from server.formats.events import Reasoning, Text
from server.formats.model_format import ModelFormat
from server.formats.tools import parse_tools
from server.text.chat_template import ChatTemplate
from tests.fakes import IM_END, byte_tokenizer
from tests.server.formats.random_chats import SPECIAL, own_templates

TOOLS = [{"type": "function", "function": {"name": "f"}}]
USER = [{"role": "user", "content": "Hi"}]


@contextlib.contextmanager
def served(template, **options):
    """(format, tokenizer) of a model with one of our templates."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ChatTemplate(own_templates()[template], SPECIAL)
    model_format = ModelFormat(tokenizer, 258, [IM_END], **options)
    try:
        yield model_format, tokenizer
    finally:
        model_format.close()
        tokenizer.close()


def read(model_format, prompt, text, tools=None):
    """The events of an answer after this prompt."""
    parser = model_format.parser_factory(list(prompt.encode()), tools)()
    return parser.read(text, ended=True)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_r1"])
async def test_thinking_that_the_template_closed_leaves_the_answer(family):
    with served("qwen3", reasoning_parser=family) as (model_format, tokenizer):
        closed = tokenizer.render_chat(USER, kwargs={"enable_thinking": False})
        assert closed.endswith("<think>\n\n</think>\n\n")
        assert read(model_format, closed, "four") == [Text("four")]
        opened = tokenizer.render_chat(USER) + "<think>\n"
        assert read(model_format, opened, "hm</think>four") == [
            Reasoning("hm"),
            Text("four"),
        ]


def test_tools_stand_where_the_template_reads_them():
    tools = parse_tools(TOOLS)
    for template in own_templates():
        with served(template) as (model_format, tokenizer):
            messages, options = model_format.conversation(USER, tools)
            assert '"name": "f"' in tokenizer.render_chat(messages, **options).replace("'", '"')


def test_answers_get_ids_of_the_form_that_the_template_demands():
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for template, length in (("mistral", 9), ("qwen3", 29)):
        with served(template, tool_call_parser="hermes") as (model_format, _):
            [start, _] = read(model_format, "", text, parse_tools(TOOLS))
            assert len(start.call_id) == length
