"""The server's app over a simulated model that says what its prompt tells it to.

A prompt that holds SAY[text]SAY is answered with the text of its last such mark, byte by byte, then
an end-of-sequence token; any other prompt is answered with "ok".
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anthropic
import openai
import tokenizers
from aiohttp import web
from tokenizers import decoders, models, pre_tokenizers

from runtime.config import SchedulerConfig
from runtime.scheduling.scheduler import Scheduler
from runtime.simulation.sim_runner import SimRunner
from server.app import make_app
from server.args import ServerConfig
from server.chat_template import ChatTemplate
from server.launcher import Parts, make_service
from server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.request import Request

MODEL = "sim"
EOS = 258
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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


def byte_tokenizer(template: str | None = CHATML) -> Tokenizer:
    """One token per byte, and three special tokens; ids of bytes are those of ByteLevel's order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]"])
    assert backend.token_to_id("<|im_end|>") == EOS
    chat = None if template is None else ChatTemplate({"default": template}, {})
    return Tokenizer(backend, chat_template=chat, eos_token_ids=frozenset({EOS}))


class SayingModel:
    """The script of the simulated model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answers: dict[str, list[int]] = {}

    def __call__(self, request: Request, index: int) -> int:
        answer = self._answers.get(request.request_id)
        if answer is None:
            answer = self._answers[request.request_id] = self._answer(request)
        return answer[index] if index < len(answer) else EOS

    def _answer(self, request: Request) -> list[int]:
        prompt = self._tokenizer.decode(request.input_ids, skip_special_tokens=False)
        _, _, rest = prompt.rpartition("SAY[")
        text = rest.partition("]SAY")[0] if "]SAY" in rest else "ok"
        return [*self._tokenizer.encode(text, add_special_tokens=False), EOS]


class Served:
    """A running server and clients of it."""

    def __init__(self, url: str, model: str = MODEL, api_key: str = "none") -> None:
        self.url = url
        self.model = model
        self.app: web.Application | None = None  # where it runs in this process
        self.openai = openai.OpenAI(base_url=url + "/v1", api_key=api_key, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key=api_key, max_retries=0)

    def close(self) -> None:
        self.openai.close()
        self.anthropic.close()

    def chat(self, content, **fields):
        """A chat completion with one user message (or the messages that are given)."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return self.openai.chat.completions.create(model=self.model, messages=messages, **fields)


@contextmanager
def sim_server(
    template: str | None = CHATML,
    runner_class: type[SimRunner] = SimRunner,
    context_length: int = 4096,
    **options: object,
) -> Iterator[Served]:
    """The app in a thread of its own, on a free port. options: of `ServerConfig`."""
    tokenizer = byte_tokenizer(template)
    runner = runner_class(SayingModel(tokenizer), vocab_size=tokenizer.vocab_size)
    scheduler = Scheduler(
        SchedulerConfig(
            capacity_tokens=runner.info.max_total_tokens,
            context_length=context_length,
            eos_token_ids=frozenset({EOS}),
        )
    )
    started = threading.Event()
    found: list[tuple[str, web.Application]] = []
    stop: list = []

    async def main() -> None:
        parts = Parts(runner=runner, scheduler=scheduler, tokenizer=tokenizer, model_name=MODEL)
        service = make_service(ServerConfig(**options), parts)
        service.engine.start()
        application = make_app(service)
        app = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await app.setup()
        site = web.TCPSite(app, "127.0.0.1", 0)
        await site.start()
        done = asyncio.Event()
        stop.append((asyncio.get_running_loop(), done))
        host, port = app.addresses[0][:2]
        found.append((f"http://{host}:{port}", application))
        started.set()
        await done.wait()
        await service.engine.stop()
        await app.cleanup()
        service.model_format.close()
        tokenizer.close()
        runner.close()

    thread = threading.Thread(target=lambda: asyncio.run(main(), debug=True))
    thread.start()
    assert started.wait(20)
    served = Served(found[0][0])
    served.app = found[0][1]
    try:
        yield served
    finally:
        served.close()
        loop, done = stop[0]
        loop.call_soon_threadsafe(done.set)
        thread.join()
