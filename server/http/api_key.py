"""The server's key, in the two headers that clients send it in."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from server.http.errors import Unauthorized

if TYPE_CHECKING:
    from aiohttp import web


def check_key(request: web.Request, key: str | None) -> None:
    """Raises: Unauthorized. Compares digests, so the time taken tells nothing of the key."""
    if key is None:
        return
    given = request.headers.get("X-Api-Key")
    if given is None:
        scheme, _, rest = request.headers.get("Authorization", "").partition(" ")
        given = rest.strip() if scheme.lower() == "bearer" else None
    if given is None:
        raise Unauthorized("no API key was given; send it as Authorization: Bearer KEY")
    wanted = hashlib.sha256(key.encode()).digest()
    if not hmac.compare_digest(hashlib.sha256(given.encode("utf-8", "replace")).digest(), wanted):
        raise Unauthorized("the API key is wrong")
