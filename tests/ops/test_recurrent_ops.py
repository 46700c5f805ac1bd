"""The short convolution and the gated delta rule: the reference against transformers, and to the bit
against itself wherever a step begins, alone and among others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from ops import load
from ops.op_set import RecurrentBatch, SavedRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ops.op_set import OpSet

KERNEL, CHANNELS = 4, 20
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 8, 12


@pytest.fixture(params=["reference", "cpu", "gpu"])
def ops(request: pytest.FixtureRequest) -> OpSet:
    return load(request.param)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(rows: Sequence[tuple[int, int, int]]) -> RecurrentBatch:
    """rows: (state slot, tokens before, new tokens)."""
    slots, before, lengths = (torch.tensor(column) for column in zip(*rows, strict=True))
    order = sorted(range(len(rows)), key=lambda b: -rows[b][2])
    return RecurrentBatch(
        sources=slots,
        slots=slots,
        fresh=before == 0,
        starts=lengths.cumsum(0) - lengths,
        lengths=lengths,
        token_rows=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        order=torch.tensor(order),
        counts=tuple(rows[b][2] for b in order),
    )


class Sequences:
    """Rows that go through an op step by step; what they gave, and their states."""

    def __init__(self, ops: OpSet, tokens: int) -> None:
        self.ops = ops
        # What an earlier request left must not be seen.
        self.inputs = torch.full((4, KERNEL - 1, CHANNELS), torch.nan)
        self.matrices = torch.full((4, VALUE_HEADS, KEY_DIM, VALUE_DIM), torch.nan)
        self.x = randn(3, tokens, CHANNELS, seed=1)
        self.weight = randn(KERNEL, CHANNELS, seed=2)
        self.q = randn(3, tokens, KEY_HEADS, KEY_DIM, seed=3)
        self.k = randn(3, tokens, KEY_HEADS, KEY_DIM, seed=4)
        self.v = randn(3, tokens, VALUE_HEADS, VALUE_DIM, seed=5)
        self.decay = -randn(3, tokens, VALUE_HEADS, seed=6).exp()
        self.rate = randn(3, tokens, VALUE_HEADS, seed=7).sigmoid()

    def run(self, pieces: dict[int, tuple[int, int]]) -> dict[int, tuple[Tensor, Tensor]]:
        """Args: pieces: by row, from which to which token. Returns: by row, what both ops gave."""
        batch = step([(row + 1, first, last - first) for row, (first, last) in pieces.items()])

        def of(x: Tensor) -> Tensor:
            return torch.cat([x[row, first:last] for row, (first, last) in pieces.items()])

        mixed = self.ops.causal_conv(of(self.x), self.weight, self.inputs, batch)
        q, k, v, decay, rate = map(of, (self.q, self.k, self.v, self.decay, self.rate))
        heads = self.ops.gated_delta(q, k, v, decay, rate, self.matrices, batch)
        lengths = [last - first for first, last in pieces.values()]
        given = zip(mixed.split(lengths), heads.split(lengths), strict=True)
        return dict(zip(pieces, given, strict=True))


def test_the_convolution_is_transformers(ops: OpSet) -> None:
    rows = Sequences(ops, 9)
    got, _ = rows.run({0: (0, 9)})[0]
    want = torch.nn.functional.conv1d(
        rows.x[:1].transpose(1, 2), rows.weight.t()[:, None], padding=KERNEL - 1, groups=CHANNELS
    )[0, :, :9].t()
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rule", ["recurrent", "chunk"])
def test_the_delta_rule_is_transformers(ops: OpSet, rule: str) -> None:
    rows = Sequences(ops, 70)
    _, got = rows.run({0: (0, 70)})[0]
    published = getattr(theirs, f"torch_{rule}_gated_delta_rule")
    # Each key head stands for as many value heads, which older releases leave to the caller.
    times = rows.v.shape[2] // rows.q.shape[2]
    arguments = [x[:1].repeat_interleave(times, 2) for x in (rows.q, rows.k)] + [rows.v[:1]]
    want, state = published(
        *arguments,
        g=rows.decay[:1],
        beta=rows.rate[:1],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(got, want[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(rows.matrices[1], state[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_a_token_gets_the_same_wherever_steps_begin_and_whatever_is_beside_it(
    ops: OpSet, size: int
) -> None:
    """To the bit, states included. The others are longer and shorter, and end earlier and later."""
    whole, pieces = Sequences(ops, 40), Sequences(ops, 40)
    wanted = {row: whole.run({row: (0, 40)})[row] for row in range(3)}
    given: dict[int, list[tuple[Tensor, Tensor]]] = {0: [], 1: [], 2: []}
    sizes, at = {0: size, 1: 3, 2: 11}, dict.fromkeys(range(3), 0)
    while min(at.values()) < 40:
        step_of = {r: (n, min(n + sizes[r], 40)) for r, n in at.items() if n < 40}
        for row, got in pieces.run(step_of).items():
            given[row].append(got)
            at[row] = step_of[row][1]
    for row, parts in given.items():
        for ours, want in zip(zip(*parts, strict=True), wanted[row], strict=True):
            assert torch.equal(torch.cat(ours), want)
    assert torch.equal(pieces.inputs[1:], whole.inputs[1:])
    assert torch.equal(pieces.matrices[1:], whole.matrices[1:])


def test_states_are_saved_on_the_way_and_gone_on_from(ops: OpSet) -> None:
    """A saved state is that of a row which ends there, also where another row of the step goes on
    from the slot that it is saved in."""
    rows, shorter = Sequences(ops, 20), Sequences(ops, 20)
    saves = (SavedRow(0, 1, 2, 3), SavedRow(0, 1, 9, 2), SavedRow(1, 0, 5, 1))
    batch = step([(0, 0, 9), (1, 0, 12)])
    batch = replace(batch, slots=torch.tensor([0, 0]), saves=saves)
    x = torch.cat((rows.x[0, :9], rows.x[1, :12]))
    rows.ops.causal_conv(x, rows.weight, rows.inputs, batch)
    parts = (rows.q, rows.k, rows.v, rows.decay, rows.rate)
    q, k, v, decay, rate = (torch.cat((part[0, :9], part[1, :12])) for part in parts)
    rows.ops.gated_delta(q, k, v, decay, rate, rows.matrices, batch)
    for row, _, tokens, slot in saves:
        shorter.run({row: (0, tokens)})
        assert torch.equal(rows.inputs[slot], shorter.inputs[row + 1])
        assert torch.equal(rows.matrices[slot], shorter.matrices[row + 1])
    # Row 0 goes on from slot 2 and is saved in it.
    again = replace(step([(1, 9, 6)]), sources=torch.tensor([2]), saves=(SavedRow(0, 0, 1, 2),))
    got = rows.ops.causal_conv(rows.x[0, 9:15], rows.weight, rows.inputs, again)
    whole = shorter.run({0: (0, 15)})[0]
    assert torch.equal(got, whole[0][9:])


def test_a_nan_stays_in_its_row(ops: OpSet) -> None:
    rows, broken = Sequences(ops, 6), Sequences(ops, 6)
    wanted = rows.run({0: (0, 6), 1: (0, 4)})
    broken.x[1] = broken.v[1] = torch.nan
    got = broken.run({0: (0, 6), 1: (0, 4)})
    assert all(torch.equal(a, b) for a, b in zip(got[0], wanted[0], strict=True))
    assert all(x.isnan().all() for x in got[1])
