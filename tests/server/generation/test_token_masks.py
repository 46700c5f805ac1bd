"""Masks of constrained rows."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from server.generation.bad_words import BadWords
from server.grammars.bits import forbid


def ban(bits, words, output):
    forbid(bits, BadWords(map(tuple, words)).completing(array("i", output)))


def allowed(bits) -> set[int]:
    return {i for i in range(96) if int(bits.view(np.uint32)[i // 32]) >> (i % 32) & 1}


@pytest.mark.parametrize(
    ("words", "output", "banned"),
    [
        pytest.param([[5]], [], {5}, id="one-token"),
        pytest.param([[31], [32], [63]], [], {31, 32, 63}, id="word-borders"),
        pytest.param([[5, 6]], [], set(), id="not-begun"),
        pytest.param([[5, 6]], [5], {6}, id="begun"),
        pytest.param([[5, 6]], [5, 7], set(), id="left-again"),
        pytest.param([[5, 5, 6]], [5, 5], {6}, id="three"),
        pytest.param([[5, 5, 6]], [5], set(), id="shorter-output-than-head"),
    ],
)
def test_the_token_that_completes_a_bad_word_is_banned(words, output, banned):
    bits = np.full(3, -1, dtype=np.int32)
    ban(bits, words, output)
    assert allowed(bits) == set(range(96)) - banned


def test_a_mask_that_leaves_only_bad_words_stays_as_it_was():
    bits = np.array([1 << 5, 0, 0], dtype=np.int32)
    ban(bits, [[5]], [])
    assert allowed(bits) == {5}
