"""Random paged batches and attention problems: shuffled pages, and what no row may read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ops.op_set import AttentionBatch, AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """What an attention op takes."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    batch: AttentionBatch
    spec: AttentionSpec

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, AttentionBatch, AttentionSpec]:
        return self.q, self.k_pool, self.v_pool, self.batch, self.spec

    def to(self, device: torch.device) -> Problem:
        batch, spec = self.batch, self.spec
        tensors = ("block_table", "rows", "qo_indptr", "kv_lens")
        moved = {name: getattr(batch, name).to(device) for name in tensors}
        sinks = None if spec.sinks is None else spec.sinks.to(device)
        return Problem(
            q=self.q.to(device),
            k_pool=self.k_pool.to(device),
            v_pool=self.v_pool.to(device),
            batch=replace(batch, **moved),
            spec=replace(spec, sinks=sinks),
        )


def paged_problem(
    rows: Sequence[tuple[int, int]],
    *,
    head_dim: int,
    group: int,
    kv_heads: int = 2,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    seed: int = 0,
) -> Problem:
    """A problem of rows (prefix, new tokens) over a pool twice as large as they need.

    Pages, and the rows of the request table, are in random order. q is strided. Slots that no row
    owns, the tails of last pages included, hold NaN, and table entries past a row's pages name
    pages of NaN: reading any of it shows.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * group
    kv_lens = [prefix + new for prefix, new in rows]
    counts = [-(-kv_len // page_size) for kv_len in kv_lens]
    total = 2 * sum(counts) + 2
    order = torch.randperm(total - 1, generator=generator) + 1
    owned, foreign = order[: sum(counts)].split(counts), int(order[-1])
    table = torch.full((len(rows) + 3, max(counts) + 1), foreign, dtype=torch.int32)
    table_rows = torch.randperm(len(rows) + 3, generator=generator)[: len(rows)]
    pools = torch.full((2, total * page_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    for row, pages, kv_len in zip(table_rows, owned, kv_lens, strict=True):
        table[row, : len(pages)] = pages
        at = torch.arange(kv_len)
        slots = pages[at // page_size] * page_size + at % page_size
        values = torch.randn(2, kv_len, kv_heads, head_dim, generator=generator)
        pools[:, slots] = values.to(dtype)
    lengths = torch.tensor([0] + [new for _, new in rows])
    q = torch.randn(int(lengths.sum()), heads + 2, head_dim, generator=generator).to(dtype)
    return Problem(
        q=q[:, :heads],
        k_pool=pools[0],
        v_pool=pools[1],
        batch=AttentionBatch(
            block_table=table,
            rows=table_rows.int(),
            qo_indptr=lengths.cumsum(0).int(),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            page_size=page_size,
            max_q_len=max(new for _, new in rows),
            max_kv_len=max(kv_lens),
        ),
        spec=AttentionSpec(
            scale=head_dim**-0.5,
            window=window,
            soft_cap=soft_cap,
            sinks=torch.randn(heads, generator=generator) if sinks else None,
        ),
    )


def paged_batch(
    rows: Sequence[tuple[int, int]], page_size: int, seed: int = 0
) -> tuple[AttentionBatch, Tensor, Tensor, int]:
    """A batch of rows (kv_len, new tokens) on shuffled pages.

    Returns: the batch, the new tokens' positions and slots [T], and the slots of the pool.
    """
    pages = [-(-kv // page_size) for kv, _ in rows]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(seed)) + 1
    # Columns past a row's pages name pages outside the pool: they must never be followed.
    table = torch.full((len(rows) + 1, max(pages) + 1), 2**30, dtype=torch.int32)
    positions, slots, at = [], [], 0
    for row, (kv_len, new) in enumerate(rows, start=1):
        table[row, : pages[row - 1]] = order[at : at + pages[row - 1]].int()
        at += pages[row - 1]
        position = torch.arange(kv_len - new, kv_len)
        positions.append(position)
        slots.append(table[row, position // page_size].long() * page_size + position % page_size)
    batch = AttentionBatch(
        block_table=table,
        rows=torch.arange(1, len(rows) + 1, dtype=torch.int32),
        qo_indptr=torch.tensor([0] + [new for _, new in rows]).cumsum(0).int(),
        kv_lens=torch.tensor([kv for kv, _ in rows], dtype=torch.int32),
        page_size=page_size,
        max_q_len=max(new for _, new in rows),
        max_kv_len=max(kv for kv, _ in rows),
    )
    return batch, torch.cat(positions), torch.cat(slots), (sum(pages) + 1) * page_size


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected value; inf where something is not finite."""
    difference = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
    return float(difference) if torch.isfinite(difference) else float("inf")
