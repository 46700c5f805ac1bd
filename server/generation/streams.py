"""The way of tokens from the engine to the handler that answers one request.

The engine puts without ever waiting. A reader that is slower than the model finds what it missed
in one piece: news of one choice are merged while nobody takes them, so a client that stops reading
holds at most the text of its own answer, and nobody else waits for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from runtime.errors import LoomserveError
    from runtime.request import Finish, Request, TokenLogprobs


@dataclass(slots=True)
class Delta:
    """News of one choice.

    Args:
        index: of the choice, among those submitted together.
        text: characters that follow what was sent before.
        token_ids: tokens behind this text; also those whose text is hidden or was held back.
        logprobs: parallel to token_ids where the request asked for them, else empty.
        prompt_logprobs: once, with the choice's first delta, where asked for.
        finish: set on the last delta of the choice.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: Finish | None = None

    def extend(self, later: Delta) -> None:
        """Appends news of the same choice."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish = later.finish


class RequestStream:
    """All choices of one request, read by one task as they come.

    Args:
        requests: the engine's requests, by choice index; their token counts give the usage.
    """

    __slots__ = ("_error", "_pending", "_unfinished", "_waiter", "requests")

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self._pending: dict[int, Delta] = {}
        self._unfinished = len(requests)
        self._waiter: asyncio.Future[None] | None = None
        self._error: LoomserveError | None = None

    def put_nowait(self, delta: Delta) -> None:
        """Adds news; wakes the reader."""
        waiting = self._pending.get(delta.index)
        if waiting is None:
            self._pending[delta.index] = delta
        else:
            waiting.extend(delta)
        self._wake()

    def fail(self, error: LoomserveError) -> None:
        """Ends the stream: the reader gets what is pending, then the error."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[Delta]:
        """The news since the last call, waiting for some; empty once every choice has ended.

        Raises: LoomserveError: the engine cannot go on with this request.
        """
        while not self._pending:
            if not self._unfinished:
                return []
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news = list(self._pending.values())
        self._pending.clear()
        for delta in news:
            if delta.finish is not None:
                self._unfinished -= 1
        return news

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Every delta until all choices have ended."""
        while news := await self.take():
            for delta in news:
                yield delta
