"""/v1/models: the one served model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from server.api.request_fields import check_model
from server.service import SERVICE, json_response

if TYPE_CHECKING:
    from server.service import Service


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    return json_response({"object": "list", "data": [_model(request.app[SERVICE])]})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{name}."""
    service = request.app[SERVICE]
    check_model(request.match_info["name"], service.limits)
    return json_response(_model(service))


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.limits.model,
        "object": "model",
        "created": service.created,
        "owned_by": "loomserve",
        "max_model_len": service.limits.context_length,
    }


ROUTES = [web.get("/v1/models", models), web.get("/v1/models/{name:.+}", model)]
