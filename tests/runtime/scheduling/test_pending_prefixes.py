"""Twins: who waits for whom, against the definition, prompt by prompt."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from runtime.request import Request
from runtime.scheduling.admission import WORTH_WAITING_TOKENS, PendingPrefixes
from runtime.scheduling.kv_memory import KVMemory, match_limit
from tests.runtime.scheduling.scheduler_harness import config, request


def waits(one: Request, pending: list[Request], cached: int, page_size: int) -> bool:
    """Whether a pending prompt begins with what is cached of this one and 32 tokens more, in whole
    pages, all of which it may take from the cache."""
    gain = -(-WORTH_WAITING_TOKENS // page_size) * page_size
    head = list(one.input_ids[: cached + gain])
    return cached + gain <= match_limit(one) and any(
        other.namespace == one.namespace and list(other.input_ids[: cached + gain]) == head
        for other in pending
    )


class Prompts:
    """Prompts of a few common pieces, so that many agree for a while."""

    def __init__(self, seed: int, page_size: int) -> None:
        self.rng = random.Random(seed)
        self.page_size = page_size
        self.count = 0

    def tokens(self) -> list[int]:
        unit = max(self.page_size, 16)
        lengths = self.rng.choices([unit, 2 * unit, 2 * unit + 1], k=4)
        pieces = [[self.rng.randint(1, 2)] * length for length in lengths]
        flat = [token for piece in pieces[: self.rng.randint(1, 4)] for token in piece]
        return flat + [100 + self.count] * self.rng.choice([0, 0, 1, 40])

    def make(self) -> Request:
        self.count += 1
        options: dict[str, Any] = {"prompt_logprobs": 0} if self.rng.random() < 0.15 else {}
        name = self.rng.choice(["", "", "salt"])
        made = request(f"r{self.count}", self.tokens(), 2, namespace=name, **options)
        made.scheduling.key = made.input_ids.tobytes()
        return made


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("seed", range(6))
def test_who_waits_is_as_defined(seed: int, page_size: int) -> None:
    prompts = Prompts(seed, page_size)
    memory = KVMemory(
        config(page_size=page_size, capacity_tokens=100_000, chunked_prefill_size=2 * page_size)
    )
    outcomes = set()
    for _ in range(60):
        tokens = prompts.tokens()
        whole = len(tokens) // page_size
        if whole:
            name = prompts.rng.choice(["", "salt"])
            key = array("i", tokens[: whole * page_size]).tobytes()
            memory.cache.insert(name, key, memory.allocator.allocate_pages(whole))
        found = PendingPrefixes(memory)
        pending: list[Request] = []
        for _ in range(12):
            one = prompts.make()
            match = memory.match(one)
            expected = waits(one, pending, match.tokens, page_size)
            assert found.worth_waiting(one, match) == expected
            outcomes.add(expected)
            if not expected:
                found.add(one)
                pending.append(one)
        memory.cache.evict(prompts.rng.randint(0, whole))
    assert outcomes == {True, False}
