"""The OpenAPI description, generated from one table of routes and the declarations of bodies.

A test holds the table against the routes that the application has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.api.admin import AbortBody
from server.api.answers import TIMINGS_HEADER
from server.api.chat import ChatBody
from server.api.completions import CompletionBody
from server.api.docs.answer_schemas import ANSWERS
from server.api.fields.bodies import inner_bodies, schema_of
from server.api.fields.schema_words import const, ref
from server.api.generate import GenerateBody
from server.api.messages import CountTokensBody, MessageBody
from server.api.responses import ResponseBody
from server.api.tokens import DetokenizeBody, TokenizeBody

if TYPE_CHECKING:
    from server.api.fields.bodies import Body
    from server.api.fields.schema_words import Schema
    from server.generation.params import ApiLimits


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint as documented.

    Args:
        answer: the name of its schema.
        streams: the answer may be a stream of events instead.
        media: of an answer that is no JSON.
        parameters: of path, query and header: (name, place, schema).
        errors: the schema of its errors.
    """

    method: str
    path: str
    summary: str
    answer: str | None = None
    request: type[Body] | None = None
    streams: bool = False
    media: str = "application/json"
    parameters: tuple[tuple[str, str, Schema], ...] = ()
    errors: str = "Error"


_TEXT = {"type": "string"}
_TIMINGS = (TIMINGS_HEADER, "header", const("0", "1"))  # of every answer that may be a stream
ROUTES = (
    Route("POST", "/v1/chat/completions", "The model's next message in a conversation",
          "ChatCompletion", ChatBody, streams=True),
    Route("POST", "/v1/completions", "What follows a prompt",
          "Completion", CompletionBody, streams=True),
    Route("POST", "/v1/chat/completions/render", "Such a request's prompt; nothing is generated",
          "Rendered", ChatBody),
    Route("POST", "/v1/completions/render", "Such a request's prompts; nothing is generated",
          "RenderedPrompts", CompletionBody),
    Route("POST", "/v1/responses", "OpenAI's newer form of a conversation; nothing is stored",
          "Response", ResponseBody, streams=True),
    Route("POST", "/v1/messages", "Anthropic's form of a conversation",
          "Message", MessageBody, streams=True, errors="AnthropicError"),
    Route("POST", "/v1/messages/count_tokens", "Tokens of the prompt of such a conversation",
          "TokenCount", CountTokensBody, errors="AnthropicError"),
    Route("POST", "/generate", "SGLang's form: text or token ids in, text and figures out",
          "Generated", GenerateBody, streams=True),
    Route("GET", "/v1/models", "The served model", "Models"),
    Route("GET", "/v1/models/{name}", "The served model by name", "Model",
          parameters=(("name", "path", _TEXT),)),
    Route("POST", "/tokenize", "Token ids of a prompt or a conversation",
          "Tokens", TokenizeBody),
    Route("POST", "/detokenize", "Text of token ids", "Text", DetokenizeBody),
    Route("POST", "/abort_request", "Ends requests by id, or all of them",
          "Aborted", AbortBody),
    Route("POST", "/flush_cache", "Empties the prefix cache where nothing runs", "Flushed"),
    Route("GET", "/health", "Whether the model is loaded and the engine runs", "Health"),
    Route("GET", "/live", "Whether the process is of use, be it loading or draining", "Health"),
    Route("GET", "/ready", "Whether new requests are taken", "Health"),
    Route("GET", "/ping", "The same, under the name that SageMaker asks for", "Health"),
    Route("GET", "/version", "This server's version", "Version"),
    Route("GET", "/health_generate", "Whether a token can be generated", "Health"),
    Route("GET", "/metrics", "Figures for Prometheus", media="text/plain"),
    Route("GET", "/server_info", "Version, options and figures of the scheduler", "ServerInfo"),
    Route("GET", "/get_server_info", "The same under SGLang's older name", "ServerInfo"),
    Route("GET", "/model_info", "Which model this is and what it can do", "ModelInfo"),
    Route("GET", "/get_model_info", "The same under SGLang's older name", "ModelInfo"),
    Route("GET", "/get_load", "What runs and waits, for routers", "Load"),
    Route("GET", "/debug/requests", "Live requests and what each has waited for", "Requests"),
    Route("GET", "/debug/steps", "The newest steps", "Steps",
          parameters=(("last", "query", {"type": "integer", "minimum": 0, "maximum": 999999}),)),
    Route("GET", "/debug/live", "Samples of steps, requests, KV and cache while somebody reads",
          media="text/event-stream",
          parameters=(("samples", "query",
                       {"type": "integer", "minimum": 1, "maximum": 999999}),)),
    Route("GET", "/debug/trace", "A trace of the next steps, for Perfetto", "Trace",
          parameters=(("steps", "query", {"type": "integer", "minimum": 1, "maximum": 10000}),
                      ("seconds", "query", {"type": "integer", "minimum": 1, "maximum": 60}))),
    Route("GET", "/", "A page with a chat and a live view of the steps", media="text/html"),
    Route("GET", "/page/{name}", "A file of that page", media="text/javascript",
          parameters=(("name", "path", _TEXT),)),
    Route("GET", "/simulator", "A page that runs the scheduler itself", media="text/html"),
    Route("GET", "/simulator/setup", "Whether the page has what it runs on"),
    Route("GET", "/simulator/pyodide/{name}", "A file of Python for browsers",
          media="application/wasm", parameters=(("name", "path", _TEXT),)),
    Route("GET", "/simulator/sources.zip", "The scheduler's sources", media="application/zip"),
    Route("GET", "/debug/recorded_trace", "What --record has written, without what was said",
          media="application/jsonl"),
    Route("GET", "/openapi.json", "This description", media="application/json"),
    Route("GET", "/docs", "This description, to read", media="text/html"),
)  # fmt: skip


BODIES = tuple(route.request for route in ROUTES if route.request is not None)


def document(version: str, limits: ApiLimits) -> dict[str, Any]:
    """The OpenAPI 3.1 description of the server. limits: its own, which bound some fields."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    bodies = {body.__name__: body for body in BODIES} | inner_bodies(*BODIES)
    requests = {name: schema_of(body, limits) for name, body in bodies.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "loomserve", "version": version, "description": DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": {**requests, **ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


DESCRIPTION = (
    "Text generation. `null` counts as absent, and 2.0 is no integer. Fields that nobody reads are"
    " named in the answer's header X-Loomserve-Ignored; with --strict-fields they are refused."
)


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
        body = {"application/json": {"schema": ref(route.request.__name__)}}
        operation["requestBody"] = {"required": True, "content": body}
    parameters = (*route.parameters, _TIMINGS) if route.streams else route.parameters
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": schema}
            for name, place, schema in parameters
        ]
    return operation


_NAME_CHARACTERS = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})
