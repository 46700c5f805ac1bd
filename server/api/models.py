"""/v1/models: the one served model."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aiohttp import web

from server.api.request_fields import check_model
from server.service import SERVICE, json_response

if TYPE_CHECKING:
    from server.service import Service


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    served = _model(request.app[SERVICE])
    return json_response(
        {
            "object": "list",
            "data": [served],
            "has_more": False,
            "first_id": served["id"],
            "last_id": served["id"],
        }
    )


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{name}."""
    service = request.app[SERVICE]
    check_model(request.match_info["name"], service.limits)
    return json_response(_model(service))


def _model(service: Service) -> dict[str, Any]:
    """The model as OpenAI's clients read it, and with fields beside as Anthropic's do."""
    created = datetime.fromtimestamp(service.created, UTC)
    return {
        "id": service.limits.model,
        "object": "model",
        "created": service.created,
        "owned_by": "loomserve",
        "max_model_len": service.limits.context_length,
        "type": "model",
        "display_name": service.limits.model,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": service.limits.context_length,
        "max_tokens": service.limits.context_length,
    }


ROUTES = [web.get("/v1/models", models), web.get("/v1/models/{name:.+}", model)]
