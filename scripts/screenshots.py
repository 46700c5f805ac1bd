#!/usr/bin/env python
"""Takes the pictures of the pages that README.md shows: of a real server, under a load.

    python scripts/screenshots.py                     all of them, into docs/pictures
    python scripts/screenshots.py --base-url URL ...  of a server that runs already

Needs Chromium and Playwright, as the tests of the pages do (tests/browser), and for the simulator's
page what `loomserve fetch-pyodide` fetches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from playwright.sync_api import ViewportSize, sync_playwright

from scripts._chromium import ARGUMENTS, MISSING, find_chromium
from server.args import parse_args
from server.simulator_files import fetch_pyodide

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[1]
WIDE: ViewportSize = {"width": 1280, "height": 800}
NARROW: ViewportSize = {"width": 360, "height": 720}
PATIENCE_MS = 120_000
QUESTION = "Tell me a long story about a weaver and her loom."
LONG_PROMPT = "The loom weaves threads of many lengths into one cloth. " * 15


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", help="a running server (default: one of its own)")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "pictures")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    chromium = find_chromium()
    if chromium is None:
        sys.exit(f"screenshots: {MISSING}")
    fetch_pyodide(parse_args([]).runner.cache_folder, print)
    with server_at(options.base_url) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        for name, take in PICTURES.items():
            path = options.folder / f"{name}.png"
            take(browser, url, path)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
        browser.close()


@contextmanager
def server_at(url: str | None) -> Iterator[str]:
    """The address given, or that of a server with few rows, so that somebody waits."""
    if url is not None:
        yield url.rstrip("/")
        return
    command = [sys.executable, "-m", "server", "--port", "0", "--max-running-requests", "4"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if "is ready on http" in line)
        yield next(word for word in ready.split() if word.startswith("http")).rstrip(".,")
    finally:
        process.terminate()
        process.wait()


def chat_beside_a_load(page: Page, url: str) -> list[threading.Thread]:
    """A chat that streams while others' prompts, short and long, come in."""
    page.goto(url)
    page.fill("#message", QUESTION)
    page.press("#message", "Enter")
    page.wait_for_selector(".token >> nth=20")
    work = [
        threading.Thread(target=complete, args=(url, f"{number} {LONG_PROMPT}", 60 + 8 * number))
        for number in range(8)
    ]
    for thread in work:
        thread.start()
    page.wait_for_selector("#requests td:text-is('rows')", timeout=PATIENCE_MS)
    return work


def complete(url: str, prompt: str, tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).read()


def chat_and_live(browser: Browser, url: str, path: Path) -> None:
    page = browser.new_page(viewport=WIDE)
    work = chat_beside_a_load(page, url)
    page.hover(".token >> nth=12")
    page.screenshot(path=path)
    for thread in work:
        thread.join()
    page.close()


def live_narrow_and_dark(browser: Browser, url: str, path: Path) -> None:
    page = browser.new_page(viewport=NARROW, color_scheme="dark")
    page.goto(url + "/#live")
    page.wait_for_selector("#runs li")
    page.screenshot(path=path)
    page.close()


def simulator(browser: Browser, url: str, path: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 1150})
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url + "/simulator")
    page.locator("#machine option").first.wait_for(state="attached")
    page.get_by_role("button", name="Load and run").click()
    page.get_by_label("compare two settings").check()
    chunk = page.locator(".setting").nth(1).get_by_role("slider").first
    chunk.focus()
    for _ in range(8):
        chunk.press("ArrowLeft")
    page.get_by_role("heading", name="B: chunked_prefill_size=512").first.wait_for()
    page.locator("#columns").scroll_into_view_if_needed()
    page.screenshot(path=path)
    page.close()


PICTURES = {
    "page": chat_and_live,
    "page-narrow-dark": live_narrow_and_dark,
    "simulator": simulator,
}

if __name__ == "__main__":
    main()
