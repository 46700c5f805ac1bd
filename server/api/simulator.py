"""The simulator's page and what it runs: Python for browsers, and the scheduler's own sources.

As open as the page at `/`: nothing of it is this server's alone, but the trace that it records, for
which the key is needed. The page's files are served by `page.py`, these are made or fetched on this
machine.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from aiohttp import web

from runtime.simulation import disguise
from server.api.page import HEADERS, page_file
from server.service import SERVICE, json_response
from server.simulator_files import PYODIDE_FILES, packed_sources, pyodide_folder

if TYPE_CHECKING:
    from pathlib import Path

FETCH_COMMAND = "loomserve fetch-pyodide"
_CHUNK_BYTES = 1 << 16
_one_at_a_time = asyncio.Lock()


async def index(request: web.Request) -> web.StreamResponse:
    """GET /simulator: the page."""
    return page_file("simulator/index.html")


async def setup(request: web.Request) -> web.Response:
    """GET /simulator/setup: whether Pyodide is there, the command that fetches it, and whether this
    server records a trace."""
    return json_response(
        {
            "pyodide": _pyodide(request).is_dir(),
            "command": FETCH_COMMAND,
            "records": request.app[SERVICE].config.record is not None,
        }
    )


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


async def recorded_trace(request: web.Request) -> web.StreamResponse:
    """GET /debug/recorded_trace: what this server has recorded until now, without what was said.

    Made in a process of its own: it takes seconds where hours were recorded. One at a time."""
    path = request.app[SERVICE].config.record
    if path is None:
        raise web.HTTPConflict(text="this server records no trace; --record FILE does")
    async with _one_at_a_time:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", disguise.__file__, path), stdout=asyncio.subprocess.PIPE
        )
        try:
            return await _pass_on(request, process)
        finally:  # a client that leaves ends it
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _pass_on(request: web.Request, process: asyncio.subprocess.Process) -> web.StreamResponse:
    assert process.stdout is not None
    response = web.StreamResponse(headers=HEADERS | {"Content-Type": "application/jsonl"})
    await response.prepare(request)
    while chunk := await process.stdout.read(_CHUNK_BYTES):
        await response.write(chunk)
    if await process.wait():
        raise ConnectionError("the trace could not be read to its end")  # not to look whole
    await response.write_eof()
    return response


def _pyodide(request: web.Request) -> Path:
    return pyodide_folder(request.app[SERVICE].config.runner.cache_folder)


ROUTES = [
    web.get("/simulator", index),
    web.get("/simulator/setup", setup),
    web.get("/simulator/pyodide/{name}", pyodide),
    web.get("/simulator/sources.zip", sources),
    web.get("/debug/recorded_trace", recorded_trace),
]
