"""The compiled decoder against the reference run op by op, and its bit-exactness over batches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from ops.op_set import AttentionBatch, DecoderStep
from ops.reference import ReferenceOps
from runtime.models.decoder import Decoder
from tests.ops.cpu.cases import (
    DTYPE_IDS,
    DTYPES,
    TINY,
    VARIANTS,
    empty_caches,
    generator,
    paged_batch,
    prefill_step,
    tiny_spec,
    tiny_weights,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ops.cpu.native import NativeOps
    from ops.op_set import CompiledDecoder, DecoderSpec

ROWS = [(70, 70), (33, 33), (5, 5)]


def prompt(row: int, length: int) -> Tensor:
    return torch.randint(0, TINY.vocab_size, (length,), generator=generator(row))


def compiled(
    ops: NativeOps, spec: DecoderSpec, dtype: torch.dtype, **options: bool | str
) -> CompiledDecoder:
    decoder = ops.compile(spec, tiny_weights(ops, spec, dtype, **options))  # type: ignore[arg-type]
    assert decoder is not None
    return decoder


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias_and_sinks"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_reference(
    native: NativeOps, variant: str, extras: bool, dtype: torch.dtype
) -> None:
    """Prefill of three rows; every token's logits. bfloat16 is compared with
    the same weights in float32: between the layers the native step rounds nothing."""
    spec = tiny_spec(variant)
    decoder = compiled(native, spec, dtype, sinks=extras, bias=extras)
    weights = tiny_weights(ReferenceOps(), spec, dtype, sinks=extras, bias=extras)
    exact = Decoder(spec, widened(weights), ReferenceOps())
    step = prefill_step(spec, ROWS, dtype)
    got = decoder(step)
    want = exact(prefill_step(spec, ROWS, torch.float32))
    # Scores and weights in bfloat16 (8 bits) through two layers; the logits are around 1.
    tolerance = 2e-5 if dtype == torch.float32 else 0.05
    assert float((got - want).abs().max()) <= tolerance * float(want.abs().max())
    assert torch.equal(got.isfinite(), torch.ones_like(got, dtype=torch.bool))


def widened(weights):  # type: ignore[no-untyped-def]
    """The reference's weights in float32."""
    for layer in weights.layers:
        for name in ("qkv", "o", "gate_up", "down"):
            setattr(layer, name, _wide_pair(getattr(layer, name)))
        for name in (
            *("input_norm", "post_attention_norm", "q_norm", "k_norm"),
            *("attention_out_norm", "mlp_out_norm"),
        ):
            norm = getattr(layer, name)
            setattr(layer, name, None if norm is None else norm.float())
    weights.embedding = weights.embedding.float()
    weights.final_norm = weights.final_norm.float()
    weights.lm_head = _wide_pair(weights.lm_head)
    return weights


def _wide_pair(packed: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    weight, bias = packed
    return weight.float(), None if bias is None else bias.float()


def run_in_chunks(
    decoder: CompiledDecoder, dtype: torch.dtype, rows: list[int], chunk: int
) -> list[Tensor]:
    """Every token's logits of some of `ROWS`, computed together, at most `chunk` tokens of a row
    in a step; what comes before a chunk is read from the pool, like a cached prefix."""
    batch, _, _, size = paged_batch(ROWS, 16)
    caches = empty_caches(TINY, size, dtype)
    logits: list[list[Tensor]] = [[] for _ in rows]
    for begin in range(0, max(ROWS[row][0] for row in rows), chunk):
        part = [(row, min(ROWS[row][0], begin + chunk)) for row in rows if ROWS[row][0] > begin]
        positions = torch.cat([torch.arange(begin, end) for _, end in part])
        news = [end - begin for _, end in part]
        of_token = torch.cat(
            [torch.full((n,), row + 1) for (row, _), n in zip(part, news, strict=True)]
        )
        slots = batch.block_table[of_token, positions // 16].long() * 16 + positions % 16
        attention = AttentionBatch(
            block_table=batch.block_table,
            rows=torch.tensor([row + 1 for row, _ in part], dtype=torch.int32),
            qo_indptr=torch.tensor([0, *news]).cumsum(0).int(),
            kv_lens=torch.tensor([end for _, end in part], dtype=torch.int32),
            page_size=16,
            max_q_len=max(news),
            max_kv_len=max(end for _, end in part),
        )
        ids = torch.cat([prompt(row, ROWS[row][0])[begin:end] for row, end in part])
        step = DecoderStep(ids, positions, slots, attention, torch.arange(len(ids)), caches)
        out = decoder(step)
        for (row, _), piece in zip(part, out.split(news), strict=True):
            logits[rows.index(row)].append(piece)
    return [torch.cat(pieces) for pieces in logits]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_a_token_depends_on_its_sequence_alone_to_the_bit(
    native: NativeOps, dtype: torch.dtype, quantization: str | None
) -> None:
    """Together or alone, in one step, in chunks or token by token."""
    decoder = compiled(native, TINY, dtype, quantization=quantization)  # type: ignore[arg-type]
    together = run_in_chunks(decoder, dtype, [0, 1, 2], 100)
    for rows in ([0], [1], [2], [2, 0]):
        for chunk in (100, 1, 7, 16, 37):
            for row, logits in zip(rows, run_in_chunks(decoder, dtype, rows, chunk), strict=True):
                assert torch.equal(logits, together[row])


def test_logits_of_some_tokens_are_those_of_all(native: NativeOps) -> None:
    decoder = compiled(native, TINY, torch.bfloat16)
    step = prefill_step(TINY, ROWS, torch.bfloat16)
    every = decoder(step)
    picked = torch.tensor([107, 3, 3, 69, 0])
    assert torch.equal(decoder(replace(step, logit_tokens=picked)), every[picked])


def test_a_step_without_logits_still_stores_keys_and_values(native: NativeOps) -> None:
    decoder = compiled(native, TINY, torch.float32)
    filled, other = (prefill_step(TINY, ROWS, torch.float32) for _ in range(2))
    decoder(replace(filled, logit_tokens=torch.tensor([5])))
    nothing = torch.empty(0, dtype=torch.int64)
    assert decoder(replace(other, logit_tokens=nothing)).shape == (0, 101)
    for ours, theirs in zip(filled.caches, other.caches, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a[filled.slots], b[filled.slots])


def test_negative_slots_are_not_stored(native: NativeOps) -> None:
    decoder = compiled(native, TINY, torch.float32)
    step = prefill_step(TINY, [(20, 20)], torch.float32)
    written = step.slots.clone()
    written[[4, 19]] = -1
    decoder(replace(step, slots=written, logit_tokens=torch.empty(0, dtype=torch.int64)))
    keys = step.caches[0][0]
    expected = torch.ones(keys.shape[0], dtype=torch.bool)
    expected[written[written >= 0]] = False
    assert torch.equal(keys.isnan().all(-1).all(-1), expected)


def test_quantized_logits_stay_near(native: NativeOps) -> None:
    logits = {}
    for quantization in (None, "int8", "int4"):
        decoder = compiled(native, TINY, torch.float32, quantization=quantization)  # type: ignore[arg-type]
        logits[quantization] = decoder(prefill_step(TINY, ROWS, torch.float32))
    size_of = logits[None].norm()
    assert (logits["int8"] - logits[None]).norm() <= 0.05 * size_of
    assert (logits["int4"] - logits[None]).norm() <= 0.4 * size_of


@pytest.mark.parametrize(
    "changes", [{"intermediate_size": 72}, {"head_dim": 12}], ids=["width", "head_dim"]
)
def test_other_shapes_run_op_by_op(best: NativeOps, changes: dict[str, int]) -> None:
    assert best.compile(replace(TINY, **changes), tiny_weights(best, TINY, torch.float32)) is None


def test_float16_runs_op_by_op_on_torch(best: NativeOps) -> None:
    weights = tiny_weights(best, TINY, torch.float16)
    decoder = Decoder(TINY, weights, best)
    assert decoder.compiled is None
    exact = Decoder(
        TINY, widened(tiny_weights(ReferenceOps(), TINY, torch.float16)), ReferenceOps()
    )
    last = torch.tensor([69, 102, 107])
    got = decoder(replace(prefill_step(TINY, ROWS, torch.float16), logit_tokens=last))
    want = exact(replace(prefill_step(TINY, ROWS, torch.float32), logit_tokens=last))
    assert float((got - want).abs().max()) <= 0.02 * float(want.abs().max())
