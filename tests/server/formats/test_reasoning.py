"""The reasoning parser on whole texts and on every way to cut them in three."""

from __future__ import annotations

import pytest

from runtime.errors import ConfigError
from server.formats.reasoning import REASONING_FAMILIES, ReasoningParser, reasoning_family

# (family, end of the prompt, text, reasoning, answer)
CASES = [
    ("qwen3", "", "<think>\nhm a<b </thin\n</think>\n\nYes. <think>x</think>",
     "hm a<b </thin", "Yes. <think>x</think>"),
    ("qwen3", "assistant\n<think>\n", "hm</think>ok", "hm", "ok"),
    ("qwen3", "", "plain  answer ", "", "plain  answer "),
    ("qwen3", "", "  plain", "", "  plain"),
    ("qwen3", "", "<think>cut off \n", "cut off", ""),
    ("qwen3", "", "<think>\n\n</think>\n\nok", "", "ok"),
    ("qwen3", "", "<thi", "", "<thi"),
    ("qwen3", "", "", "", ""),
    ("deepseek_r1", "", "hm</think>ok", "hm", "ok"),
    ("deepseek_r1", "", "<think>hm</think>ok", "hm", "ok"),
    ("deepseek_r1", "", "\nhm \n</think>\n", "hm", ""),
    ("mistral", "", "[THINK]a[/THINK]b", "a", "b"),
    ("kimi", "", "◁think▷a◁/think▷b", "a", "b"),
    ("qwen3", "assistant\n<think>\n\n</think>\n\n", "plain", "", "plain"),
    ("deepseek_r1", "assistant\n<think>\n\n</think>\n\n", "plain <think>", "", "plain <think>"),
    ("deepseek_r1", "<think></think>", "\n\nplain", "", "plain"),
    ("kimi", "◁think▷◁/think▷", "plain", "", "plain"),
]  # fmt: skip


# (family, beginning of the answer that the text goes on from, text, reasoning, answer)
GOING_ON = [
    ("qwen3", "<think>\nI s", "ee</think>\n\nYes", "ee", "Yes"),
    ("qwen3", "<think>\n", "\n I see</think>Yes", "I see", "Yes"),
    ("qwen3", "<think>so", " far</think>Yes", " far", "Yes"),
    ("qwen3", "<think>a</think>", "\n\nYes", "", "Yes"),
    ("qwen3", "<think>a</think>\n\nYes", " no", "", " no"),
    ("deepseek_r1", "The answer", " is <think>", "", " is <think>"),
    ("qwen3", "The answer", "<think>x</think>", "", "<think>x</think>"),
]


def split(family, prompt, pieces, begun=""):
    parser = ReasoningParser(REASONING_FAMILIES[family], prompt, begun)
    found = [*map(parser.feed, pieces), parser.finish()]
    return "".join(reasoning for reasoning, _ in found), "".join(answer for _, answer in found)


@pytest.mark.parametrize(("family", "prompt", "text", "reasoning", "answer"), CASES)
def test_every_cut_gives_the_same(family, prompt, text, reasoning, answer):
    assert split(family, prompt, [text]) == (reasoning, answer)
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            pieces = [text[:i], text[i:j], text[j:]]
            assert split(family, prompt, pieces) == (reasoning, answer), pieces


@pytest.mark.parametrize(("family", "begun", "text", "reasoning", "answer"), GOING_ON)
def test_an_answer_goes_on_where_its_beginning_ended(family, begun, text, reasoning, answer):
    for i in range(len(text) + 1):
        pieces = [text[:i], text[i:]]
        assert split(family, "assistant\n" + begun, pieces, begun) == (reasoning, answer), pieces


def test_reasoning_is_given_as_it_comes():
    parser = ReasoningParser(REASONING_FAMILIES["qwen3"])
    assert parser.feed("<think>on") == ("on", "")
    assert parser.feed("e two</") == ("e two", "")
    assert parser.feed("three") == ("</three", "")
    assert parser.feed("</think>A") == ("", "A")


def test_unknown_family_is_refused_with_the_known_ones():
    assert reasoning_family(None) is None
    with pytest.raises(ConfigError, match=r"'nope'.*qwen3"):
        reasoning_family("nope")
