"""/v1/models: the one served model, under each of its names."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aiohttp import web

from server.api.fields.generation import check_model
from server.service import SERVICE, json_response

if TYPE_CHECKING:
    from server.service import Service


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    service = request.app[SERVICE]
    names = service.limits.names
    return json_response(
        {
            "object": "list",
            "data": [_model(service, name) for name in names],
            "has_more": False,
            "first_id": names[0],
            "last_id": names[-1],
        }
    )


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{name}."""
    service = request.app[SERVICE]
    name = request.match_info["name"]
    check_model(name, service.limits)
    return json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    """The model as OpenAI's clients read it, and with fields beside as Anthropic's do."""
    created = datetime.fromtimestamp(service.created, UTC)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "loomserve",
        "max_model_len": service.limits.context_length,
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": service.limits.context_length,
        "max_tokens": service.limits.context_length,
    }


ROUTES = [web.get("/v1/models", models), web.get("/v1/models/{name:.+}", model)]
