"""Answers as JSON."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from server.service import PIECE, json_bytes


@pytest.mark.parametrize("size", [2, PIECE, PIECE + 1, 5 * PIECE + 3])
async def test_an_answer_of_any_size_is_whole_and_says_its_length(size):
    body = b'"' + (b"the quick brown fox " * (size // 20 + 1))[: size - 2] + b'"'

    async def answer(request):
        return json_bytes(body)

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestClient(TestServer(app)) as client:
        for _ in range(2):  # the second on the same connection
            response = await client.get("/")
            assert response.headers["Content-Length"] == str(size)
            assert response.headers["Content-Type"] == "application/json; charset=utf-8"
            assert await response.read() == body
