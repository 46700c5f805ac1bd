"""The short convolution and the gated delta rule: the reference against transformers, and to the bit
against itself wherever a step begins, alone and among others."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from ops import load, load_cpu
from ops.cpu.load import CpuOptions
from ops.op_set import RecurrentBatch
from tests.cache import cache_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ops.op_set import OpSet

KERNEL, CHANNELS = 4, 20
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 8, 12


@pytest.fixture(params=["reference", "cpu", "native", "gpu"])
def ops(request: pytest.FixtureRequest) -> OpSet:
    if request.param == "native":
        return load_cpu(CpuOptions(cache_folder(), kernels="native", threads=2), print)[0]
    return load(request.param)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(
    rows: Sequence[tuple[int, int, int]],
    saves: Sequence[tuple[int, int, int]] = (),
    *,
    slots: Sequence[int] | None = None,
) -> RecurrentBatch:
    """rows: (state slot gone on from, tokens before, new tokens); saves: (row, tokens, slot).
    slots: where rows are left, if not where they were."""
    sources = [slot if before else -1 for slot, before, _ in rows]
    own = [slot for slot, _, _ in rows] if slots is None else slots
    lengths = [length for _, _, length in rows]
    stops = sorted([*saves, *zip(range(len(rows)), lengths, own, strict=True)], key=lambda s: s[:2])
    return RecurrentBatch(
        sources=torch.tensor(sources),
        starts=torch.tensor([0, *accumulate(lengths)]),
        stops=torch.tensor([sum(s[0] < b for s in stops) for b in range(len(rows) + 1)]),
        stop_tokens=torch.tensor([tokens for _, tokens, _ in stops]),
        stop_slots=torch.tensor([slot for _, _, slot in stops]),
        crossing=any(slot in sources for _, _, slot in saves),
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
    length = 16 if ops.name == "gpu" else 40  # Triton's interpreter is slow
    whole, pieces = Sequences(ops, length), Sequences(ops, length)
    wanted = {row: whole.run({row: (0, length)})[row] for row in range(3)}
    given: dict[int, list[tuple[Tensor, Tensor]]] = {0: [], 1: [], 2: []}
    sizes, at = {0: size, 1: 3, 2: 11}, dict.fromkeys(range(3), 0)
    while min(at.values()) < length:
        step_of = {r: (n, min(n + sizes[r], length)) for r, n in at.items() if n < length}
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
    saves = ((0, 2, 3), (0, 9, 2), (1, 5, 1))
    batch = step([(0, 0, 9), (1, 0, 12)], saves, slots=(0, 0))
    x = torch.cat((rows.x[0, :9], rows.x[1, :12]))
    rows.ops.causal_conv(x, rows.weight, rows.inputs, batch)
    parts = (rows.q, rows.k, rows.v, rows.decay, rows.rate)
    q, k, v, decay, rate = (torch.cat((part[0, :9], part[1, :12])) for part in parts)
    rows.ops.gated_delta(q, k, v, decay, rate, rows.matrices, batch)
    for row, tokens, slot in saves:
        shorter.run({row: (0, tokens)})
        assert torch.equal(rows.inputs[slot], shorter.inputs[row + 1])
        assert torch.equal(rows.matrices[slot], shorter.matrices[row + 1])
    # Row 0 goes on from slot 2, and row 1 is saved in it.
    again = step([(2, 9, 6), (1, 5, 3)], [(1, 1, 2), (0, 1, -1)], slots=(1, 0))
    x = torch.cat((rows.x[0, 9:15], rows.x[1, 5:8]))
    got = rows.ops.causal_conv(x, rows.weight, rows.inputs, again)
    q, k, v, decay, rate = (torch.cat((part[0, 9:15], part[1, 5:8])) for part in parts)
    heads = rows.ops.gated_delta(q, k, v, decay, rate, rows.matrices, again)
    whole, _ = shorter.run({0: (0, 15)})[0], shorter.run({1: (0, 6)})
    for ours, want in zip((got[:6], heads[:6]), whole, strict=True):
        assert torch.equal(ours, want[9:])
    for slot, row in ((1, 0), (2, 1)):
        assert torch.equal(rows.inputs[slot], shorter.inputs[row + 1])
        assert torch.equal(rows.matrices[slot], shorter.matrices[row + 1])


def test_a_nan_stays_in_its_row(ops: OpSet) -> None:
    rows, broken = Sequences(ops, 6), Sequences(ops, 6)
    wanted = rows.run({0: (0, 6), 1: (0, 4)})
    broken.x[1] = broken.v[1] = torch.nan
    got = broken.run({0: (0, 6), 1: (0, 4)})
    assert all(torch.equal(a, b) for a, b in zip(got[0], wanted[0], strict=True))
    assert all(x.isnan().all() for x in got[1])
