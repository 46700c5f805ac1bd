"""Pages of other origins: what they may order, and what their browsers are told (CORS)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFLIGHT_HEADERS = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization",
    "Access-Control-Max-Age": "600",
}


def is_preflight(request: web.Request) -> bool:
    """Whether a browser asks what it may send."""
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


def check_origin(request: web.Request, allowed: str) -> None:
    """A page of an origin that is not allowed may order nothing.

    Browsers ask first before they send JSON to another origin, and are not allowed to; what they
    send without asking (forms, plain text, an empty body) must not be taken for an order.

    Raises: web.HTTPUnsupportedMediaType.
    """
    origin = request.headers.get("Origin")
    if origin is None or request.method in ("GET", "HEAD", "OPTIONS"):
        return
    own = origin.partition("://")[2] == request.host
    if own or _allowed_origin(origin, allowed) or request.content_type == "application/json":
        return
    raise web.HTTPUnsupportedMediaType(
        text=f"requests of the origin {origin[:100]} must have the Content-Type application/json"
    )


def _allowed_origin(origin: str, allowed: str) -> str | None:
    """What Access-Control-Allow-Origin says to an origin; None: nothing."""
    names = [one.strip() for one in allowed.split(",")]
    return "*" if "*" in names else origin if origin in names else None


def cors_headers(request: web.Request, allowed: str, exposed: Sequence[str]) -> dict[str, str]:
    """What a browser is told with an answer. exposed: headers that the page may read."""
    origin = request.headers.get("Origin")
    told = None if origin is None else _allowed_origin(origin, allowed)
    if told is None:
        return {}
    vary = {} if told == "*" else {"Vary": "Origin"}
    return {
        "Access-Control-Allow-Origin": told,
        **vary,
        **_PREFLIGHT_HEADERS,
        "Access-Control-Expose-Headers": ", ".join(exposed),
    }
