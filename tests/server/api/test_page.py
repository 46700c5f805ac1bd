"""The page at /: its files, and what browsers are told to allow them."""

from __future__ import annotations

import re

import pytest

from runtime.scheduling.accounting import BLOCKING_TERMS
from server.api.page import FILES
from tests.fakes import fake_server

NAMES = sorted(str(path.relative_to(FILES)) for path in FILES.rglob("*.*"))
PAGES = [name for name in NAMES if name.endswith(".html")]


async def test_every_file_is_served_with_a_policy_and_its_kind():
    async with fake_server(api_key="secret") as server:
        for name in NAMES:
            async with server.client.get(f"{server.url}/page/{name}") as answer:
                assert answer.status == 200, name
                assert await answer.read() == (FILES / name).read_bytes()
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                rules = dict(
                    rule.split(" ", 1)
                    for rule in answer.headers["Content-Security-Policy"].split("; ")
                )
                assert rules["default-src"] == rules["base-uri"] == "'none'"
                assert rules["frame-ancestors"] == rules["form-action"] == "'none'"
                assert rules["script-src"].split()[0] == "'self'"
                assert not re.search("unsafe-inline|'unsafe-eval'|http|[*]", str(rules))


async def test_the_page_is_at_the_root_for_those_without_a_key_too():
    async with fake_server(api_key="secret") as server:
        async with server.client.get(server.url + "/") as answer:
            assert answer.status == 200
            assert answer.content_type == "text/html"
            assert await answer.read() == (FILES / "index.html").read_bytes()
            etag = answer.headers["ETag"]
        known = {"If-None-Match": etag}
        async with server.client.get(server.url + "/", headers=known) as answer:
            assert answer.status == 304
        assert (await server.get("/debug/steps"))[0] == 401, "what it shows needs the key"


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "../api/page.py",
        "..%2f..%2fpyproject.toml",
        "%2fetc%2fpasswd",
        "a%00.js",
        "x" * 300 + ".js",
        "index.html/",
        ".",
        "%2e%2e%2fapp.py",
    ],
)
async def test_nothing_else_is_served(name):
    async with fake_server() as server:
        status, body = await server.get(f"/page/{name}")
    assert status == 404
    assert body["error"]["code"] == "not_found"


@pytest.mark.parametrize("name", PAGES)
def test_pages_hold_no_script_and_no_style_of_their_own(name):
    """The policy would keep a browser from them, silently for who does not look."""
    page = (FILES / name).read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page))
    assert not re.search(r"https?://|//\w+\.", page), "nothing comes from another host"


def test_the_pages_have_words_for_everything_that_a_request_waits_for():
    words = (FILES / "reasons.js").read_text()
    named = re.findall(r"^  (\w+): \"", words, re.MULTILINE)
    assert named == [term.value for term in BLOCKING_TERMS]
