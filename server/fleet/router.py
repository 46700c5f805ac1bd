"""The router as its client sees it: which workers it has, and how they come and go."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import aiohttp

from runtime.errors import ConfigError
from server.fleet.options import ROUTER

POLL_SECONDS = 0.1  # it tells nobody when a worker has joined or left


class RouterClient:
    """Asks the router at a URL. A router that does not answer is no error: it may not run yet."""

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self._client = client
        self._url = url

    async def workers(self) -> dict[str, dict[str, Any]] | None:
        """The workers that it has, by their address; None: it does not answer.

        Raises: ConfigError: it answers otherwise than this router does.
        """
        url = self._url + "/workers"
        try:
            async with self._client.get(url) as answer:
                text = await answer.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError):
            return None
        try:
            return {worker["url"]: worker for worker in json.loads(text)["workers"]}
        except (ValueError, KeyError, TypeError):
            told = f"status {answer.status}, {text[:100]!r}"
            raise ConfigError(f"{url} is not answered as by {ROUTER}: {told}") from None

    async def register(self, worker: str) -> None:
        """Returns when it sends requests to the worker, or where it does not run: it learns of its
        workers when it starts."""
        known = await self.workers()
        while known is not None and not known.get(worker, {}).get("is_healthy"):
            if worker not in known:
                await self._ask("post", "/workers", json={"url": worker})
            await asyncio.sleep(POLL_SECONDS)
            known = await self.workers()

    async def deregister(self, worker: str) -> None:
        """Returns when it sends no more requests to the worker."""
        known = await self.workers()
        while known and worker in known:
            await self._ask("delete", "/workers/" + known[worker]["id"])
            await asyncio.sleep(POLL_SECONDS)
            known = await self.workers()

    async def _ask(self, method: str, path: str, **options: Any) -> None:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._client.request(method, self._url + path, **options) as answer:
                await answer.read()
