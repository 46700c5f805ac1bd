"""Keys and values as codes: what the kernels store and read, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from ops import kv_codes, reference
from ops.kv_codes import CODE_DTYPES
from ops.op_set import AttentionSpec, KvScales
from ops.reference import ReferenceOps
from runtime.models.decoder import Decoder
from scripts._paged import paged_batch
from tests.ops.cpu.cases import (
    DTYPE_IDS,
    DTYPES,
    elementwise_error,
    generator,
    prefill_step,
    tiny_model,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ops.blocks.block import DecoderStep
    from ops.cpu.native import NativeOps
    from ops.decoder import DecoderModel

KINDS = pytest.mark.parametrize("kind", CODE_DTYPES)
ROWS = [(1, 1), (15, 3), (64, 10), (65, 1), (257, 100), (130, 1)]
NAN = float("nan")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def empty_pools(slots: int, heads: int, dim: int, kind: str) -> tuple[Tensor, Tensor, KvScales]:
    """Scales are NaN: what is read without having been written shows."""
    k, v = (torch.full((slots, heads, dim), 77).to(CODE_DTYPES[kind]) for _ in range(2))
    return k, v, KvScales(torch.full((slots, heads), NAN), torch.full((slots, heads), NAN))


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("dim", [8, 64, 72])
def test_codes_and_scales_are_those_of_the_reference(
    native: NativeOps, dim: int, dtype: torch.dtype, kind: str
) -> None:
    """Numbers of every size, zeros, and such as are none; strided, a negative slot among them."""
    x = randn(40, 4, dim) * torch.logspace(-30, 30, 40)[:, None, None]
    x[3], x[4, 0, 1], x[5, 2, 7] = 0.0, NAN, float("inf")
    x[6, :, ::2] *= 1e-5
    x = x.to(dtype)[:, 1:]
    slots = torch.randperm(50, generator=generator())[:40]
    slots[7] = -1
    got, want = (empty_pools(50, 3, dim, kind) for _ in range(2))
    native.store_kv(x, -x, got[0], got[1], slots, got[2])
    reference.store_kv(x, -x, want[0], want[1], slots, want[2])
    for ours, theirs in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "options"),
    [
        (9, 3, 64, {}),
        (4, 4, 80, {"window": 20}),
        (16, 2, 128, {"soft_cap": 3.0}),
        (3, 1, 72, {"sinks": True}),
        (2, 1, 256, {"window": 70, "soft_cap": 3.0, "sinks": True}),
        (8, 1, 8, {}),
    ],
    ids=str,
)
def test_attention_over_codes_equals_the_reference(
    native: NativeOps, heads: int, kv_heads: int, dim: int, options: dict, dtype, kind: str
) -> None:
    """On the numbers that the codes stand for; no foreign key is read, whose scales are NaN."""
    batch, _, _, slots = paged_batch(ROWS, 16)
    k, v, scales = empty_pools(slots, kv_heads, dim, kind)
    sinks = randn(heads, seed=3) if options.get("sinks") else None
    spec = AttentionSpec(dim**-0.5, **{**options, "sinks": sinks})
    for b, (kv_len, new) in enumerate(ROWS):
        first = max(0, kv_len - new - spec.window + 1) if spec.window else 0
        seen = reference.row_slots(batch, b)[first:]
        x = randn(2, len(seen), kv_heads, dim, seed=b) * torch.tensor([1.0, 1e-3]).view(2, 1, 1, 1)
        reference.store_kv(x[0], x[1], k, v, seen, scales)
    q = randn(int(batch.qo_indptr[-1]), heads + 1, dim, seed=9).to(dtype)[:, :heads]
    want = reference.extend_attention(q.float(), k, v, batch, spec, scales)
    got = native.extend_attention(q, k, v, batch, spec, scales)
    assert torch.equal(native.decode_attention(q, k, v, batch, spec, scales), got)
    # Where the machine multiplies bfloat16, queries and weights are rounded to its 8 bits.
    assert elementwise_error(1e3 * got, 1e3 * want) <= 2e-2


def coded_caches(model: DecoderModel, slots: int, kind: str) -> list[tuple[Tensor, ...]]:
    caches: list[tuple[Tensor, ...]] = []
    for block in model.blocks:
        shapes = block.mixer.cache_shapes
        pools = [torch.zeros(slots, *shape).to(CODE_DTYPES[kind]) for shape in shapes]
        scales = [torch.full((slots, *shape), NAN) for shape in kv_codes.scale_shapes(shapes)]
        caches.append((*pools, *scales))
    return caches


def coded_step(model: DecoderModel, rows: list[tuple[int, int]], kind: str) -> DecoderStep:
    step = prefill_step(model, rows, torch.float32)
    slots = step.caches[0][0].shape[0]
    return replace(step, caches=coded_caches(model, slots, kind))


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_a_whole_step_on_codes_equals_the_reference(
    native: NativeOps, dtype: torch.dtype, kind: str
) -> None:
    """And it equals the op by op form of the same kernels in what it leaves in the pools."""
    rows = [(70, 70), (33, 33), (5, 5)]
    model, plain = tiny_model(native, dtype), tiny_model(ReferenceOps(), torch.float32)
    decoder = native.compile(model)
    assert decoder is not None
    step = coded_step(model, rows, kind)
    got = decoder(step)
    want = Decoder(plain, ReferenceOps())(coded_step(plain, rows, kind))
    # A code may differ where its number lies between two, so codes differ by a step here and there.
    assert float((got - want).abs().max()) <= 0.06 * float(want.abs().max())
    exact = Decoder(plain, ReferenceOps())(prefill_step(plain, rows, torch.float32))
    assert 0 < float((got - exact).norm() / exact.norm()) <= (0.02 if kind == "int8" else 0.06)


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_a_query_depends_on_its_sequence_alone_to_the_bit(
    native: NativeOps, dtype: torch.dtype, kind: str
) -> None:
    """In a batch of many rows, or alone in chunks of any size."""
    model = tiny_model(native, dtype)
    decoder = native.compile(model)
    assert decoder is not None
    together = decoder(coded_step(model, [(70, 70), *[(9, 9)] * 9], kind))[:70]
    whole = coded_step(model, [(70, 70), *[(9, 9)] * 9], kind)
    for chunk in (1, 7, 64):
        parts, caches = [], coded_caches(model, whole.caches[0][0].shape[0], kind)
        for begin in range(0, 70, chunk):
            new = range(begin, min(begin + chunk, 70))
            attention = replace(
                whole.attention,
                rows=whole.attention.rows[:1],
                qo_indptr=torch.tensor([0, len(new)], dtype=torch.int32),
                kv_lens=torch.tensor([new.stop], dtype=torch.int32),
            )
            taken = slice(new.start, new.stop)
            step = replace(
                whole,
                input_ids=whole.input_ids[taken],
                positions=whole.positions[taken],
                slots=whole.slots[taken],
                attention=attention,
                logit_tokens=torch.arange(len(new)),
                caches=caches,
            )
            parts.append(decoder(step))
        assert torch.equal(torch.cat(parts), together)


def test_pools_of_codes_need_their_scales(best: NativeOps) -> None:
    batch, _, _, slots = paged_batch([(5, 1)], 16)
    k, v, scales = empty_pools(slots, 2, 16, "int8")
    q, spec = torch.zeros(1, 4, 16), AttentionSpec(0.25)
    wrong = KvScales(scales.k, scales.v[:, :1].contiguous())
    with pytest.raises(ValueError, match="scales: None"):
        best.extend_attention(q, k, v, batch, spec)
    with pytest.raises(ValueError, match=r"v scales: shape \[32, 1\]"):
        best.extend_attention(q, k, v, batch, spec, wrong)
    with pytest.raises(TypeError, match=r"k_pool: type torch\.float32"):
        best.store_kv(q[:, :2], q[:, :2], k.float(), v, torch.tensor([3]), scales)
    model = tiny_model(best, torch.float32)
    decoder = best.compile(model)
    assert decoder is not None
    step = coded_step(model, [(5, 5)], "int8")
    with pytest.raises(ValueError, match=r"caches\[0\]: 2 tensors, expected 4"):
        decoder(replace(step, caches=[cache[:2] for cache in step.caches]))
