"""The native sampler against the reference, token for token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ops import reference
from ops.op_set import Penalties, SamplingTensors
from tests.ops.cpu.cases import generator

if TYPE_CHECKING:
    from torch import Tensor

    from ops.cpu.native import NativeOps

VOCABS = [5, 64, 1000, 4999]
ROWS = 24


def settings(rows: int = ROWS, seed: int = 0, **values: float) -> SamplingTensors:
    """Every row with the same values; seeds and positions differ, some past 32 bits."""
    rand = generator(seed)

    def full(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), values.get(name, default), dtype=dtype)

    tensors = SamplingTensors(
        temperature=full("temperature", 1.0, torch.float32),
        top_k=full("top_k", 0, torch.int32),
        top_p=full("top_p", 1.0, torch.float32),
        min_p=full("min_p", 0.0, torch.float32),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=rand),
        position=torch.randint(0, 2**40, (rows,), generator=rand),
        all_greedy=values.get("temperature", 1.0) == 0,
        any_filter=any(name in values for name in ("top_k", "top_p", "min_p")),
    )
    return tensors


def both(native: NativeOps, logits: Tensor, s: SamplingTensors) -> tuple[Tensor, Tensor]:
    """The native choice and the reference's, each on its own copy of what is changed."""
    copy = s
    if s.penalties is not None:
        counts = s.penalties.output_counts.clone()
        copy = replace(s, penalties=replace(s.penalties, output_counts=counts))
    return native.sample(logits.clone(), s), reference.sample(logits.clone(), copy)


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 40, "temperature": 5.0},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 2.0},
    {"top_p": 0.9999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("values", FILTERS, ids=lambda v: "-".join(f"{k}{v[k]}" for k in v) or "on")
@pytest.mark.sampled(20)
def test_tokens_equal_the_reference(native: NativeOps, values: dict[str, Any], vocab: int) -> None:
    logits = torch.randn(ROWS, vocab, generator=generator(vocab)) * 3
    got, want = both(native, logits, settings(**values))
    assert torch.equal(got, want)


def test_rows_with_different_settings(native: NativeOps) -> None:
    rand = generator(1)
    s = settings()
    s.temperature = torch.rand(ROWS, generator=rand) * 2
    s.temperature[::4] = 0
    s.top_k = torch.randint(0, 30, (ROWS,), generator=rand, dtype=torch.int32)
    s.top_p = torch.rand(ROWS, generator=rand)
    s.min_p = torch.rand(ROWS, generator=rand) * 0.1
    s.any_filter = True
    got, want = both(native, torch.randn(ROWS, 3000, generator=rand) * 2, s)
    assert torch.equal(got, want)


def test_equal_logits_are_ordered_by_id(native: NativeOps) -> None:
    logits = torch.zeros(ROWS, 200)
    logits[:, 150:] = 1.0
    assert (native.sample(logits.clone(), settings(temperature=0)) == 150).all()
    got, want = both(native, logits, settings(top_k=3))
    assert torch.equal(got, want)
    assert set(got.tolist()) <= {150, 151, 152}


def test_bias_bans_penalties_and_masks(native: NativeOps) -> None:
    vocab, rand = 333, generator(2)
    states = 5
    for values in ({"temperature": 0}, {}, {"top_k": 20}, {"top_p": 0.8}):
        s = settings(seed=3, **values)
        rows = torch.randint(0, ROWS, (100,), generator=rand)
        tokens = torch.randint(0, vocab, (100,), generator=rand)
        s.bias = (rows, tokens, torch.randn(100, generator=rand) * 5)
        s.banned = (torch.arange(ROWS), torch.randint(0, vocab, (ROWS,), generator=rand))
        state_rows = torch.full((ROWS,), -1, dtype=torch.int32)
        state_rows[3:8] = torch.randperm(states, generator=rand).int()
        s.penalties = Penalties(
            state_rows=state_rows,
            repetition=torch.rand(ROWS, generator=rand) + 0.7,
            presence=torch.randn(ROWS, generator=rand),
            frequency=torch.randn(ROWS, generator=rand),
            prompt_mask=torch.rand(states, vocab, generator=rand) < 0.2,
            output_counts=torch.randint(0, 3, (states, vocab), generator=rand, dtype=torch.int32),
        )
        s.mask_rows = torch.tensor([1, 4, 20])
        bits = (3, (vocab + 31) // 32)
        s.mask_bits = torch.randint(-(2**31), 2**31, bits, generator=rand).int()
        before = s.penalties.output_counts.clone()
        got, want = both(native, torch.randn(ROWS, vocab, generator=rand) * 3, s)
        assert torch.equal(got, want)
        for row in range(3, 8):
            before[state_rows[row], got[row]] += 1
        assert torch.equal(s.penalties.output_counts, before)


@pytest.mark.parametrize(
    "values", [{"temperature": 0}, {}, {"top_k": 5}], ids=["greedy", "on", "k"]
)
def test_rows_without_a_choice_give_minus_one(native: NativeOps, values: dict[str, Any]) -> None:
    logits = torch.randn(4, 100, generator=generator())
    logits[0, 77] = float("nan")
    logits[1] = float("-inf")
    logits[2, 1:] = float("-inf")
    got, want = both(native, logits, settings(4, **values))
    assert got.tolist()[:3] == [-1, -1, 0]
    assert torch.equal(got, want)


def test_a_choice_depends_on_seed_and_position_alone(native: NativeOps) -> None:
    logits = torch.randn(ROWS, 500, generator=generator())
    s = settings()
    together = native.sample(logits.clone(), s)
    fields: dict[str, Any] = {}
    for row in range(ROWS):
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position"):
            fields[name] = getattr(s, name)[row : row + 1]
        assert native.sample(logits[row : row + 1].clone(), replace(s, **fields)) == together[row]


def test_draws_follow_the_softmax(best: NativeOps) -> None:
    """20,000 draws of 8 tokens: each frequency within 4 standard deviations."""
    draws = 20_000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -4.0])
    s = settings(draws)
    s.position = torch.arange(draws)
    s.seed = torch.full((draws,), 1234)
    chosen = best.sample(logits.repeat(draws, 1), s)
    expected = logits.softmax(0).double()
    frequency = torch.bincount(chosen, minlength=8).double() / draws
    assert ((frequency - expected).abs() <= 4 * (expected * (1 - expected) / draws).sqrt()).all()
