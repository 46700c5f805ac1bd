"""Every error, as the status, body and headers that clients get. The one place that maps them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from runtime.errors import (
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
)

# A client that is told to come back later does so after this, unless the error knows better.
RETRY_AFTER_S = 1


class Unauthorized(Exception):
    """No key, or a wrong one (HTTP 401)."""


class InvalidHttp(Exception):
    """Bytes that are no HTTP, or a body that is not sent as its head says (HTTP 400)."""

    def __str__(self) -> str:
        return f"the request is not valid HTTP: {self.args[0]}"


class Draining(Exception):
    """The server is shutting down and takes nothing new (HTTP 503)."""

    def __str__(self) -> str:
        return "the server is shutting down and takes no new requests"


class Loading(Exception):
    """The model is not loaded yet (HTTP 503)."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as HTTP. body: in OpenAI's form."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error as OpenAI clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_answer(error: BaseException) -> ErrorAnswer | None:
    """What to answer; None for an error nobody foresaw (a 500 that tells nothing)."""
    if isinstance(error, InvalidRequest):
        body = error_body(
            str(error), kind="invalid_request_error", param=error.param, code=error.code
        )
        return ErrorAnswer(400, body)
    if isinstance(error, ModelNotFound):
        body = error_body(
            str(error), kind="invalid_request_error", param="model", code="model_not_found"
        )
        return ErrorAnswer(404, body)
    if isinstance(error, Unauthorized):
        body = error_body(str(error), kind="authentication_error", code="invalid_api_key")
        return ErrorAnswer(401, body, {"WWW-Authenticate": "Bearer"})
    if isinstance(error, InvalidHttp):
        body = error_body(str(error), kind="invalid_request_error", code="invalid_http")
        return ErrorAnswer(400, body)
    if isinstance(error, QueueFull):
        return _unavailable(str(error), "overloaded", error.retry_after_s)
    if isinstance(error, Draining):
        return _unavailable(str(error), "shutting_down", RETRY_AFTER_S)
    if isinstance(error, Loading):
        return _unavailable(str(error), "loading", RETRY_AFTER_S)
    if isinstance(error, EngineDead):
        return ErrorAnswer(503, error_body(str(error), kind="server_error", code="engine_dead"))
    if isinstance(error, GenerationFailed):
        if error.timed_out:
            return ErrorAnswer(504, error_body(str(error), kind="timeout_error", code="timeout"))
        return ErrorAnswer(500, error_body(str(error), kind="server_error", code="failed"))
    if isinstance(error, web.HTTPException) and error.status >= 400:
        return _http(error)
    return None


def internal_error() -> ErrorAnswer:
    """For an error nobody foresaw: no detail leaves the server."""
    return ErrorAnswer(500, error_body("internal error", kind="server_error", code="internal"))


def _unavailable(message: str, code: str, retry_after_s: float) -> ErrorAnswer:
    seconds = str(max(1, math.ceil(retry_after_s)))
    body = error_body(message, kind="overloaded_error", code=code)
    return ErrorAnswer(503, body, {"Retry-After": seconds})


_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}


def _http(error: web.HTTPException) -> ErrorAnswer:
    """aiohttp's own refusals: unknown path, wrong method, body over the limit."""
    message = error.text or error.reason
    headers = {}
    if isinstance(error, web.HTTPMethodNotAllowed):
        message = f"method {error.method} is not allowed here; allowed: " + ", ".join(
            sorted(error.allowed_methods)
        )
        headers["Allow"] = ",".join(sorted(error.allowed_methods))
    elif isinstance(error, web.HTTPNotFound):
        message = "there is no such path"
    code = _CODES.get(error.status)
    return ErrorAnswer(
        error.status, error_body(message, kind="invalid_request_error", code=code), headers
    )
