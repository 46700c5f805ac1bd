"""A model that needs no weights: a byte tokenizer, a chat template, and a server on `SimRunner`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tokenizers
from aiohttp import ClientSession
from tokenizers import decoders, models, pre_tokenizers

from runtime.config import RunnerConfig, SchedulerConfig
from runtime.scheduling.scheduler import Scheduler
from runtime.simulation.sim_runner import SimRunner
from server.app import app_runner, start_listening
from server.config import ServerConfig
from server.generation.params import SamplingDefaults
from server.http.sockets import base_url, listen
from server.service import Parts, Service, make_service
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from runtime.offload.page_store import PageStore
    from runtime.request import Request
    from server.generation.output import Delta, RequestStream

IM_START, IM_END = 256, 257
VOCAB_SIZE = 258
MODEL = "fake"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# A short request to every route that generates.
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 9},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 9}},
}


def byte_tokenizer(chat_template: str | None = CHATML, more: tuple[str, ...] = ()) -> Tokenizer:
    """Token ids 0..255 are bytes, 256 and 257 ChatML's special tokens, then more of such."""
    backend = tokenizers.Tokenizer(models.BPE(_ids_of_bytes(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", *more])
    return Tokenizer(backend, chat_template=_compiled(chat_template) if chat_template else None)


@functools.cache
def _compiled(chat_template: str) -> ChatTemplate:
    return ChatTemplate({"default": chat_template}, {})


@functools.cache
def _ids_of_bytes() -> dict[str, int]:
    """The byte of each character of GPT-2's alphabet: plain ones are themselves, the others follow
    from U+0100 in order."""
    others = [b for b in range(256) if not (0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE)]
    codes = {ord(character): character for character in pre_tokenizers.ByteLevel.alphabet()}
    return {
        character: others[code - 256] if code >= 256 else code for code, character in codes.items()
    }


def says(text: str) -> Callable[[Request, int], int]:
    """A script: every request gets this text, then the end of the turn."""
    ids = [*text.encode(), IM_END]
    return lambda request, index: ids[min(index, len(ids) - 1)]


def counts(request: Request, index: int) -> int:
    """A script: letters that depend on the prompt and the index, for ever."""
    start = sum(request.input_ids) % 26
    return ord("a") + (start + index) % 26


@dataclass
class FakeServer:
    """A running server and a client for it."""

    url: str
    service: Service
    runner: SimRunner
    client: ClientSession

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        async with self.client.post(self.url + path, json=body, **options) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.client.get(self.url + path, **options) as answer:
            return answer.status, await answer.json()

    async def complete(self, prompt: Any = "hello", **fields: Any) -> Any:
        """The body of a completion that must succeed."""
        status, body = await self.post("/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, body
        return body

    async def chat(self, messages: Any = "hello", **fields: Any) -> Any:
        """The body of a chat completion that must succeed."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        status, body = await self.post("/v1/chat/completions", {"messages": messages, **fields})
        assert status == 200, body
        return body

    async def events(self, path: str, body: Any) -> list[str]:
        """The data of every event of a stream, in order, without what keeps it alive."""
        async with self.client.post(self.url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            raw = (await answer.read()).decode()
        told = [line for line in raw.split("\n\n") if line and not line.startswith(":")]
        return [line.removeprefix("data: ") for line in told]

    async def wait_idle(self) -> None:
        """Returns when nothing is alive and nothing in flight; the books must then be right."""
        scheduler = self.service.engine.scheduler
        async with asyncio.timeout(30):
            # No event says "idle": whatever the server has to do is done between two turns.
            while scheduler.has_unfinished or self.service.generator.live:  # noqa: ASYNC110
                await asyncio.sleep(0)
        scheduler.check()
        found = scheduler.statistics()
        assert found.private_tokens == 0
        assert found.protected_tokens == 0, "a lock is held"
        assert found.free_tokens + found.cached_tokens + found.reserved_tokens == (
            found.capacity_tokens
        )
        assert found.free_rows == scheduler.config.max_running_requests


def live(service: Service) -> int:
    """Choices that a client waits for."""
    return len(service.engine.delivery.live)


async def deltas_of(stream: RequestStream) -> AsyncIterator[Delta]:
    """Every delta until all choices have ended."""
    while news := await stream.take():
        for delta in news:
            yield delta


def make_fake_service(
    runner: SimRunner | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    scheduler: dict[str, Any] | None = None,
    context_length: int = 2048,
    defaults: SamplingDefaults | None = None,
    device: RunnerConfig | None = None,
    tier: PageStore | None = None,
    **options: Any,
) -> Service:
    """A service on a simulated runner. scheduler, options: fields of the two configs."""
    runner = runner or fake_runner()
    tokenizer = tokenizer or byte_tokenizer()
    config = SchedulerConfig(
        capacity_tokens=runner.info.max_total_tokens,
        context_length=context_length,
        eos_token_ids=frozenset({IM_END}),
        **{"max_running_requests": 16, "chunked_prefill_size": 64, **(scheduler or {})},
    )
    server_config = ServerConfig(runner=device or RunnerConfig(), port=0, **options)
    defaults = defaults or SamplingDefaults()
    parts = Parts(runner, Scheduler(config), tokenizer, MODEL, defaults, tier=tier)
    return make_service(server_config, parts)


def fake_runner(script: Callable[[Request, int], int] = counts, **options: Any) -> SimRunner:
    return SimRunner(script, vocab_size=VOCAB_SIZE, **options)


@contextlib.asynccontextmanager
async def fake_server(
    service: Service | None = None, *, tls: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[FakeServer]:
    """A server on a free port, and a client. options: of `make_fake_service`."""
    service = service or make_fake_service(**options)
    service.engine.start()
    runner = app_runner(service)
    await runner.setup()
    (sock,) = listen("127.0.0.1", 0)
    url = base_url([sock], tls=tls is not None)
    (listener,) = await start_listening(service, runner, [sock], tls)
    simulated = service.engine.runner
    assert isinstance(simulated, SimRunner)
    try:
        async with ClientSession() as client:
            yield FakeServer(url, service, simulated, client)
    finally:
        await service.engine.stop()
        listener.close()
        await runner.cleanup()
        service.end_traces()
        service.model_format.close()
        service.tokenizer.close()
        simulated.close()
