"""The simulator's page and what it runs: Python for browsers, and the scheduler's own sources.

As open as the page at `/`: nothing of it is this server's alone. The page's files are served by
`page.py`, these are made or fetched on this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from server.api.page import HEADERS, page_file
from server.service import SERVICE, json_response
from server.simulator_files import PYODIDE_FILES, packed_sources, pyodide_folder

if TYPE_CHECKING:
    from pathlib import Path

FETCH_COMMAND = "loomserve fetch-pyodide"


async def index(request: web.Request) -> web.StreamResponse:
    """GET /simulator: the page."""
    return page_file("simulator/index.html")


async def setup(request: web.Request) -> web.Response:
    """GET /simulator/setup: whether Pyodide is there, and the command that fetches it."""
    return json_response({"pyodide": _pyodide(request).is_dir(), "command": FETCH_COMMAND})


async def pyodide(request: web.Request) -> web.StreamResponse:
    """GET /simulator/pyodide/NAME: a file of it."""
    name = request.match_info["name"]
    path = _pyodide(request) / name
    if name not in PYODIDE_FILES or not path.is_file():
        raise web.HTTPNotFound
    return web.FileResponse(path, headers=HEADERS | {"Content-Type": PYODIDE_FILES[name]})


async def sources(request: web.Request) -> web.Response:
    """GET /simulator/sources.zip: the scheduler and its simulation, as they serve here."""
    return web.Response(
        body=packed_sources(), headers=HEADERS | {"Content-Type": "application/zip"}
    )


def _pyodide(request: web.Request) -> Path:
    return pyodide_folder(request.app[SERVICE].config.runner.cache_folder)


ROUTES = [
    web.get("/simulator", index),
    web.get("/simulator/setup", setup),
    web.get("/simulator/pyodide/{name}", pyodide),
    web.get("/simulator/sources.zip", sources),
]
