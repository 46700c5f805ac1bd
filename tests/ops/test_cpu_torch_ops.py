"""The plain torch CPU ops against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from ops.cpu.op_set import CpuOps
from ops.op_set import AttentionSpec, OpSet
from ops.reference import ReferenceOps
from scripts._paged import paged_batch

REFERENCE = ReferenceOps()
CPU = CpuOps()
BOTH: tuple[OpSet, OpSet] = (CPU, REFERENCE)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


MIXED = [(1, 1), (63, 63), (300, 17), (111, 1), (16, 1), (17, 2), (400, 390)]
DECODE = [(1, 1), (15, 1), (16, 1), (17, 1), (111, 1), (112, 1), (257, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("rows", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize(
    "kind", ["plain", "window1", "window16", "window40", "soft_cap", "sinks", "all"]
)
@pytest.mark.sampled(16)
def test_attention_equals_the_reference_and_reads_no_foreign_key(
    kind: str, rows: list[tuple[int, int]], page_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    batch, _, _, size = paged_batch(rows, page_size)
    heads, kv_heads, dim = 6, 2, 32
    pools = torch.randn(2, size, kv_heads, dim, generator=generator)
    q = torch.randn(int(batch.qo_indptr[-1]), heads + 3, dim, generator=generator)
    sinks = torch.randn(heads, generator=generator) if kind in ("sinks", "all") else None
    window = {"window1": 1, "window16": 16, "window40": 40, "all": 20}.get(kind, 0)
    spec = AttentionSpec(dim**-0.5, window, 5.0 if kind in ("soft_cap", "all") else 0.0, sinks)
    pools, q = pools.to(dtype), q.to(dtype)[:, 1 : heads + 1]
    # NaN in every slot that no row may read: page 0, the tails of last pages, and what lies
    # before the window of a row's first new token.
    readable = torch.zeros(size, dtype=torch.bool)
    for b, (kv, new) in enumerate(rows):
        first = max(0, kv - new - window + 1) if window else 0
        at = torch.arange(first, kv)
        readable[batch.block_table[b + 1].long()[at // page_size] * page_size + at % page_size] = 1
    pools[:, ~readable] = math.nan
    want = REFERENCE.extend_attention(q, pools[0], pools[1], batch, spec)
    run = CPU.decode_attention if batch.max_q_len == 1 else CPU.extend_attention
    got = run(q, pools[0], pools[1], batch, spec)
    assert want.isfinite().all()
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_elementwise_ops_equal_the_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, 4, 30, generator=generator).to(dtype)
    weight = torch.randn(30, generator=generator).to(dtype)
    assert torch.equal(
        CPU.rms_norm(x[:, 1:3], weight, 1e-5), REFERENCE.rms_norm(x[:, 1:3], weight, 1e-5)
    )
    residuals = [torch.ones(7, 30, dtype=dtype), torch.ones(7, 30, dtype=dtype)]
    normed = [
        ops.add_rms_norm(x[:, 0], residual, weight, 1e-5)
        for ops, residual in zip(BOTH, residuals, strict=True)
    ]
    assert torch.equal(*normed)
    assert torch.equal(*residuals)
    assert torch.equal(residuals[0], x[:, 0] + 1)
    wide = weight.float()
    assert torch.equal(CPU.rms_norm(x, wide, 1e-5), REFERENCE.rms_norm(x, wide, 1e-5))
    flat = x.flatten(1)
    assert torch.equal(CPU.silu_and_mul(flat), REFERENCE.silu_and_mul(flat))
    for tanh in (True, False):
        assert torch.equal(
            CPU.gelu_and_mul(flat, tanh=tanh), REFERENCE.gelu_and_mul(flat, tanh=tanh)
        )


@pytest.mark.parametrize("rows", [1, 3, 24, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_the_library_product(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 96, generator=generator)
    weight = torch.randn(80, 96, generator=generator)
    b = torch.randn(80, generator=generator) if bias else None
    want = torch.nn.functional.linear(x, weight, b)
    torch.testing.assert_close(
        CPU.linear(x, CPU.pack_linear(weight, b)), want, atol=1e-4, rtol=1e-5
    )
    x16, w16, b16 = x.bfloat16(), weight.bfloat16(), None if b is None else b.bfloat16()
    want = torch.nn.functional.linear(x16, w16, b16)
    assert torch.equal(CPU.linear(x16, CPU.pack_linear(w16, b16)), want)


def test_linear_falls_back_where_there_is_no_prepacked_product() -> None:
    half = torch.randn(8, 16, generator=torch.Generator().manual_seed(4)).half()
    packed = CPU.pack_linear(half)
    assert not packed.prepacked
    assert torch.equal(CPU.linear(half, packed), half @ half.T)


def test_quantization_is_refused() -> None:
    with pytest.raises(ValueError, match="int8"):
        CPU.pack_linear(torch.zeros(2, 2), quantization="int8")


@pytest.mark.parametrize("slots", [[3, 7, 0, 5], [3, -1, 7, -1]], ids=["plain", "negative"])
def test_store_kv_writes_its_slots_alone(slots: list[int]) -> None:
    k, v = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(5))
    pools = torch.full((2, 9, 2, 8), 7.0)
    CPU.store_kv(k[:, 1:3], v[:, 2:4], pools[0], pools[1], torch.tensor(slots))
    for slot in range(9):
        if slot in slots:
            at = slots.index(slot)
            assert torch.equal(pools[0, slot], k[at, 1:3])
            assert torch.equal(pools[1, slot], v[at, 2:4])
        else:
            assert (pools[:, slot] == 7).all()
