"""What is found out about templates, each written in the style of a family."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from server.formats.template_traits import TemplateTraits, find_traits
from server.text.chat_template import ChatTemplate
from tests.fakes import CHATML
from tests.server.formats.random_chats import own_templates
from tests.server.server_kit import CHATML_TOOLS

NATIVE = {"tools_in": "variable", "calls": True, "results": True}
# What differs from a template that knows no more than texts and roles.
TRAITS: dict[str, dict[str, Any]] = {
    "llama3": {**NATIVE, "one_call": True},
    "qwen2_5": NATIVE,
    "qwen3": NATIVE,
    "mistral": {**NATIVE, "nine_character_ids": True},
    "gemma": {"system": False},
    "gemma3": {},
    "phi3": {},
    "phi4_mini": {
        "tools_in": "system",
        "tools_as_json": True,
        "results": True,
    },
    "smollm3": {"tools_in": "variable", "tools_variable": "xml_tools", "results": True},
    "granite": {"tools_in": "variable", "results": True},
    "deepseek_r1": {
        "calls": True,
        "results": True,
        "arguments_as_json": True,
        "empty_content": None,
    },
    "parts_only": {"parts": True, "results": True},
    "hermes": NATIVE,
}


@pytest.mark.parametrize("model", own_templates())
def test_traits_of_each_family(model):
    template = ChatTemplate(own_templates()[model], {"bos_token": "<s>", "eos_token": "</s>"})
    found = find_traits(template, tools=True)
    expected = dataclasses.replace(TemplateTraits(), **TRAITS[model])
    assert found == expected


def test_a_model_with_two_templates_has_traits_of_each():
    template = ChatTemplate(own_templates()["hermes"], {"bos_token": "<s>"})
    assert find_traits(template, tools=True).calls
    assert not find_traits(template, tools=False).calls


@pytest.mark.parametrize(
    ("source", "tools_in"),
    [
        pytest.param(CHATML, "text", id="none"),
        pytest.param(CHATML_TOOLS, "variable", id="variable"),
        pytest.param("{# reads no tools #}" + CHATML, "text", id="only-named-in-a-comment"),
        pytest.param(
            "{% if functions %}{{ functions | tojson }}{% endif %}" + CHATML,
            "variable",
            id="other-variable",
        ),
        pytest.param(
            "{% if messages[0].role != 'system' %}{{ tools }}{% endif %}" + CHATML,
            "text",
            id="dropped-beside-a-system-message",
        ),
        pytest.param(
            "{% for m in messages %}{% if m.role == 'system' %}{{ m.content ~ tools }}"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "variable",
            id="only-with-a-system-message",
        ),
    ],
)
def test_where_a_template_reads_the_tools(source, tools_in):
    assert find_traits(ChatTemplate({"default": source}, {}), tools=True).tools_in == tools_in


def test_a_template_that_refuses_everything_has_no_traits():
    template = ChatTemplate({"default": "{{ raise_exception('no') }}"}, {})
    assert find_traits(template, tools=True) == TemplateTraits(system=False)
