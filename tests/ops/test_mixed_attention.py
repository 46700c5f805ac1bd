"""Decode rows and prompts in one step, on every op set: each kind gets what it gets alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ops import reference
from ops.cpu.op_set import CpuOps
from ops.gpu.op_set import GpuOps
from ops.reference import ReferenceOps
from scripts._paged import Problem, paged_problem, relative_error
from scripts._triton_interpreter import patch_loop_bounds

if TYPE_CHECKING:
    from ops.decoder import Backend

patch_loop_bounds()

# The interpreter computes with numpy, which warns of what is meant: exp of a large argument in the
# soft cap's tanh, and the NaN that padding holds.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

DECODING = [(0, 1), (140, 1)]
PROMPTS = [(5, 11), (0, 1)]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 19},
    "soft cap and sinks": {"soft_cap": 2.0, "sinks": True},
}


@pytest.fixture(params=[ReferenceOps, CpuOps, GpuOps])
def ops(request: pytest.FixtureRequest) -> Backend:
    made: Backend = request.param()
    return made


def split(problem: Problem, *, tokens: int = 0, decode_rows: int = 0, rows: int = 0) -> Problem:
    """The problem with its first rows, of one token each, apart; padded to the sizes given.

    A row of padding has the key of a page of NaN, and its tokens are NaN.
    """
    count, batch = len(DECODING), problem.batch
    unused = next(row for row in range(len(batch.block_table)) if row not in batch.rows.tolist())

    def padded(values: torch.Tensor, size: int, value: int) -> torch.Tensor:
        return torch.cat((values, values.new_full((max(0, size - len(values)),), value)))

    decode = replace(
        batch,
        rows=padded(batch.rows[:count], decode_rows, unused),
        kv_lens=padded(batch.kv_lens[:count], decode_rows, 1),
        qo_indptr=torch.arange(max(count, decode_rows) + 1, dtype=torch.int32),
        max_q_len=1,
    )
    end = int(batch.qo_indptr[-1])
    others = replace(
        batch,
        rows=padded(batch.rows[count:], rows, unused),
        kv_lens=padded(batch.kv_lens[count:], rows, 1),
        qo_indptr=padded(batch.qo_indptr[count:], rows + 1, end),
        decode=decode,
    )
    more = problem.q.new_full((max(0, tokens - end), *problem.q.shape[1:]), float("nan"))
    return replace(problem, q=torch.cat((problem.q, more)), batch=others)


def problem_of(feature: str) -> Problem:
    """With 16 heads of a KV head the two decode rows fill a tile before the first of the prompts."""
    options = FEATURES[feature]
    rows = DECODING + PROMPTS
    return paged_problem(rows, head_dim=16, group=16, kv_heads=1, page_size=4, **options)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.sampled(5)
def test_every_row_gets_what_it_gets_alone(feature: str, ops: Backend) -> None:
    problem = problem_of(feature)
    step = split(problem)
    want = reference.extend_attention(*problem.arguments())
    got = ops.mixed_attention(*step.arguments())
    assert relative_error(got, want) < 1e-5
    count = len(DECODING)
    assert step.batch.decode is not None
    alone = replace(problem, q=problem.q[:count], batch=step.batch.decode)
    assert torch.equal(got[:count], ops.decode_attention(*alone.arguments()))


def test_padding_changes_nothing(ops: Backend) -> None:
    """Rows of padding among the decode rows stand at the tokens of prompts."""
    problem = problem_of("plain")
    end = int(problem.batch.qo_indptr[-1])
    want = ops.mixed_attention(*split(problem).arguments())
    padded = split(problem, tokens=end + 20, decode_rows=4, rows=3)
    got = ops.mixed_attention(*padded.arguments())
    assert torch.equal(got[:end], want)
    assert torch.isfinite(got[end:]).all()


def test_no_decode_rows_and_no_prompts_are_divisions_too(ops: Backend) -> None:
    """As in a captured step, whose kinds of rows are bounds: the others are then padding alone."""
    problem = split(problem_of("plain"), decode_rows=3, rows=3)
    both = ops.mixed_attention(*problem.arguments())
    first, end = len(DECODING), int(problem.batch.qo_indptr[-1])
    batch, decode = problem.batch, problem.batch.decode
    assert decode is not None
    none = batch.qo_indptr.new_full(batch.qo_indptr.shape, first)
    alone = replace(problem, batch=replace(batch, qo_indptr=none))
    assert torch.equal(ops.mixed_attention(*alone.arguments())[:first], both[:first])
    unused = decode.rows[-1].expand(3).contiguous()
    waiting = replace(decode, rows=unused, kv_lens=torch.ones(3, dtype=torch.int32))
    prompts = replace(
        problem,
        q=problem.q[first:],
        batch=replace(batch, qo_indptr=batch.qo_indptr - first, decode=waiting),
    )
    got = ops.mixed_attention(*prompts.arguments())
    assert torch.equal(got[: end - first], both[first:end])
