"""/openapi.json, and /docs to read the same."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from aiohttp import web

from server.api.docs.field_table import rows_of
from server.api.docs.openapi import BODIES, DESCRIPTION, document
from server.api.docs.openapi import ROUTES as DESCRIBED
from server.api.fields.bodies import inner_bodies
from server.service import SERVICE, json_response
from server.version import version

if TYPE_CHECKING:
    from server.api.docs.openapi import Route
    from server.api.fields.bodies import Body
    from server.generation.params import ApiLimits


async def openapi_json(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return json_response(document(version(), request.app[SERVICE].limits))


async def docs(request: web.Request) -> web.Response:
    """GET /docs."""
    page = docs_page(version(), request.app[SERVICE].limits)
    return web.Response(text=page, content_type="text/html")


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


def docs_page(number: str, limits: ApiLimits) -> str:
    """The description as a page that loads nothing from elsewhere."""
    sections = [_section(route, limits) for route in DESCRIBED]
    inner = [
        f"<h2><code>{name}</code></h2>{_table(body, limits)}"
        for name, body in inner_bodies(*BODIES).items()
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>loomserve {html.escape(number)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>loomserve {html.escape(number)}</h1>"
        f"<p>{html.escape(DESCRIPTION)} The same as data:"
        " <a href='openapi.json'>openapi.json</a>.</p>"
        f"{''.join(sections)}<h1>Objects in bodies</h1>{''.join(inner)}</body></html>"
    )


def _section(route: Route, limits: ApiLimits) -> str:
    title = f"<h2><span class='method'>{route.method}</span> <code>{route.path}</code></h2>"
    text = f"<p>{html.escape(route.summary)}.{' Can be streamed.' if route.streams else ''}</p>"
    return title + text + (_table(route.request, limits) if route.request is not None else "")


def _table(body: type[Body], limits: ApiLimits) -> str:
    rows = "".join(
        f"<tr><th><code>{html.escape(row.name)}</code></th><td>{html.escape(row.allowed)}</td>"
        f"<td>{html.escape(row.default)}</td><td>{html.escape(row.meaning)}</td></tr>"
        for row in rows_of(body, limits)
    )
    return f"<table>{rows}</table>"


ROUTES = [web.get("/openapi.json", openapi_json), web.get("/docs", docs)]
