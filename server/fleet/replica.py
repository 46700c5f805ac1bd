"""A server of the fleet, and what it tells of itself."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp

from server.fleet.member import Member

if TYPE_CHECKING:
    from server.fleet.options import FleetConfig


class Replica(Member):
    """A server. `ready` is set while it takes requests and the router knows it."""

    stdout = asyncio.subprocess.DEVNULL  # its ready line names an address that is not for clients

    def __init__(self, config: FleetConfig, number: int) -> None:
        command, environment = config.replica_command(number), config.replica_environment(number)
        super().__init__(f"replica {number}", command, environment, config.replica_cores(number))
        self.url = config.url(number)
        self.ready = asyncio.Event()
        self._api_key = config.server.api_key

    async def takes_requests(self, client: aiohttp.ClientSession) -> bool:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with client.get(self.url + "/ready") as answer:
                return answer.status == 200
        return False

    async def model_info(self, client: aiohttp.ClientSession) -> dict[str, Any] | None:
        """What it serves; None: it does not answer."""
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        with suppress(aiohttp.ClientError, TimeoutError):
            async with client.get(self.url + "/model_info", headers=headers) as answer:
                if answer.status == 200:
                    info: dict[str, Any] = await answer.json()
                    return info
        return None
