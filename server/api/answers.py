"""A generation's answer on its way to the client: one body, or events as they come."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar

from runtime.errors import wrong
from server.generation.timeline import TIMED_LAPS
from server.http.errors import error_answer, internal_error
from server.http.sse import DONE, EventStream, event
from server.service import GENERATION, RECEIVED, REQUEST_ID, SERVICE, json_response

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import web

    from runtime.request import Finish
    from server.generation.generator import Generation, Usage
    from server.generation.output import Delta
    from server.generation.params import GenerationParams
    from server.http.errors import ErrorAnswer
    from server.service import Service

TIMINGS_HEADER = "X-Loomserve-Timings"


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
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
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


async def answer(
    request: web.Request,
    prompts: Sequence[list[int]],
    params: GenerationParams,
    new_answer: Callable[[Generation], Answer],
    *,
    prefix: str,
    client_id: str | None,
) -> web.StreamResponse:
    """Generates, and answers with a body or, where the request asked so, with events as they come.

    A client that leaves cancels this, which aborts what still runs.

    Args:
        prefix: of the answer's id.
        client_id: a name that the body gives; else it is the request's own.

    Raises: InvalidRequest: a header. What `Generator.start` does, and what goes wrong before the
        first event.
    """
    service = request.app[SERVICE]
    name = client_id or request[REQUEST_ID]
    if wants_timings(request):
        params = replace(params, include_timings=True)
    with service.generator.start(
        prompts, params, new_id(prefix), name, received_s=request[RECEIVED]
    ) as generation:
        request[GENERATION] = generation
        made = new_answer(generation)
        if params.stream:
            return await _stream(request, made)
        async for news in generation:
            for delta in news:
                made.add(delta)
        begun = service.engine.clock()
        response = json_response(made.body())
        generation.writes.add(begun, service.engine.clock())
        return response


def wants_timings(request: web.Request) -> bool:
    """Whether a header asks for timings. Raises: InvalidRequest: it says neither yes nor no."""
    given = request.headers.get(TIMINGS_HEADER)
    if given is None:
        return False
    if given not in ("0", "1"):
        raise wrong(TIMINGS_HEADER, given, "0 or 1")
    return given == "1"


async def _stream(request: web.Request, made: Answer) -> web.StreamResponse:
    engine = request.app[SERVICE].engine
    out = EventStream(request, request.app[SERVICE].config.slow_reader_timeout)
    try:
        try:
            async for news in made.generation:
                if engine.timed and not made.generation.reads & TIMED_LAPS:
                    begun = engine.clock()
                    await out.send(b"".join([made.events(delta) for delta in news]))
                    made.generation.writes.add(begun, engine.clock())
                else:
                    await out.send(b"".join([made.events(delta) for delta in news]))
            await out.send(made.closing())
        except ConnectionError:
            raise
        except Exception as error:
            if not out.started:
                raise
            # Clients must not take the stream for complete.
            await out.send(made.failure(_known_error(request, error)))
        return await out.end()
    except ConnectionError:
        return out.response  # nobody is there to be told; leaving aborts what still runs


def _known_error(request: web.Request, error: Exception) -> ErrorAnswer:
    found = error_answer(error)
    if found is None:
        request.app.logger.error("a stream failed", exc_info=error)
        found = internal_error()
    return found
