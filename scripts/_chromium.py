"""The machine's own Chromium, which Playwright drives: for the tests of the pages, and their
pictures."""

from __future__ import annotations

import shutil

# No sandbox: as root, in containers, Chromium starts only without; nothing else is visited here.
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
MISSING = "no Chromium on this machine (Debian: apt-get install chromium)"


def find_chromium() -> str | None:
    """The path of its program; None: it is not installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)
