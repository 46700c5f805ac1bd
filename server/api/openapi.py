"""The OpenAPI description, generated from one table of routes.

A test holds the table against the routes that the application has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.api.openapi_schemas import ANSWERS, REQUESTS, Schema, ref


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint as documented.

    Args:
        request, answer: names of schemas.
        streams: the answer may be a stream of events instead.
        media: of an answer that is no JSON.
        parameters: of path and query: (name, place, schema).
        errors: the schema of its errors.
    """

    method: str
    path: str
    summary: str
    answer: str | None = None
    request: str | None = None
    streams: bool = False
    media: str = "application/json"
    parameters: tuple[tuple[str, str, Schema], ...] = ()
    errors: str = "Error"


_TEXT = {"type": "string"}
ROUTES = (
    Route("POST", "/v1/chat/completions", "The model's next message in a conversation",
          "ChatCompletion", "ChatRequest", streams=True),
    Route("POST", "/v1/completions", "What follows a prompt",
          "Completion", "CompletionRequest", streams=True),
    Route("POST", "/v1/responses", "OpenAI's newer form of a conversation; nothing is stored",
          "Response", "ResponseRequest", streams=True),
    Route("POST", "/v1/messages", "Anthropic's form of a conversation",
          "Message", "MessageRequest", streams=True, errors="AnthropicError"),
    Route("POST", "/v1/messages/count_tokens", "Tokens of the prompt of such a conversation",
          "TokenCount", "CountTokensRequest", errors="AnthropicError"),
    Route("POST", "/generate", "SGLang's form: text or token ids in, text and figures out",
          "Generated", "GenerateRequest", streams=True),
    Route("GET", "/v1/models", "The served model", "Models"),
    Route("GET", "/v1/models/{name}", "The served model by name", "Model",
          parameters=(("name", "path", _TEXT),)),
    Route("POST", "/tokenize", "Token ids of a prompt or a conversation",
          "Tokens", "TokenizeRequest"),
    Route("POST", "/detokenize", "Text of token ids", "Text", "DetokenizeRequest"),
    Route("POST", "/abort_request", "Ends requests by id, or all of them",
          "Aborted", "AbortRequest"),
    Route("POST", "/flush_cache", "Empties the prefix cache where nothing runs", "Flushed"),
    Route("GET", "/health", "Whether the engine runs; does not wait behind the queue", "Health"),
    Route("GET", "/health_generate", "Whether a token can be generated", "Health"),
    Route("GET", "/metrics", "Figures for Prometheus", media="text/plain"),
    Route("GET", "/server_info", "Version, options and figures of the scheduler", "ServerInfo"),
    Route("GET", "/debug/requests", "Live requests and what each has waited for", "Requests"),
    Route("GET", "/debug/steps", "The newest steps", "Steps",
          parameters=(("last", "query", {"type": "integer", "minimum": 0, "maximum": 999999}),)),
    Route("GET", "/openapi.json", "This description", media="application/json"),
    Route("GET", "/docs", "This description, to read", media="text/html"),
)  # fmt: skip


def document(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 description of the server."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "loomserve",
            "version": version,
            "description": "Text generation. Fields that are not listed are ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": {**REQUESTS, **ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    schema = {"type": "string"} if route.media.startswith("text/") else {}
    content: dict[str, Any] = {route.media: {"schema": ref(route.answer)} if route.answer else
                               {"schema": schema}}  # fmt: skip
    if route.streams:
        content["text/event-stream"] = {"schema": ref("Event")}
    operation: dict[str, Any] = {
        "operationId": (route.method + route.path).lower().translate(_NAME_CHARACTERS),
        "summary": route.summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {
                "description": "An error",
                "content": {"application/json": {"schema": ref(route.errors)}},
            },
        },
    }
    if route.path == "/flush_cache":
        busy = {"schema": ref("Flushed")}
        operation["responses"]["409"] = {
            "description": "Requests are running",
            "content": {"application/json": busy},
        }
    if route.request is not None:
        body = {"application/json": {"schema": ref(route.request)}}
        operation["requestBody"] = {"required": True, "content": body}
    if route.parameters:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": schema}
            for name, place, schema in route.parameters
        ]
    return operation


_NAME_CHARACTERS = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})
