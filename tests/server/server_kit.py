"""Official clients of a server whose simulated model says what its prompt tells it to.

A prompt that holds SAY[text]SAY is answered with the text of its last such mark, byte by byte, then
an end-of-sequence token; any other prompt is answered with "ok".
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anthropic
import openai

from runtime.simulation.sim_runner import SimRunner
from server.service import Service
from tests import effort
from tests.fakes import CHATML, IM_END, MODEL, byte_tokenizer, fake_server, make_fake_service

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from runtime.request import Request
    from runtime.simulation.sim_runner import Script

# A special token with which a call begins.
MARKER = "[TOOL_CALLS]"
# As Qwen's: tools in the system message, calls and results as such.
CHATML_TOOLS = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    " {{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def say(text: str) -> str:
    """A prompt that is answered with this text."""
    return f"SAY[{text}]SAY"


def say_what_is_asked(request: Request, index: int) -> int:
    """The script of the simulated model: token ids of bytes are the bytes."""
    prompt = bytes(token if token < 256 else 0 for token in request.input_ids)
    _, _, rest = prompt.rpartition(b"SAY[")
    answer = rest.partition(b"]SAY")[0] if b"]SAY" in rest else b"ok"
    return answer[index] if index < len(answer) else IM_END


class Served:
    """A running server and clients of it."""

    service: Service  # of a server in this process

    def __init__(self, url: str, model: str = MODEL, api_key: str = "none") -> None:
        self.url = url
        self.model = model
        self.openai = openai.OpenAI(base_url=url + "/v1", api_key=api_key, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key=api_key, max_retries=0)

    def close(self) -> None:
        self.openai.close()
        self.anthropic.close()

    def chat(self, content, **fields):
        """A chat completion with one user message (or the messages that are given)."""
        messages: Any = (
            [{"role": "user", "content": content}] if isinstance(content, str) else content
        )
        return self.openai.chat.completions.create(model=self.model, messages=messages, **fields)


def error_body(error: openai.APIError | anthropic.APIError) -> dict[str, Any]:
    """The JSON that a client's exception was made from."""
    assert isinstance(error.body, dict)
    return error.body


@contextmanager
def sim_server(
    template: str | None = CHATML,
    runner_class: type[SimRunner] = SimRunner,
    *,
    script: Script = say_what_is_asked,
    runner_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Served]:
    """A server in a thread of its own, since the clients block.

    Args: script, runner_options: of its runner. options: of its service.
    """
    tokenizer = byte_tokenizer(template, (MARKER,))
    runner = runner_class(script, vocab_size=tokenizer.vocab_size, **(runner_options or {}))
    started = threading.Event()
    shared: dict[str, Any] = {}

    async def main() -> None:
        service = make_fake_service(runner, tokenizer, **{"context_length": 4096, **options})
        shared["loop"], shared["end"] = asyncio.get_running_loop(), asyncio.Event()
        async with fake_server(service) as server:
            shared["url"], shared["service"] = server.url, service
            started.set()
            await shared["end"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(main(), debug=not effort.fast))
    thread.start()
    assert started.wait(20)
    served = Served(shared["url"])
    served.service = shared["service"]
    try:
        yield served
    finally:
        served.close()
        shared["loop"].call_soon_threadsafe(shared["end"].set)
        thread.join()
