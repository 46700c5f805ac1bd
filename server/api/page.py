"""The page at `/`, and the files that it is made of, from `server/page`.

Static files, open to everybody: they hold nothing of this server's. What they show they ask for
themselves, with the key that their reader gives. Each file comes with a policy that lets a browser
run and load nothing but this server's own files, whatever a model may have written.
"""

from __future__ import annotations

import re
from pathlib import Path

from aiohttp import web

FILES = Path(__file__).resolve().parents[1] / "page"
_NAME = re.compile(r"(?!.{100})[\w-][\w.-]*(/[\w-][\w.-]*)*")  # nothing begins with a dot
_MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
# What single files may do beyond that, by their path below FILES.
_MORE_POLICY: dict[str, dict[str, str]] = {
    "simulator/index.html": {"worker-src": "'self'"},
    # A worker is ruled by the policy that it comes with itself.
    "simulator/worker.js": {"script-src": "'self' 'wasm-unsafe-eval'"},
}
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for anew each time, and answered by the ETag alone
}


def policy(name: str) -> str:
    """The Content-Security-Policy of a file."""
    rules = _POLICY | _MORE_POLICY.get(name, {})
    return "; ".join(f"{source} {allowed}" for source, allowed in rules.items())


async def index(request: web.Request) -> web.StreamResponse:
    """GET /: the page."""
    return page_file("index.html")


async def file(request: web.Request) -> web.StreamResponse:
    """GET /page/NAME: a file of it."""
    return page_file(request.match_info["name"])


def page_file(name: str) -> web.StreamResponse:
    """The answer that is a file of the page. Raises: web.HTTPNotFound."""
    path = FILES / name if _NAME.fullmatch(name) else FILES
    media = _MEDIA.get(path.suffix)
    if media is None or not path.is_file():
        raise web.HTTPNotFound
    headers = HEADERS | {"Content-Type": media, "Content-Security-Policy": policy(name)}
    return web.FileResponse(path, headers=headers)


ROUTES = [web.get("/", index), web.get("/page/{name:.+}", file)]
