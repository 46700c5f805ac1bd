"""Recurrent states on native kernels: against the reference, and to the bit against themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ops.reference import ReferenceOps
from tests.ops.cpu.cases import DTYPE_IDS, DTYPES, generator
from tests.ops.cpu.conftest import open_ops
from tests.ops.test_recurrent_ops import step

if TYPE_CHECKING:
    from torch import Tensor

    from ops.op_set import OpSet, RecurrentBatch

# More than a thread takes at once, and no multiple of it.
CHANNELS, KEY_DIM, VALUE_DIM = 300, 20, 70
KEY_HEADS, VALUE_HEADS, KERNEL, SLOTS = 2, 4, 3, 6


class Inputs:
    """Of so many tokens, strided, with states that rows go on from."""

    def __init__(self, tokens: int, dtype: torch.dtype = torch.float32) -> None:
        rand = generator(1)
        self.x = torch.randn(tokens, CHANNELS + 8, generator=rand).to(dtype)[:, :CHANNELS]
        self.weight = torch.randn(KERNEL, CHANNELS, generator=rand)
        self.inputs = torch.randn(SLOTS, KERNEL - 1, CHANNELS, generator=rand)
        qk, v = 2 * KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
        self.qkv = torch.randn(tokens, qk + v, generator=rand)
        self.decay = -torch.randn(tokens, VALUE_HEADS, generator=rand).exp()
        self.rate = torch.rand(tokens, VALUE_HEADS, generator=rand)
        self.matrices = torch.randn(SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM, generator=rand)

    def run(
        self, ops: OpSet, batch: RecurrentBatch, first: int = 0, last: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What both ops give for some tokens, and the states behind them."""
        inputs, matrices, some = self.inputs.clone(), self.matrices.clone(), slice(first, last)
        mixed = ops.causal_conv(self.x[some], self.weight, inputs, batch)
        keys = KEY_HEADS * KEY_DIM
        parts = self.qkv[some].split((keys, keys, VALUE_HEADS * VALUE_DIM), dim=1)
        q, k = (part.unflatten(1, (KEY_HEADS, KEY_DIM)) for part in parts[:2])
        v = parts[2].unflatten(1, (VALUE_HEADS, VALUE_DIM))
        heads = ops.gated_delta(q, k, v, self.decay[some], self.rate[some], matrices, batch)
        return mixed, heads, inputs, matrices


ROWS = [(1, 5, 9), (2, 0, 1), (3, 7, 4)]
SAVES = [(0, 1, 4), (0, 9, 5), (2, 3, -1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_tokens_and_states_equal_the_reference(native: OpSet, dtype: torch.dtype) -> None:
    inputs = Inputs(14, dtype)
    want = inputs.run(ReferenceOps(), step(ROWS, SAVES))
    for ours, theirs in zip(inputs.run(native, step(ROWS, SAVES)), want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_where_a_step_begins_changes_nothing(native: OpSet) -> None:
    inputs = Inputs(14)
    mixed, heads, kept, matrices = inputs.run(native, step([(1, 5, 14)]))
    first = inputs.run(native, step([(1, 5, 1)]), 0, 1)
    inputs.inputs, inputs.matrices = first[2:]
    rest = inputs.run(native, step([(1, 6, 13)]), 1)
    assert torch.equal(torch.cat((first[0], rest[0])), mixed)
    assert torch.equal(torch.cat((first[1], rest[1])), heads)
    assert torch.equal(rest[2], kept)
    assert torch.equal(rest[3], matrices)


def test_the_number_of_threads_changes_nothing(best: Any) -> None:
    inputs, path = Inputs(14), best.library.path.name.split("-")[0]
    want = inputs.run(open_ops(path, 1), step(ROWS, SAVES))
    for threads in (2, 3):
        got = inputs.run(open_ops(path, threads), step(ROWS, SAVES))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "source": ({"sources": torch.tensor([SLOTS, -1])}, IndexError, "a slot outside the states"),
    "slot": ({"stop_slots": torch.tensor([1, SLOTS])}, IndexError, "a slot outside the states"),
    "tokens": ({"starts": torch.tensor([0, 3, 15])}, IndexError, "do not fit"),
    "falling": ({"starts": torch.tensor([3, 0, 11])}, IndexError, "do not fit"),
    "stops": ({"stops": torch.tensor([0, 1, 3])}, IndexError, "do not fit"),
    "last stop": ({"stop_tokens": torch.tensor([3, 10])}, IndexError, "do not fit"),
    "type": ({"starts": torch.tensor([0, 3, 14]).int()}, TypeError, "starts"),
    "rows": ({"stops": torch.tensor([0, 1])}, ValueError, r"stops: shape \[2\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rows_that_do_not_fit_are_refused(best: OpSet, case: str) -> None:
    changes, error, message = WRONG[case]
    inputs, rows = Inputs(14), step([(1, 5, 3), (2, 0, 11)])
    inputs.run(best, rows)
    with pytest.raises(error, match=message):
        inputs.run(best, replace(rows, **changes))


def test_tensors_that_do_not_fit_are_refused(best: OpSet) -> None:
    rows, q, v = step([(1, 0, 2)]), torch.zeros(2, 2, 4), torch.zeros(2, 3, 4)
    rates, x, weight = torch.zeros(2, 3), torch.zeros(2, 8), torch.zeros(3, 8)
    with pytest.raises(ValueError, match="3 heads, expected a multiple of the heads of q, 2"):
        best.gated_delta(q, q, v, rates, rates, torch.zeros(2, 3, 4, 4), rows)
    with pytest.raises(ValueError, match=r"states: shape \[2, 3, 4, 5\]"):
        best.gated_delta(q[:, :1], q[:, :1], v, rates, rates, torch.zeros(2, 3, 4, 5), rows)
    with pytest.raises(ValueError, match=r"states: shape \[2, 1, 8\]"):
        best.causal_conv(x, weight, torch.zeros(2, 1, 8), rows)
