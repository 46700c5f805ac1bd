"""Lines of system messages that are told at the end instead."""

from __future__ import annotations

import pytest

from runtime.errors import ConfigError
from server.config import ServerConfig
from server.formats.volatile_lines import VolatileLines

LINES = VolatileLines(["Current time: .*", r"Working dir(ectory)?: \S+"])
SYSTEM = {"role": "system", "content": "Be brief.\nCurrent time: 12:01\nUse tools."}
USER = {"role": "user", "content": "Hi"}


def test_a_line_is_moved_behind_the_conversation_word_for_word():
    system, user = LINES.moved([SYSTEM, USER])
    assert system == {"role": "system", "content": "Be brief.\nUse tools."}
    told = "<system-reminder>\nCurrent time: 12:01\n</system-reminder>"
    assert user == {"role": "user", "content": f"Hi\n\n{told}"}
    assert SYSTEM["content"].count("\n") == 2, "the client's own is left as it is"


def test_lines_keep_their_order_and_come_from_every_leading_system_message():
    other = {"role": "system", "content": "Working directory: /a\nWorking dir: /b"}
    result = {"role": "tool", "content": "done", "tool_call_id": "1"}
    first, second, *_, last = LINES.moved([SYSTEM, other, USER, result])
    assert (first["content"], second["content"]) == ("Be brief.\nUse tools.", "")
    lines = ["Current time: 12:01", "Working directory: /a", "Working dir: /b"]
    assert last["content"].split("\n")[3:-1] == lines
    assert last["tool_call_id"] == "1"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "It is not Current time: 12:01"}, USER],
        [USER, SYSTEM, USER],
        [SYSTEM],
        [SYSTEM, USER, {"role": "assistant", "content": "I"}],
        [{"role": "user", "content": "Current time: 12:01"}],
    ],
    ids=["part of a line", "in between", "alone", "gone on from", "said by the user"],
)
def test_other_text_stays_where_it_is(messages):
    assert list(LINES.moved(messages)) == messages


def test_without_expressions_nothing_is_looked_at():
    messages = [SYSTEM, USER]
    assert VolatileLines().moved(messages) is messages


def test_a_line_is_matched_in_linear_time():
    lines = VolatileLines(["(a*)*(a*)*(a*)*b"])
    messages = [{"role": "system", "content": "a" * 50_000}, USER]
    assert lines.moved(messages) is messages


@pytest.mark.parametrize("wrong", ["(", "(?=a)", r"(a)\1"])
def test_a_wrong_expression_is_refused_at_the_start(wrong):
    with pytest.raises(ConfigError, match=r"volatile_line .*no regular expression"):
        ServerConfig(volatile_line=(wrong,))
