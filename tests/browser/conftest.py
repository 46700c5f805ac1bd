"""A headless Chromium, and pages in it that are watched: no error on the console, no word to another
host. Every test of a page uses `open_page`.

Chromium is the machine's own (Debian: `apt-get install chromium`), driven by Playwright. Where either
is missing the tests are skipped, unless LOOMSERVE_TEST_TOOLS is `required`: then they fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from scripts._chromium import ARGUMENTS, MISSING, find_chromium
from tests.missing import missing
from tests.server.server_kit import CHATML_TOOLS, Served, sim_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

    OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a module; contexts keep them apart. Not for longer: while it is
    there its event loop counts as running, and no other test of this thread could run one."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed (pip install -e '.[test]')")
    found = find_chromium()
    if found is None:
        missing(MISSING)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """open_page(url, **options of a browser context) gives a page. `expected_errors`: parts of
    console errors that the test is about (Chromium logs every answer of 4xx and 5xx as one)."""
    contexts = []
    troubles: list[str] = []

    def open_page(url: str, *, expected_errors: tuple[str, ...] = (), **options: Any) -> Page:
        def note(message: ConsoleMessage) -> None:
            told = f"{message.type}: {message.text}"
            if message.type in ("error", "warning") and not any(
                one in told for one in expected_errors
            ):
                troubles.append(told)

        def watch(request: Request) -> None:
            parts = urlsplit(request.url)
            if parts.scheme not in ("data", "blob") and parts.netloc != urlsplit(url).netloc:
                troubles.append(f"a request to another host: {request.url}")

        context = browser.new_context(**options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: troubles.append(f"uncaught: {error}"))
        page.on("request", watch)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.fixture(scope="session")
def talker() -> Iterator[Served]:
    """A simulated model that says what it is asked to (`say`), calls tools and reasons. Its server
    refuses fields that nobody reads."""
    with sim_server(CHATML_TOOLS, reasoning_parser="qwen3", strict_fields=True) as served:
        yield served
