"""What a test needs and a machine may lack: a browser, a package index, a cross compiler."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skips the test, or fails it where LOOMSERVE_TEST_TOOLS is `required`: nothing may be missing
    there."""
    if os.environ.get("LOOMSERVE_TEST_TOOLS") == "required":
        pytest.fail(what)
    pytest.skip(what)
