"""A generation's answer on its way to the client: one body, or events as they come."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from runtime.errors import wrong
from server.generation.timeline import TIMED_LAPS
from server.http.errors import error_answer, internal_error
from server.http.heartbeat import heartbeat
from server.http.sse import DONE, EventStream, event
from server.service import GENERATION, RECEIVED, REQUEST_ID, SERVICE, json_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiohttp import web

    from runtime.request import Finish
    from server.generation.generator import Generation, Usage
    from server.generation.output import Delta
    from server.generation.params import GenerationParams
    from server.http.errors import ErrorAnswer
    from server.service import Service

    NewAnswer = Callable[[Generation], "Answer"]
    Begin = Callable[[], Awaitable[tuple[Generation, NewAnswer]]]

TIMINGS_HEADER = "X-Loomserve-Timings"


@dataclass(frozen=True, slots=True)
class StreamForm:
    """What a protocol's streams hold beside the events of their answers.

    Args:
        refusal: the event of an error that comes before there is an answer.
        keep_alive: bytes that clients skip, for proxies that give up on silent streams.
    """

    refusal: Callable[[ErrorAnswer], bytes]
    keep_alive: bytes = b": keep-alive\n\n"


OPENAI = StreamForm(refusal=lambda error: event(error.body))


class Answer(ABC):
    """What an endpoint makes of a generation's deltas.

    Attributes: id, created, model: as most protocols name the answer, its second and its model.
    """

    def __init__(self, generation: Generation, service: Service) -> None:
        self.generation = generation
        self.id = generation.request_id
        self.created = int(time.time())
        self.model = service.limits.model

    @abstractmethod
    def events(self, delta: Delta) -> bytes:
        """The bytes of the events that a delta makes."""

    @abstractmethod
    def closing(self) -> bytes:
        """The events that end the stream."""

    def failure(self, error: ErrorAnswer) -> bytes:
        """The event that ends a stream which cannot go on."""
        return event(error.body)

    def progress(self, told: dict[str, Any]) -> bytes:
        """An event before the first token that says how far it is."""
        return event({"progress": told})

    def timings(self) -> dict[str, Any]:
        """What the end of an answer says of its time, where that was asked for."""
        if not self.generation.params.include_timings:
            return {}
        return {"timings": asdict(self.generation.timings())}

    @abstractmethod
    def add(self, delta: Delta) -> None:
        """Takes a delta of an answer that is not streamed."""

    @abstractmethod
    def body(self) -> Any:
        """The whole answer, once every choice has ended."""


class OpenAIAnswer(Answer):
    """An answer of the older two OpenAI endpoints: every body and event is a list of choices.

    Attributes: object: what a body calls itself; event_object: what an event does.
    """

    object: ClassVar[str]
    event_object: ClassVar[str]

    def of_choices(self, choices: list[dict[str, Any]], object: str, **more: Any) -> dict[str, Any]:
        """A body or an event."""
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def progress(self, told: dict[str, Any]) -> bytes:
        return event(self.of_choices([], self.event_object, progress=told))

    def closing(self) -> bytes:
        figures = self.figures(usage=self.generation.params.include_usage)
        return event(self.of_choices([], self.event_object, **figures)) + DONE if figures else DONE

    def figures(self, *, usage: bool) -> dict[str, Any]:
        """What stands beside the choices at the end. usage: it is told, too."""
        told = {"usage": usage_body(self.generation.usage())} if usage else {}
        return told | self.timings()


def usage_body(usage: Usage) -> dict[str, Any]:
    """The usage as the older two OpenAI endpoints tell it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.kept_tokens,
        },
        **usage.waited(),
    }


def finish_name(finish: Finish | None, called_tools: bool = False) -> str | None:
    """Why a choice has ended, as the older two OpenAI endpoints tell it."""
    if finish is None:
        return None
    return "tool_calls" if called_tools and finish.reason.value == "stop" else finish.reason.value


def new_id(prefix: str) -> str:
    """An id of the server's own making, such as chatcmpl-0f3a..."""
    return f"{prefix}-{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class Planned:
    """A request that is read, tokenized and checked: ready to be queued."""

    prompts: Sequence[list[int]]
    params: GenerationParams
    new_answer: NewAnswer


async def answer(
    request: web.Request,
    plan: Callable[[], Awaitable[Planned]],
    *,
    stream: bool,
    prefix: str,
    client_id: str | None,
    form: StreamForm = OPENAI,
) -> web.StreamResponse:
    """Generates, and answers with a body or, where the request asked so, with events as they come.

    A client that leaves cancels this, which aborts what still runs.

    Args:
        plan: does what is to be done before it can be queued, which may take a while.
        prefix: of the answer's id.
        client_id: a name that the body gives; else it is the request's own.

    Raises: InvalidRequest: a header. What `plan` and `Generator.start` do, and what goes wrong
        before the first byte of a stream, or with a whole answer.
    """
    timed = wants_timings(request)

    async def begin() -> tuple[Generation, NewAnswer]:
        planned = await plan()
        params = replace(planned.params, include_timings=True) if timed else planned.params
        generation = request.app[SERVICE].generator.start(
            planned.prompts,
            params,
            new_id(prefix),
            client_id or request[REQUEST_ID],
            received_s=request[RECEIVED],
        )
        request[GENERATION] = generation
        return generation, planned.new_answer

    return await (_stream(request, begin, form) if stream else _whole(request, begin))


def wants_timings(request: web.Request) -> bool:
    """Whether a header asks for timings. Raises: InvalidRequest: it says neither yes nor no."""
    given = request.headers.get(TIMINGS_HEADER)
    if given is None:
        return False
    if given not in ("0", "1"):
        raise wrong(TIMINGS_HEADER, given, "0 or 1")
    return given == "1"


async def _whole(request: web.Request, begin: Begin) -> web.StreamResponse:
    clock = request.app[SERVICE].engine.clock
    generation, new_answer = await begin()
    with generation:
        made = new_answer(generation)
        async for news in generation:
            for delta in news:
                made.add(delta)
        begun = clock()
        body = made.body()
        await asyncio.sleep(0)  # each of the two may take a while
        response = json_response(body)
        generation.writes.add(begun, clock())
        return response


async def _stream(request: web.Request, begin: Begin, form: StreamForm) -> web.StreamResponse:
    """Events as they come. The headers go out when the request is queued; where it is still
    tokenized or its grammar compiled, they wait for that or a little while (see heartbeat.py);
    without keep-alives, for the first token. What fails later is told by an event."""
    service = request.app[SERVICE]
    out = EventStream(request, service.config.slow_reader_timeout)
    told = _Telling(service, out, form)
    try:
        async with heartbeat(out, service.config.sse_keepalive, told.still_there):
            try:
                await told.all_of(*await begin())
            except ConnectionError:
                raise
            except Exception as error:
                if not out.started:
                    raise
                # Clients must not take the stream for complete.
                await out.send(told.failure(_known_error(request, error)))
        return await out.end()
    except ConnectionError:
        return out.response  # nobody is there to be told; leaving aborts what still runs


class _Telling:
    """What one stream tells its client."""

    def __init__(self, service: Service, out: EventStream, form: StreamForm) -> None:
        self._service = service
        self._out = out
        self._form = form
        self._made: Answer | None = None  # once it is queued
        self._said = False  # something of the answer

    async def all_of(self, generation: Generation, new_answer: NewAnswer) -> None:
        """The answer from its first event to its last. Raises: what the generation does."""
        engine, out = self._service.engine, self._out
        with generation:
            self._made = made = new_answer(generation)
            if generation.ready:
                if self._service.config.sse_keepalive:
                    await out.open()
                if generation.params.include_progress:
                    await out.send(self.still_there())
            async for news in generation:
                self._said = True
                if engine.delivery.timed and not generation.reads & TIMED_LAPS:
                    begun = engine.clock()
                    await out.send(b"".join([made.events(delta) for delta in news]))
                    generation.writes.add(begun, engine.clock())
                else:
                    await out.send(b"".join([made.events(delta) for delta in news]))
            await out.send(made.closing())

    def still_there(self) -> bytes:
        """Something for a client that has waited for news: it, and proxies, know that there is
        more to come."""
        made = self._made
        if made is None or self._said or not made.generation.params.include_progress:
            return self._form.keep_alive
        return made.progress(asdict(self._service.progress.of(made.generation)))

    def failure(self, error: ErrorAnswer) -> bytes:
        """The event that ends the stream early."""
        if not self._said:
            self._service.metrics.refused(error.status)
        return self._form.refusal(error) if self._made is None else self._made.failure(error)


def _known_error(request: web.Request, error: Exception) -> ErrorAnswer:
    found = error_answer(error)
    if found is None:
        request.app.logger.error("a stream failed", exc_info=error)
        found = internal_error()
    return found
