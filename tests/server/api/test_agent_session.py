"""A coding agent's session of thirty turns through the official clients, others filling the cache
between its turns: what the server has computed of it once it does not compute again."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.fakes import IM_END
from tests.server.server_kit import CHATML_TOOLS, sim_server

TURNS = 30
POOL = 18_000  # tokens; a session has 12,000 at its end, and others bring 18,500 between its turns
SYSTEM = "You are a coding agent. Edit files with the tools. " * 50
BILLING = "x-anthropic-billing-header: cc_version=2.1.{0}; cc_entrypoint=cli; cch={0:05};"
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "old": {"type": "string"},
        "new": {"type": "string"},
    },
    "required": ["path", "old", "new"],
}
TOOLS = {"edit_file": "Replaces a text in a file. " * 10, "read_file": "Shows a file. " * 10}


class Script:
    """The model edits a file in each turn; asked by others it says nothing."""

    def __init__(self):
        self.turn = 0

    def answer(self) -> bytes:
        name = "edit_file" if self.turn % 3 else "read_file"
        edit = {"path": f"src/{self.turn}.py", "old": "a" * 40, "new": f"b{self.turn}" * 20}
        call = json.dumps({"name": name, "arguments": edit})
        return f"Next.\n<tool_call>\n{call}\n</tool_call>".encode()

    def __call__(self, request, index: int) -> int:
        if request.sampling.max_new_tokens == 1:
            return IM_END
        answer = self.answer()
        return answer[index] if index < len(answer) else IM_END


class Session:
    """Served turn by turn. share: of all prompt tokens, those of the prompt before that a turn did
    not find in the cache."""

    def __init__(self, served, script):
        self.served, self.script = served, script
        self.prompts = self.again = self.before = 0

    def run(self, turns: int = TURNS) -> float:
        for turn in range(turns):
            self.script.turn = turn
            total, cached = self.take_turn(turn)
            self.again += max(0, self.before - cached)
            self.prompts += total
            self.before = total
            self.others(turn)
        return self.again / self.prompts

    def take_turn(self, turn: int) -> tuple[int, int]:
        raise NotImplementedError

    def others(self, turn: int) -> None:
        """Prompts that nobody sends again, together larger than what the session leaves free."""
        for number in range(5):
            first = chr(ord("A") + turn % 26) + chr(ord("a") + number)
            self.served.openai.completions.create(
                model=self.served.model, prompt=f"{first}{turn}" + "x" * 3700, max_tokens=1
            )


class AnthropicSession(Session):
    """As Claude Code talks: a billing header, a breakpoint in the newest message."""

    kept = True

    def __init__(self, served, script):
        super().__init__(served, script)
        self.messages: Any = [{"role": "user", "content": "Rename a to b everywhere."}]

    def take_turn(self, turn):
        control = {"cache_control": {"type": "ephemeral"}} if self.kept else {}
        system: Any = [
            {"type": "text", "text": BILLING.format(turn)},
            {"type": "text", "text": SYSTEM, **control},
        ]
        tools = [
            {"name": name, "description": told, "input_schema": SCHEMA}
            for name, told in TOOLS.items()
        ]
        *earlier, last = self.messages
        last = self.with_breakpoint(last, control)
        with self.served.anthropic.messages.stream(
            model=self.served.model, max_tokens=400, system=system, tools=tools,
            messages=[*earlier, last],
        ) as stream:  # fmt: skip
            answer = stream.get_final_message()
        assert answer.stop_reason == "tool_use"
        use = answer.content[-1]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": f"done {turn} " * 15}
        said = [block.to_dict() for block in answer.content]
        self.messages.append({"role": "assistant", "content": said})
        self.messages.append({"role": "user", "content": [result]})
        usage = answer.usage
        read = usage.cache_read_input_tokens
        return usage.input_tokens + read + usage.cache_creation_input_tokens, read

    def with_breakpoint(self, message, control):
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        return {**message, "content": [*content[:-1], {**content[-1], **control}]}


class UnkeptSession(AnthropicSession):
    kept = False


class OpenAISession(Session):
    """A clock in the system message, and a key for the session."""

    def __init__(self, served, script):
        super().__init__(served, script)
        self.messages: Any = [{"role": "user", "content": "Rename a to b everywhere."}]

    def take_turn(self, turn):
        system = f"Current time: 12:{turn:02}:{turn * 7 % 60:02}\n{SYSTEM}"
        tools = [
            {
                "type": "function",
                "function": {"name": name, "description": told, "parameters": SCHEMA},
            }
            for name, told in TOOLS.items()
        ]
        answer = self.served.openai.chat.completions.create(
            model=self.served.model, max_completion_tokens=400, tools=tools,
            messages=[{"role": "system", "content": system}, *self.messages],
            prompt_cache_key="session-1",
        )  # fmt: skip
        message = answer.choices[0].message
        self.messages.append(message.to_dict())
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": f"done {turn} " * 15}
        self.messages.append(result)
        return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens


@pytest.fixture
def run():
    """Runs a session on a server of its own; gives the server's figures too."""

    def run(kind, turns=TURNS, **options):
        script = Script()
        with sim_server(
            CHATML_TOOLS,
            script=script,
            runner_options={"max_total_tokens": POOL},
            context_length=POOL - 1000,
            scheduler={"chunked_prefill_size": 1024, "pin_share": 0.8},
            **options,
        ) as served:
            session = kind(served, script)
            share = session.run(turns)
            return share, session, served.openai.get(served.url + "/metrics", cast_to=str)

    return run


@pytest.mark.slow
def test_an_anthropic_session_computes_little_again(run):
    share, session, figures = run(AnthropicSession)
    assert share <= 0.05
    assert session.prompts > 200_000
    assert _figure(figures, "loomserve:pinned_evicted_tokens_total") == 0
    # Of each turn but the first the hit rate is a figure, whoever's turn it was.
    assert _figure(figures, "loomserve:conversation_hit_rate_count") == TURNS - 1
    assert _figure(figures, "loomserve:conversation_hit_rate_sum") / (TURNS - 1) > 0.9


@pytest.mark.slow
def test_an_openai_session_with_a_clock_computes_little_again(run):
    share, session, _ = run(OpenAISession, volatile_line=("Current time: .*",))
    assert share <= 0.05
    assert session.prompts > 200_000


@pytest.mark.slow
def test_what_is_not_kept_is_computed_again(run):
    """That the sessions above stand in a cache that loses what nobody asked to be kept."""
    share, _, _ = run(UnkeptSession, turns=5)
    assert share > 0.5


def _figure(figures: str, name: str) -> float:
    found = re.search(rf"^{name}\{{[^}}]*\}} (\S+)$", figures, re.MULTILINE)
    assert found, name
    return float(found[1])
