"""A generation's answer on its way to the client: one body, or events as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from server.http.errors import error_answer, internal_error
from server.http.sse import EventStream
from server.service import SERVICE, json_response

if TYPE_CHECKING:
    from typing import Any

    from aiohttp import web

    from server.generation.generator import Generation
    from server.generation.streams import Delta
    from server.http.errors import ErrorAnswer


class Answer(Protocol):
    """What turns a generation's deltas into an endpoint's bytes."""

    def events(self, delta: Delta) -> bytes: ...

    def closing(self) -> bytes: ...

    def failure(self, error: ErrorAnswer) -> bytes: ...

    async def whole(self) -> dict[str, Any]: ...


async def send(request: web.Request, generation: Generation, answer: Answer) -> web.StreamResponse:
    """Answers with a body, or with events as they come."""
    if not generation.params.stream:
        return json_response(await answer.whole())
    out = EventStream(request, request.app[SERVICE].config.slow_reader_timeout)
    try:
        await _stream(request, generation, answer, out)
        return await out.end()
    except ConnectionError:
        return out.response  # nobody is there to be told; leaving aborts what still runs


async def _stream(
    request: web.Request, generation: Generation, answer: Answer, out: EventStream
) -> None:
    try:
        async for delta in generation:
            await out.send(answer.events(delta))
        await out.send(answer.closing())
    except ConnectionError:
        raise
    except Exception as error:
        if not out.started:
            raise
        # Clients must not take the stream for complete.
        await out.send(answer.failure(_known_error(request, error)))


def _known_error(request: web.Request, error: Exception) -> ErrorAnswer:
    found = error_answer(error)
    if found is None:
        request.app.logger.error("a stream failed", exc_info=error)
        found = internal_error()
    return found
