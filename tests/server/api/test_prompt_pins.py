"""What clients ask to be kept of a prompt, in every protocol: what is pinned, and what usage tells.

Tokens are bytes, and the names of roles' marks one token each, so every length can be counted.
"""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from runtime.request import PromptPin
from runtime.simulation.sim_runner import SimRunner
from tests.server.server_kit import CHATML_TOOLS, say, sim_server

SYSTEM, QUESTION = "Be brief. " * 20, say("ok") + "y" * 60
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
TOOL: Any = {"name": "f", "input_schema": {"type": "object"}}
# <|im_start|>system\n...<|im_end|>\n<|im_start|>user\n
BEFORE_QUESTION = 1 + len("system\n") + len(SYSTEM) + 1 + 1 + 1 + len("user\n")
WHOLE = BEFORE_QUESTION + len(QUESTION) + 1 + 1 + 1 + len("assistant\n")


class SeeingRunner(SimRunner):
    """Keeps the requests that it has computed something of."""

    def launch(self, batch):
        self.seen = {*getattr(self, "seen", ()), *batch.requests}
        return super().launch(batch)


@pytest.fixture(scope="module")
def served():
    with sim_server(runner_class=SeeingRunner) as server:
        yield server


def pins_of(served, ask):
    """The pins of the request that `ask` makes."""
    runner = served.service.engine.runner
    runner.seen = set()
    ask()
    (request,) = runner.seen
    return request.pins


def text(content, **more):
    return {"type": "text", "text": content, **more}


def messages(served, system=SYSTEM, content=QUESTION, **fields):
    return served.anthropic.messages.create(
        model=served.model, max_tokens=20, system=system,
        messages=[{"role": "user", "content": content}], **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "pins"),
    [
        ({}, []),
        ({"system": [text(SYSTEM, cache_control=SHORT)]}, [PromptPin(BEFORE_QUESTION, 300.0)]),
        ({"content": [text(QUESTION, cache_control=LONG)]}, [PromptPin(WHOLE, 3600.0)]),
        ({"cache_control": SHORT}, [PromptPin(WHOLE, 300.0)]),
        (
            {"system": [text(SYSTEM, cache_control=LONG)], "cache_control": SHORT},
            [PromptPin(BEFORE_QUESTION, 3600.0), PromptPin(WHOLE, 300.0)],
        ),
        (
            {"system": [text(SYSTEM, cache_control=SHORT)], "cache_control": LONG},
            [PromptPin(WHOLE, 3600.0)],
        ),
        (
            {"system": [text(SYSTEM[:40], cache_control=SHORT), text(SYSTEM[40:])]},
            [PromptPin(BEFORE_QUESTION, 300.0)],
        ),
    ],
    ids=["none", "system", "message", "whole", "two times", "covered", "end of its message"],
)
def test_anthropic_s_breakpoints(served, fields, pins):
    assert pins_of(served, lambda: messages(served, **fields)) == tuple(pins)


def test_a_tool_s_breakpoint_keeps_what_stands_before_the_conversation():
    with sim_server(CHATML_TOOLS, SeeingRunner) as served:
        tools = [TOOL, {**TOOL, "name": "g", "cache_control": SHORT}]
        (pin,) = pins_of(served, lambda: messages(served, tools=tools))
        count = served.anthropic.messages.count_tokens
        asked: Any = {"model": served.model, "messages": [{"role": "user", "content": QUESTION}]}
        total = count(**asked, system=SYSTEM, tools=tools).input_tokens
    assert pin == PromptPin(total - (WHOLE - BEFORE_QUESTION), 300.0)


def test_a_breakpoint_in_the_middle_of_a_conversation(served):
    result = {"type": "tool_result", "tool_use_id": "1", "content": "r" * 30}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    history = [
        {"role": "user", "content": [text("a" * 50, cache_control=SHORT)]},
        {"role": "assistant", "content": [text("b" * 50), use]},
        {"role": "user", "content": [{**result, "cache_control": LONG}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": say("ok")},
    ]

    def ask(messages=history):
        return served.anthropic.messages.create(
            model=served.model, max_tokens=20, messages=messages, tools=[TOOL]
        )

    (pin,) = pins_of(served, ask)
    assert pin.ttl_s == 3600.0
    served.service.engine.runner.seen = set()
    ask([*history[:3], {"role": "assistant", "content": "Z"}, history[4]])
    (other,) = served.service.engine.runner.seen
    served.service.engine.runner.seen = set()
    ask()
    (same,) = served.service.engine.runner.seen
    assert same.input_ids[: pin.tokens] == other.input_ids[: pin.tokens]
    assert same.input_ids[pin.tokens] != other.input_ids[pin.tokens]


@pytest.mark.parametrize(
    ("system", "content", "fields", "pins"),
    [
        (SYSTEM, QUESTION, {}, []),
        ([text(SYSTEM, cache_control=SHORT)], QUESTION, {}, [PromptPin(BEFORE_QUESTION, 300.0)]),
        (
            SYSTEM,
            [text(QUESTION, prompt_cache_breakpoint={"mode": "explicit"})],
            {},
            [PromptPin(WHOLE, 1800.0)],
        ),
        (SYSTEM, QUESTION, {"prompt_cache_key": "k"}, [PromptPin(WHOLE, 300.0, "k")]),
        (
            SYSTEM,
            QUESTION,
            {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
            [PromptPin(WHOLE, 86400.0, "k")],
        ),
        (SYSTEM, QUESTION, {"prompt_cache_options": {"ttl": "30m"}}, [PromptPin(WHOLE, 1800.0)]),
        (
            [text(SYSTEM, prompt_cache_breakpoint={"mode": "explicit", "ttl": "12h"})],
            QUESTION,
            {"prompt_cache_options": {"mode": "explicit"}, "prompt_cache_key": "k"},
            [PromptPin(BEFORE_QUESTION, 43200.0)],
        ),
        (
            [text(SYSTEM, prompt_cache_breakpoint={"mode": "explicit"})],
            QUESTION,
            {"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}},
            [PromptPin(BEFORE_QUESTION, 43200.0)],
        ),
        (SYSTEM, QUESTION, {"prompt_cache_key": ""}, []),
    ],
)
def test_openai_s_keys_and_breakpoints(served, system, content, fields, pins):
    asked = [{"role": "system", "content": system}, {"role": "user", "content": content}]
    assert pins_of(served, lambda: served.chat(asked, extra_body=fields)) == tuple(pins)
    if isinstance(system, str) and isinstance(content, str):
        body = {"input": content, "instructions": system, "max_output_tokens": 20, **fields}
        response = lambda: served.openai.responses.create(model=served.model, extra_body=body)  # noqa: E731
        assert pins_of(served, response) == tuple(pins)


def test_usage_tells_reads_and_writes_apart_and_adds_up(served):
    asked = {"system": "w" * 400, "cache_control": LONG}
    first = messages(served, **asked).usage
    again = messages(served, **asked).usage
    longer = messages(served, content=QUESTION + "z" * 200, **asked).usage
    total = 1 + len("system\n") + 400 + (WHOLE - BEFORE_QUESTION) + 3 + len("user\n")
    size = 16  # of a page: whole ones are kept
    assert first.cache_read_input_tokens == 0
    assert first.cache_creation_input_tokens == total // size * size
    assert first.input_tokens == total % size
    assert first.cache_creation.ephemeral_1h_input_tokens == total // size * size
    assert first.cache_creation.ephemeral_5m_input_tokens == 0
    assert again.cache_read_input_tokens == (total - 1) // size * size
    assert again.cache_creation_input_tokens == total // size * size - (total - 1) // size * size
    read = longer.cache_read_input_tokens
    assert read > 400
    assert longer.cache_creation_input_tokens == (total + 200) // size * size - read
    assert longer.input_tokens + longer.cache_creation_input_tokens + read == total + 200


def test_a_stream_tells_reads_and_writes_when_it_begins(served):
    with served.anthropic.messages.stream(
        model=served.model, max_tokens=20, cache_control=SHORT,
        messages=[{"role": "user", "content": say("ok") + "s" * 300}],
    ) as stream:  # fmt: skip
        start = next(event for event in stream if event.type == "message_start").message.usage
        end = stream.get_final_message().usage
    assert start.cache_creation_input_tokens == end.cache_creation_input_tokens > 300
    assert start.cache_creation.ephemeral_5m_input_tokens == start.cache_creation_input_tokens
    assert start.input_tokens == end.input_tokens < 16


def test_openai_s_usage_tells_what_was_written(served):
    asked = [{"role": "system", "content": "v" * 320}, {"role": "user", "content": say("ok")}]
    keyed = {"extra_body": {"prompt_cache_key": "usage"}}
    first, again = served.chat(asked, **keyed).usage, served.chat(asked, **keyed).usage
    details = first.prompt_tokens_details
    assert details.cache_write_tokens == first.prompt_tokens // 16 * 16
    assert (details.cached_tokens, again.prompt_tokens_details.cache_write_tokens) == (0, 0)
    unasked = served.chat([{"role": "user", "content": say("ok") + "u" * 90}]).usage
    assert unasked.prompt_tokens_details.cache_write_tokens == 0
    response = served.openai.responses.create(
        model=served.model, input=say("ok") + "t" * 90, prompt_cache_key="other"
    )
    assert response.usage.input_tokens_details.cache_write_tokens > 90


@pytest.mark.parametrize(
    ("control", "where"),
    [
        ({"type": "permanent"}, "cache_control.type"),
        ({"type": "ephemeral", "ttl": "2h"}, "cache_control.ttl"),
        ("yes", "cache_control"),
    ],
)
def test_wrong_breakpoints_are_refused_by_name(served, control, where):
    with pytest.raises(anthropic.BadRequestError, match=rf"system\[0\].{where}"):
        messages(served, system=[text("x", cache_control=control)])
    with pytest.raises(openai.BadRequestError) as caught:
        served.chat([{"role": "user", "content": [text("x", cache_control=control)]}])
    assert caught.value.param == f"messages[0].content[0].{where}"


def test_metrics_tell_what_is_pinned():
    with sim_server() as served:
        messages(served, cache_control=SHORT)
        figures = served.openai.get(served.url + "/metrics", cast_to=str)
    kept = WHOLE // 16 * 16
    assert f'loomserve:kv_pinned_tokens{{model_name="fake"}} {kept}.0' in figures
    assert 'loomserve:pinned_evicted_tokens_total{model_name="fake"} 0.0' in figures


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.{0}; cc_entrypoint=cli; cch={0};"


def prompt_of(served, ask):
    runner = served.service.engine.runner
    runner.seen = set()
    ask()
    (request,) = runner.seen
    return bytes(token if token < 256 else 0 for token in request.input_ids).decode()


def test_the_billing_header_is_no_part_of_the_prompt(served):
    plain = prompt_of(served, lambda: messages(served))
    for number in (1, 2):
        line = BILLING.format(number)
        blocks = [text(line), text(SYSTEM)]
        for system in (blocks, f"{line}\n{SYSTEM}"):
            assert prompt_of(served, lambda s=system: messages(served, system=s)) == plain
    asked: Any = {"model": served.model, "messages": [{"role": "user", "content": QUESTION}]}
    count = served.anthropic.messages.count_tokens
    with_header = count(**asked, system=[text(line), text(SYSTEM)]).input_tokens
    assert with_header == count(**asked, system=SYSTEM).input_tokens == WHOLE


def test_such_text_elsewhere_is_left_as_it_is(served):
    line = BILLING.format(3)
    for fields in (
        {"system": [text(SYSTEM), text(line)]},
        {"system": [text(f"{line}\nIgnore it.")]},
        {"system": f"About\n{line}"},
        {"content": f"{QUESTION}\n{line}"},
    ):
        assert line in prompt_of(served, lambda fields=fields: messages(served, **fields))


def test_a_system_prompt_that_is_the_header_alone_is_none(served):
    line = BILLING.format(4)
    for system in (line, [text(line)]):
        assert "system" not in prompt_of(served, lambda s=system: messages(served, system=s))
