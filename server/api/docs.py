"""/openapi.json, and /docs to read the same."""

from __future__ import annotations

import html
import json
from functools import cache
from typing import TYPE_CHECKING

from aiohttp import web

from server.api.admin import version
from server.api.openapi import ROUTES as DESCRIBED
from server.api.openapi import document
from server.api.openapi_schemas import REQUESTS
from server.service import json_response

if TYPE_CHECKING:
    from server.api.openapi import Route
    from server.api.openapi_schemas import Schema


async def openapi_json(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    return json_response(document(version()))


async def docs(request: web.Request) -> web.Response:
    """GET /docs."""
    return web.Response(text=docs_page(version()), content_type="text/html")


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


@cache
def docs_page(version: str) -> str:
    """The description as a page that loads nothing from elsewhere."""
    described = document(version)
    sections = "\n".join(_section(route) for route in DESCRIBED)
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


ROUTES = [web.get("/openapi.json", openapi_json), web.get("/docs", docs)]
