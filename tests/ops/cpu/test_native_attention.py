"""Paged attention against the reference, and its independence of everything but the sequence."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from ops import reference
from ops.op_set import AttentionBatch, AttentionSpec
from scripts._paged import paged_batch
from tests.ops.cpu.cases import DTYPE_IDS, DTYPES, elementwise_error, generator

if TYPE_CHECKING:
    from torch import Tensor

    from ops.cpu.native import NativeOps

ROWS = [(1, 1), (15, 3), (63, 63), (64, 10), (65, 1), (257, 100), (130, 1)]
HEADS = [(9, 3, 64), (4, 4, 80), (8, 1, 8), (2, 1, 256), (3, 1, 72), (16, 2, 128)]


def make_spec(kind: str, heads: int, dim: int) -> AttentionSpec:
    sinks = torch.randn(heads, generator=generator(3)) if kind in ("sinks", "all") else None
    window = {"window1": 1, "window20": 20, "window70": 70, "all": 70}.get(kind, 0)
    return AttentionSpec(dim**-0.5, window, 3.0 if kind in ("soft_cap", "all") else 0.0, sinks)


def rounded(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


class Problem(NamedTuple):
    """Arguments of an attention, and what it should give."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: AttentionBatch
    spec: AttentionSpec
    want: Tensor


@functools.cache
def problem(
    heads: int, kv_heads: int, dim: int, kind: str, page_size: int, dtype: torch.dtype
) -> Problem:
    """Every key that no row may read is NaN. Kept: the reference is slow, and every instruction
    path solves the same problems."""
    batch, _, _, slots = paged_batch(ROWS, page_size)
    k, v = (rounded(dtype, slots, kv_heads, dim, seed=seed) for seed in (1, 2))
    spec = make_spec(kind, heads, dim)
    fused = rounded(dtype, int(batch.qo_indptr[-1]), heads + 2, dim, seed=4)
    q = fused[:, :heads]  # strided
    want = reference.extend_attention(q.float(), k.float(), v.float(), batch, spec)
    owned = torch.zeros(slots, dtype=torch.bool)
    for b, (kv_len, new) in enumerate(ROWS):
        first = max(0, kv_len - new - spec.window + 1) if spec.window else 0
        owned[reference.row_slots(batch, b)[first:]] = True
    k[~owned] = v[~owned] = float("nan")
    return Problem(q, k, v, batch, spec, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "kind", ["plain", "window1", "window20", "window70", "soft_cap", "sinks", "all"]
)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.sampled(50)
def test_attention_equals_the_reference_and_reads_no_foreign_key(
    native: NativeOps,
    heads: int,
    kv_heads: int,
    dim: int,
    kind: str,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    q, k, v, batch, spec, want = problem(heads, kv_heads, dim, kind, page_size, dtype)
    got = native.extend_attention(q, k, v, batch, spec)
    # bfloat16: weights and output are rounded to 8 bits.
    assert elementwise_error(got, want) <= (1e-5 if dtype == torch.float32 else 2e-2)


def slice_of(batch: AttentionBatch, b: int, kv_len: int, new: int) -> AttentionBatch:
    """Row b of a batch alone, with fewer keys or new tokens."""
    return AttentionBatch(
        block_table=batch.block_table,
        rows=batch.rows[b : b + 1],
        qo_indptr=torch.tensor([0, new], dtype=torch.int32),
        kv_lens=torch.tensor([kv_len], dtype=torch.int32),
        page_size=batch.page_size,
        max_q_len=new,
        max_kv_len=kv_len,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("kind", ["plain", "window20", "all"])
def test_a_query_depends_on_its_sequence_alone_to_the_bit(
    native: NativeOps, kind: str, dtype: torch.dtype
) -> None:
    """In a batch, alone, in chunks of any size and token by token."""
    batch, _, _, slots = paged_batch([(200, 200), (90, 90), (70, 1)], 16)
    k, v = (rounded(dtype, slots, 3, 64, seed=seed) for seed in (1, 2))
    spec = make_spec(kind, 9, 64)
    q = rounded(dtype, 291, 9, 64, seed=4)
    together = native.extend_attention(q, k, v, batch, spec)
    for b, (kv_len, first) in enumerate([(200, 0), (90, 200)]):
        for chunk in (1, 7, 64, 100, kv_len):
            parts = []
            for begin in range(0, kv_len, chunk):
                end = min(begin + chunk, kv_len)
                part = slice_of(batch, b, end, end - begin)
                queries = q[first + begin : first + end]
                parts.append(native.extend_attention(queries, k, v, part, spec))
            assert torch.equal(torch.cat(parts), together[first : first + kv_len])


def test_page_size_and_page_order_change_nothing(native: NativeOps) -> None:
    results = []
    for page_size, seed in ((1, 0), (1, 5), (16, 0), (48, 1)):
        batch, _, _, slots = paged_batch([(150, 4)], page_size, seed)
        k, v = (torch.zeros(slots, 2, 32) for _ in range(2))
        of_row = reference.row_slots(batch, 0)
        k[of_row], v[of_row] = rounded(torch.float32, 2, 150, 2, 32)
        q = rounded(torch.float32, 4, 4, 32, seed=1)
        results.append(native.extend_attention(q, k, v, batch, make_spec("plain", 4, 32)))
    assert all(torch.equal(result, results[0]) for result in results)


def test_decode_attention_is_extend_attention_of_one_token(native: NativeOps) -> None:
    batch, _, _, slots = paged_batch([(5, 1), (77, 1), (300, 1)], 16)
    k, v = (rounded(torch.bfloat16, slots, 2, 64, seed=seed) for seed in (1, 2))
    q = rounded(torch.bfloat16, 3, 6, 64)
    spec = make_spec("plain", 6, 64)
    extend = native.extend_attention(q, k, v, batch, spec)
    assert torch.equal(native.decode_attention(q, k, v, batch, spec), extend)


def test_large_scores_do_not_overflow(native: NativeOps) -> None:
    """Softmax of scores far apart is one-hot, not NaN."""
    batch, _, _, slots = paged_batch([(40, 40)], 16)
    k = rounded(torch.float32, slots, 1, 16) * 1e4
    v = rounded(torch.float32, slots, 1, 16, seed=1)
    q = rounded(torch.float32, 40, 1, 16, seed=2) * 1e4
    spec = make_spec("plain", 1, 16)
    got = native.extend_attention(q, k, v, batch, spec)
    assert elementwise_error(got, reference.extend_attention(q, k, v, batch, spec)) <= 1e-5


def test_a_nan_query_gives_nan(native: NativeOps) -> None:
    batch, _, _, slots = paged_batch([(40, 2)], 16)
    k, v = (rounded(torch.float32, slots, 1, 16, seed=seed) for seed in (1, 2))
    q = rounded(torch.float32, 2, 1, 16)
    q[1, 0, 3] = float("nan")
    got = native.extend_attention(q, k, v, batch, make_spec("plain", 1, 16))
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


@pytest.mark.parametrize("dim", [12, 264])
def test_other_head_dimensions_run_on_torch(best: NativeOps, dim: int) -> None:
    batch, _, _, slots = paged_batch(ROWS, 16)
    k, v = (rounded(torch.float32, slots, 2, dim, seed=seed) for seed in (1, 2))
    q = rounded(torch.float32, int(batch.qo_indptr[-1]), 4, dim)
    spec = make_spec("plain", 4, dim)
    got = best.extend_attention(q, k, v, batch, spec)
    assert elementwise_error(got, reference.extend_attention(q, k, v, batch, spec)) <= 1e-5
