"""Masks of constrained rows."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from server.generation.bad_words import BadWords
from server.generation.token_masks import token_masks
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


async def test_a_mask_that_cannot_be_made_leaves_its_row_free_and_tells_whose_it_is():
    class Choice:
        masked = True

        def __init__(self, name: str) -> None:
            self.request = SimpleNamespace(request_id=name)

        def fill_mask(self, bits) -> None:
            bits.fill(6)
            if self.request.request_id == "broken":
                raise ValueError

    live: Any = {name: Choice(name) for name in ("broken", "whole")}
    requests = [choice.request for choice in live.values()]
    batch: Any = SimpleNamespace(sampled=[0, 1], requests=requests)
    failed = []
    masks = await token_masks(
        batch,
        live,
        64,
        lambda choice, error: failed.append((choice, type(error))),
    )
    assert masks is not None
    assert masks.rows == [0, 1]
    assert masks.bits.tolist() == [[-1, -1], [6, 6]]
    assert failed == [(live["broken"], ValueError)]
