"""The page at / in a browser."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_the_page_opens_without_a_word_of_complaint(open_page, talker):
    page = open_page(talker.url)
    assert page.title() == "loomserve"
    assert page.locator(".timeline-summary").inner_text() == "No steps yet."
