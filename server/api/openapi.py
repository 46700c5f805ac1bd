"""/openapi.json and /docs, both generated from one table of routes.

A test holds the table against the routes that the application has.
"""

from __future__ import annotations

import html
import json
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

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
h2 { border-top: 1px solid #ccc; padding-top: 1rem; margin-top: 2rem; font-size: 1.1rem }
code, pre { font: 13px/1.5 ui-monospace, monospace } .method { color: #07658c; font-weight: bold }
table { border-collapse: collapse } td, th { text-align: left; padding: .15rem 1rem .15rem 0;
  vertical-align: top } th { font-weight: 600 }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 }
  .method { color: #6cc4ea } }
"""


def docs_page(version: str) -> str:
    """The description as a page that loads nothing from elsewhere."""
    described = document(version)
    sections = "\n".join(_section(route) for route in ROUTES)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>loomserve {html.escape(version)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>loomserve {html.escape(version)}</h1>"
        f"<p>{html.escape(described['info']['description'])} The same as data:"
        " <a href='openapi.json'>openapi.json</a>.</p>"
        f"{sections}</body></html>"
    )


def _section(route: Route) -> str:
    title = f"<h2><span class='method'>{route.method}</span> <code>{route.path}</code></h2>"
    text = f"<p>{html.escape(route.summary)}.{' Can be streamed.' if route.streams else ''}</p>"
    if route.request is None:
        return title + text
    schema = REQUESTS[route.request]
    rows = "".join(
        f"<tr><th><code>{name}</code>{' *' if name in schema['required'] else ''}</th>"
        f"<td>{_told(value)}</td></tr>"
        for name, value in schema["properties"].items()
    )
    return f"{title}{text}<table>{rows}</table>"


def _told(schema: Schema) -> str:
    """A field's schema in a few words."""
    arms = [arm for arm in schema.get("anyOf", ()) if arm.get("type") != "null"]
    if arms:
        return " or ".join(_told(arm) for arm in arms)
    if "$ref" in schema:
        return html.escape(schema["$ref"].rpartition("/")[2])
    parts = []
    if "enum" in schema:
        parts.append(", ".join(map(json.dumps, schema["enum"])))
    elif schema.get("type") == "array":
        parts.append(f"list of {_told(schema['items'])}")
    else:
        kinds = schema.get("type", "anything")
        parts.append(kinds if isinstance(kinds, str) else " or ".join(kinds))
    for key, word in (("minimum", "from"), ("maximum", "to"), ("exclusiveMinimum", "above")):
        if key in schema:
            parts.append(f"{word} {schema[key]}")
    told = html.escape(" ".join(parts))
    return f"{told}: {html.escape(schema['description'])}" if "description" in schema else told
