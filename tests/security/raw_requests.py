"""Requests as bytes that no client library would send, by name; each asks for the connection's end."""

from __future__ import annotations

import json

_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Smuggled: 1\r\n\r\n"
_FRAMES = {
    "length and chunks": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 2\r\nContent-Length: 60\r\n\r\n{}",
    "a list of lengths": b"Content-Length: 2, 60\r\n\r\n{}",
    "a length with a sign": b"Content-Length: +2\r\n\r\n{}",
    "a length with an underscore": b"Content-Length: 1_0\r\n\r\n{}",
    "a length in other digits": "Content-Length: ２\r\n\r\n{}".encode(),
    "an encoding that only begins like chunked": b"Transfer-Encoding: chunked123\r\n\r\n0\r\n\r\n",
    "chunked twice": b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunked in other letters": "Transfer-Encoding: chun\u212aed\r\n\r\n0\r\n\r\n".encode(),
    "a blank before the colon": b"Content-Length : 2\r\n\r\n{}",
    "two hosts": b"Host: y\r\nContent-Length: 2\r\n\r\n{}",
    "a folded header": b"X: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "a bare line feed": b"X: a\nContent-Length: 2\r\n\r\n{}",
    "a zero byte": b"X: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    "a line feed in a chunk's extension": b"Transfer-Encoding: chunked\r\n\r\n2;a\nb\r\n{}\r\n0\r\n\r\n",
}
# What two readers may read in two ways, and behind it what one of them takes for another request.
SMUGGLING = {name: _HEAD + frame + _SMUGGLED for name, frame in _FRAMES.items()}

_LINES = {
    "one of 1 MB": b"X: " + b"a" * 1_000_000 + b"\r\n",
    "a name of 1 MB": b"X" * 1_000_000 + b": a\r\n",
    "20,000 of them": b"".join(b"X-%d: a\r\n" % i for i in range(20_000)),
}
HEADERS = {
    name: b"GET /health HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n" for name, line in _LINES.items()
} | {"a path of 1 MB": b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"}

_TEXT = json.dumps({"prompt": "x" * 60_000, "max_tokens": 1}).encode()
FLOOD_OF_CHUNKS = (
    _HEAD
    + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"1\r\n%c\r\n" % byte for byte in _TEXT)
    + b"0\r\n\r\n"
)
TRAILERS = (
    _HEAD
    + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    + b"".join(b"X-%d: a\r\n" % i for i in range(20_000))
    + b"\r\n"
)
RAW = SMUGGLING | HEADERS | {"60,000 chunks": FLOOD_OF_CHUNKS, "20,000 trailers": TRAILERS}
