"""The compiled decoder against the reference run op by op, and its bit-exactness over batches."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ops.blocks.block import DecoderStep
from ops.op_set import AttentionBatch
from ops.reference import ReferenceOps
from runtime.models.decoder import Decoder
from scripts._paged import paged_batch
from tests.ops.cpu.cases import (
    DTYPE_IDS,
    DTYPES,
    TINY,
    VARIANTS,
    empty_caches,
    generator,
    prefill_step,
    tiny_model,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ops.cpu.native import NativeOps
    from ops.decoder import CompiledDecoder, DecoderModel

ROWS = [(70, 70), (33, 33), (5, 5)]


def prompt(row: int, length: int) -> Tensor:
    return torch.randint(0, TINY["vocab_size"], (length,), generator=generator(row))


def compiled(
    ops: NativeOps, dtype: torch.dtype, **options: Any
) -> tuple[DecoderModel, CompiledDecoder]:
    model = tiny_model(ops, dtype, **options)
    decoder = ops.compile(model)
    assert decoder is not None
    return model, decoder


def exact(dtype: torch.dtype, **options: Any) -> Decoder:
    """The reference in float32 on the weights that `tiny_model` has in another type."""
    return Decoder(widened(tiny_model(ReferenceOps(), dtype, **options)), ReferenceOps())


def widened(value: Any) -> Any:
    """Every tensor of a model as float32."""
    if isinstance(value, torch.Tensor):
        return value.float()
    if isinstance(value, tuple):
        return tuple(widened(part) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: widened(getattr(value, f.name)) for f in fields(value)})
    return value


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias_and_sinks"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled(12)
def test_logits_equal_the_reference(
    native: NativeOps, variant: str, extras: bool, dtype: torch.dtype
) -> None:
    """Prefill of three rows; every token's logits. bfloat16 is compared with
    the same weights in float32: between the layers the native step rounds nothing."""
    options = VARIANTS[variant] | {"sinks": extras, "bias": extras}
    model, decoder = compiled(native, dtype, **options)
    got = decoder(prefill_step(model, ROWS, dtype))
    want = exact(dtype, **options)(prefill_step(model, ROWS, torch.float32))
    # Scores and weights in bfloat16 (8 bits) through two layers; the logits are around 1.
    tolerance = 2e-5 if dtype == torch.float32 else 0.05
    assert float((got - want).abs().max()) <= tolerance * float(want.abs().max())
    assert torch.equal(got.isfinite(), torch.ones_like(got, dtype=torch.bool))


def test_halves_as_weights_give_the_logits_of_their_values(native: NativeOps) -> None:
    """All else is float32: so are the sums, whose bits are those of float32 weights."""
    model, decoder = compiled(native, torch.float32, matrix_dtype=torch.float16, bias=True)
    got = decoder(prefill_step(model, ROWS, torch.float32))
    want = exact(torch.float32, matrix_dtype=torch.float16, bias=True)
    logits = want(prefill_step(model, ROWS, torch.float32))
    assert float((got - logits).abs().max()) <= 2e-5 * float(logits.abs().max())


def run_in_chunks(
    model: DecoderModel, decoder: CompiledDecoder, dtype: torch.dtype, rows: list[int], chunk: int
) -> list[Tensor]:
    """Every token's logits of some of `ROWS`, computed together, at most `chunk` tokens of a row
    in a step; what comes before a chunk is read from the pool, like a cached prefix."""
    batch, _, _, size = paged_batch(ROWS, 16)
    caches = empty_caches(model, size, dtype)
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
    model, decoder = compiled(native, dtype, quantization=quantization)
    together = run_in_chunks(model, decoder, dtype, [0, 1, 2], 100)
    for rows in ([0], [1], [2], [2, 0]):
        for chunk in (100, 1, 7, 16, 37):
            for row, logits in zip(
                rows, run_in_chunks(model, decoder, dtype, rows, chunk), strict=True
            ):
                assert torch.equal(logits, together[row])


def test_logits_of_some_tokens_are_those_of_all(native: NativeOps) -> None:
    model, decoder = compiled(native, torch.bfloat16)
    step = prefill_step(model, ROWS, torch.bfloat16)
    every = decoder(step)
    picked = torch.tensor([107, 3, 3, 69, 0])
    assert torch.equal(decoder(replace(step, logit_tokens=picked)), every[picked])


def test_a_step_without_logits_still_stores_keys_and_values(native: NativeOps) -> None:
    model, decoder = compiled(native, torch.float32)
    filled, other = (prefill_step(model, ROWS, torch.float32) for _ in range(2))
    decoder(replace(filled, logit_tokens=torch.tensor([5])))
    nothing = torch.empty(0, dtype=torch.int64)
    assert decoder(replace(other, logit_tokens=nothing)).shape == (0, 101)
    for ours, theirs in zip(filled.caches, other.caches, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a[filled.slots], b[filled.slots])


def test_negative_slots_are_not_stored(native: NativeOps) -> None:
    model, decoder = compiled(native, torch.float32)
    step = prefill_step(model, [(20, 20)], torch.float32)
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
        model, decoder = compiled(native, torch.float32, quantization=quantization)
        logits[quantization] = decoder(prefill_step(model, ROWS, torch.float32))
    size_of = logits[None].norm()
    assert (logits["int8"] - logits[None]).norm() <= 0.05 * size_of
    assert (logits["int4"] - logits[None]).norm() <= 0.4 * size_of


def test_more_logits_than_tokens(native: NativeOps) -> None:
    """A token may be asked for more than once, so the later blocks may see more rows than tokens."""
    model, decoder = compiled(native, torch.bfloat16)
    step = prefill_step(model, [(2, 2)], torch.bfloat16)
    once = decoder(step)
    asked = torch.tensor([1, 0] * 40)
    assert torch.equal(decoder(replace(step, logit_tokens=asked)), once[asked])


@pytest.mark.parametrize(
    "changes",
    [{"intermediate_size": (80, 72)}, {"head_dim": (12, 16)}, {"parallel": True}],
    ids=["width", "head_dim", "parallel"],
)
def test_what_has_no_compiled_form_runs_op_by_op(best: NativeOps, changes: dict[str, Any]) -> None:
    changes |= {"rotary_dims": (8, 8)}
    model = tiny_model(best, torch.float32, **changes)
    decoder = Decoder(model, best)
    assert decoder.compiled is None
    got = decoder(prefill_step(model, ROWS, torch.float32))
    want = exact(torch.float32, **changes)(prefill_step(model, ROWS, torch.float32))
    assert float((got - want).abs().max()) <= 2e-5 * float(want.abs().max())


def test_a_parallel_block_reads_what_the_block_before_it_read() -> None:
    """Against the sum written out: x + attention(norm(x)) + mlp(norm(x))."""
    ops = ReferenceOps()
    model = tiny_model(ops, torch.float32, parallel=True)
    step, again = (prefill_step(model, [(9, 9)], torch.float32) for _ in range(2))
    x = model.embedding[step.input_ids]
    for i, (first, second) in enumerate(model.layers):
        assert first.norm is not None
        assert second.norm is not None
        attended = first.mixer.run(
            ops.rms_norm(x, first.norm.weight, 1e-5), step.caches[2 * i], step, ops
        )
        x = (
            x
            + attended
            + second.mixer.run(ops.rms_norm(x, second.norm.weight, 1e-5), (), step, ops)
        )
    want = ops.linear(ops.rms_norm(x, model.final_norm.weight, 1e-5), model.lm_head)
    torch.testing.assert_close(Decoder(model, ops)(again), want)


def test_activations_of_float16_run_op_by_op(best: NativeOps) -> None:
    model = tiny_model(best, torch.float16)
    decoder = Decoder(model, best)
    assert decoder.compiled is None
    last = torch.tensor([69, 102, 107])
    got = decoder(replace(prefill_step(model, ROWS, torch.float16), logit_tokens=last))
    step = replace(prefill_step(model, ROWS, torch.float32), logit_tokens=last)
    want = exact(torch.float16)(step)
    assert float((got - want).abs().max()) <= 0.02 * float(want.abs().max())
