"""/openapi.json and /docs."""

from __future__ import annotations

from functools import cache

from aiohttp import web

from server.api.native import version
from server.api.openapi import docs_page, document
from server.service import json_response

_page = cache(docs_page)


async def openapi_json(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return json_response(document(version()))


async def docs(request: web.Request) -> web.Response:
    """GET /docs."""
    return web.Response(text=_page(version()), content_type="text/html")


DOCS_ROUTES = [web.get("/openapi.json", openapi_json), web.get("/docs", docs)]
