"""Faults that attention kernels of other servers had; each would show here."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ops.gpu.decode_attention import decode_attention
from ops.gpu.extend_attention import extend_attention
from ops.gpu.store_kv import store_kv
from ops.op_set import AttentionBatch, AttentionSpec
from ops.reference import extend_attention as reference_attention
from scripts._paged import paged_problem, relative_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

HEAD_DIM = 64
OPS = pytest.mark.parametrize("op", [extend_attention, decode_attention], ids=["extend", "decode"])


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[Tensor]:
    """Slots [2**25 + 64, 1, 64] float16: elements past 2**31, in a file without blocks."""
    slots = 2**25 + 64
    pool = np.lib.format.open_memmap(
        tmp_path / "pool.npy", mode="w+", dtype=np.float16, shape=(slots, 1, HEAD_DIM)
    )
    yield torch.from_numpy(pool)
    (tmp_path / "pool.npy").unlink()


def _at_the_end(pool: Tensor, page_size: int, kv_lens: list[int]) -> AttentionBatch:
    """Rows whose keys stand in the pool's last slots, which are filled with random values."""
    pages = -(-max(kv_lens) // page_size)
    last = pool.shape[0] // page_size - 1
    table = torch.zeros(2, pages, dtype=torch.int32)
    table[1] = torch.arange(last, last - pages, -1)
    start = (last - pages + 1) * page_size
    pool[start:] = torch.randn(pool[start:].shape, generator=torch.Generator().manual_seed(2))
    return AttentionBatch(
        block_table=table,
        rows=torch.ones(len(kv_lens), dtype=torch.int32),
        qo_indptr=torch.arange(len(kv_lens) + 1, dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        page_size=page_size,
        max_q_len=1,
        max_kv_len=max(kv_lens),
    )


@OPS
@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_past_two_to_the_31_elements(op, page_size: int, huge: Tensor) -> None:
    """Slot times stride wraps in 32 bits (sglang 20389)."""
    batch = _at_the_end(huge, page_size, [40])
    q = torch.randn(1, 2, HEAD_DIM, generator=torch.Generator().manual_seed(0)).half()
    spec = AttentionSpec(0.125)
    got = op(q, huge, huge, batch, spec)
    expected = reference_attention(q, huge, huge, batch, spec)
    assert float(expected.abs().max()) > 0.1
    assert relative_error(got, expected) <= 2e-3


@OPS
def test_queries_past_two_to_the_31_elements(op, huge: Tensor) -> None:
    """Token times stride wraps in 32 bits: three queries, each 2**30 elements after the last."""
    batch = _at_the_end(huge, 16, [40, 33, 20])
    q = huge.as_strided((3, 1, HEAD_DIM), (2**30, HEAD_DIM, 1))
    q.copy_(torch.randn(3, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0)))
    spec = AttentionSpec(0.125)
    expected = reference_attention(q, huge, huge, batch, spec)
    assert relative_error(op(q, huge, huge, batch, spec), expected) <= 2e-3


def test_storing_past_two_to_the_31_elements(huge: Tensor) -> None:
    k = torch.randn(2, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0)).half()
    slots = torch.tensor([huge.shape[0] - 1, 5])
    store_kv(k, k, huge, huge, slots)
    assert torch.equal(huge[slots], k)


def test_storing_skips_negative_slots() -> None:
    """-1 marks padding; as an index it would be the last slot (vllm 43869)."""
    pools = torch.zeros(2, 9, 2, HEAD_DIM)
    k, v = torch.randn(2, 4, 2, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    store_kv(k, v, pools[0], pools[1], torch.tensor([3, -1, 7, -1]))
    expected = torch.zeros(2, 9, 2, HEAD_DIM)
    expected[0, [3, 7]], expected[1, [3, 7]] = k[[0, 2]], v[[0, 2]]
    assert torch.equal(pools, expected)


@pytest.mark.parametrize("length", [15, 16, 17, 18, 40])
def test_a_decode_row_sees_the_window_of_a_prefill_row(length: int) -> None:
    """W keys in prefill and W - 1 in decode (sglang 32087)."""
    problem = paged_problem([(0, length)], head_dim=HEAD_DIM, group=2, window=16)
    prefill = extend_attention(*problem.arguments())
    last = AttentionBatch(
        block_table=problem.batch.block_table,
        rows=problem.batch.rows,
        qo_indptr=torch.tensor([0, 1], dtype=torch.int32),
        kv_lens=problem.batch.kv_lens,
        page_size=problem.batch.page_size,
        max_q_len=1,
        max_kv_len=length,
    )
    decode = decode_attention(problem.q[-1:], problem.k_pool, problem.v_pool, last, problem.spec)
    assert relative_error(decode[0], prefill[-1]) <= 1e-6
    assert relative_error(prefill, reference_attention(*problem.arguments())) <= 1e-5


@OPS
@pytest.mark.parametrize("page_size", [1, 16])
def test_nan_outside_of_the_window_is_not_read(op, page_size: int) -> None:
    """Keys outside of the window masked but their values read: 0 * NaN (vllm 30887)."""
    window, prefix = 20, 150
    problem = paged_problem(
        [(prefix, 1)], head_dim=HEAD_DIM, group=2, page_size=page_size, window=window
    )
    clean = op(*problem.arguments())
    pages = problem.batch.block_table[problem.batch.rows[0]].long()
    at = torch.arange(prefix + 1 - window)
    slots = pages[at // page_size] * page_size + at % page_size
    problem.k_pool[slots] = float("nan")
    problem.v_pool[slots] = float("nan")
    got = op(*problem.arguments())
    assert torch.equal(got, clean)
    assert relative_error(got, reference_attention(*problem.arguments())) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 8, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
def test_windows_smaller_than_a_tile(window: int, dtype: torch.dtype) -> None:
    """A tile in which a query sees no key has the maximum -inf (vllm 4405)."""
    rows = [(150, 1), (100, 40), (0, 70), (31, 33)]
    problem = paged_problem(rows, head_dim=HEAD_DIM, group=3, window=window, dtype=dtype)
    expected = reference_attention(*problem.arguments())
    tolerance = 1e-5 if dtype is torch.float32 else 2e-3
    assert relative_error(extend_attention(*problem.arguments()), expected) <= tolerance
    steps = paged_problem(
        [(prefix + new - 1, 1) for prefix, new in rows],
        head_dim=HEAD_DIM,
        group=3,
        window=window,
        dtype=dtype,
    )
    decoded = decode_attention(*steps.arguments())
    assert relative_error(decoded, reference_attention(*steps.arguments())) <= tolerance


@OPS
def test_table_entries_past_a_row_are_not_followed(op) -> None:
    """A table row keeps page numbers of its last request; here they point outside of the pool."""
    problem = paged_problem([(20, 1), (3, 1)], head_dim=HEAD_DIM, group=1, page_size=1)
    table = problem.batch.block_table
    for row, kv_len in zip(problem.batch.rows, problem.batch.kv_lens, strict=True):
        table[row, kv_len:] = 2**30
    got = op(*replace(problem, batch=replace(problem.batch, block_table=table)).arguments())
    assert relative_error(got, reference_attention(*problem.arguments())) <= 1e-5


@pytest.mark.parametrize("group", [1, 3])
def test_window_soft_cap_and_sinks_hold_together(group: int) -> None:
    """One that is dropped where another is on shows in no test of each alone: a soft cap in the
    sliding layers (Gemma 2)."""
    options: dict[str, Any] = {"window": 19, "soft_cap": 2.0, "sinks": True, "kv_heads": 1}
    options |= {"head_dim": HEAD_DIM, "group": group}
    for op, rows in (
        (extend_attention, [(40, 20), (17, 1), (0, 5)]),
        (decode_attention, [(150, 1), (17, 1), (0, 1)]),
    ):
        problem = paged_problem(rows, **options)
        expected = reference_attention(*problem.arguments())
        assert relative_error(op(*problem.arguments()), expected) <= 1e-5
