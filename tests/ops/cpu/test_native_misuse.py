"""Wrong arguments raise, with the numbers, before a kernel sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ops.blocks.dense_mlp import DenseMlp
from ops.op_set import AttentionSpec, SamplingTensors
from scripts._paged import paged_batch
from tests.ops.cpu.cases import prefill_step, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.blocks.block import DecoderStep
    from ops.cpu.native import NativeOps
    from ops.decoder import CompiledDecoder

SPEC = AttentionSpec(0.125)


def store(ops: NativeOps, *, heads: int, slot: int) -> None:
    """A key of two heads into pools of four slots and so many heads."""
    k, pool = torch.zeros(1, 2, 8), torch.zeros(4, heads, 8)
    ops.store_kv(k, k, pool, pool.clone(), torch.tensor([slot]))


def attention(ops: NativeOps, **changes: Any) -> None:
    """A correct call, apart from the changes."""
    batch, _, _, slots = paged_batch([(5, 2), (20, 1)], 16)
    q = changes.pop("q", torch.zeros(3, 4, 16))
    k, v = (changes.pop(name, torch.zeros(slots, 2, 16)) for name in "kv")
    spec = changes.pop("spec", SPEC)
    ops.extend_attention(q, k, v, replace(batch, **changes), spec)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


ATTENTION: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q_type": ({"q": torch.zeros(3, 4, 16).long()}, TypeError, "int64"),
    "q_rank": ({"q": torch.zeros(3, 64)}, ValueError, r"q: shape \[3, 64\]"),
    "q_stride": ({"q": torch.zeros(3, 4, 32)[..., ::2]}, ValueError, "strides"),
    "dim_differs": ({"q": torch.zeros(3, 4, 8)}, ValueError, "k_pool"),
    "v_shape": ({"v": torch.zeros(7, 2, 16)}, ValueError, "v_pool"),
    "v_type": ({"v": torch.zeros(48, 2, 16).bfloat16()}, TypeError, "v_pool"),
    "heads": ({"q": torch.zeros(3, 5, 16)}, ValueError, "heads 5"),
    "sinks": ({"spec": AttentionSpec(1.0, sinks=torch.zeros(3))}, ValueError, "sinks"),
    "rows_type": ({"rows": torch.tensor([1, 2])}, TypeError, "rows"),
    "page_size": ({"page_size": 0}, ValueError, "page_size 0"),
    "row_outside": ({"rows": int32(1, 9)}, IndexError, "rows"),
    "row_negative": ({"rows": int32(1, -1)}, IndexError, "rows"),
    "more_new_than_keys": ({"kv_lens": int32(1, 20)}, IndexError, "kv_lens"),
    "indptr_falls": ({"qo_indptr": int32(0, 4, 3)}, IndexError, "qo_indptr"),
    "indptr_end": ({"qo_indptr": int32(0, 2, 4)}, IndexError, "qo_indptr"),
    "kv_len_past_table": ({"kv_lens": int32(5, 900)}, IndexError, "page"),
    "page_outside": ({"block_table": int32(0, 0, 1, 0, 2, 900).view(3, 2)}, IndexError, "page"),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(best: NativeOps, case: str) -> None:
    changes, error, message = ATTENTION[case]
    attention(best)
    with pytest.raises(error, match=message):
        attention(best, **changes)


def linear(ops: NativeOps, x: torch.Tensor) -> None:
    ops.linear(x, ops.pack_linear(torch.zeros(4, 8)))


def rotary(ops: NativeOps, position: int, columns: int = 8) -> None:
    q = torch.zeros(1, 2, 8)
    ops.rotary(q, q.clone(), torch.tensor([position]), torch.zeros(3, columns), interleaved=False)


CALLS: dict[str, tuple[Callable[[NativeOps], object], type[Exception], str]] = {
    "linear_width": (lambda o: linear(o, torch.zeros(2, 7)), ValueError, r"\[None, 8\]"),
    "linear_type": (lambda o: linear(o, torch.zeros(2, 8).double()), TypeError, "float64"),
    "linear_stride": (lambda o: linear(o, torch.zeros(2, 16)[:, ::2]), ValueError, "strides"),
    "pack_rank": (lambda o: o.pack_linear(torch.zeros(4)), ValueError, "weight"),
    "pack_empty": (lambda o: o.pack_linear(torch.zeros(0, 4)), ValueError, "weight"),
    "pack_bias": (lambda o: o.pack_linear(torch.zeros(4, 8), torch.zeros(3)), ValueError, "bias"),
    "pack_kind": (
        lambda o: o.pack_linear(torch.zeros(4, 8), quantization="int2"),
        ValueError,
        "int2",
    ),
    "norm_weight": (
        lambda o: o.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5),
        ValueError,
        "weight",
    ),
    "norm_type": (
        lambda o: o.rms_norm(torch.zeros(2, 8), torch.zeros(8).bfloat16(), 1e-5),
        TypeError,
        "weight",
    ),
    "add_norm_shape": (
        lambda o: o.add_rms_norm(torch.zeros(1, 8), torch.zeros(2, 8), torch.zeros(8), 1e-5),
        ValueError,
        "x: shape",
    ),
    "add_norm_stride": (
        lambda o: o.add_rms_norm(torch.zeros(2, 8), torch.zeros(8, 2).T, torch.zeros(8), 1e-5),
        ValueError,
        "residual",
    ),
    "position_past_table": (lambda o: rotary(o, 3), IndexError, "position"),
    "position_negative": (lambda o: rotary(o, -1), IndexError, "position"),
    "rope_odd": (lambda o: rotary(o, 0, 7), ValueError, "7 columns"),
    "rope_wide": (lambda o: rotary(o, 0, 10), ValueError, "10 columns"),
    "slot_outside": (
        lambda o: store(o, heads=2, slot=4),
        IndexError,
        "slot",
    ),
    "pool_shape": (
        lambda o: store(o, heads=1, slot=0),
        ValueError,
        "k_pool",
    ),
    "act_odd": (lambda o: o.silu_and_mul(torch.zeros(2, 7)), ValueError, "7 columns"),
}


@pytest.mark.parametrize("case", CALLS)
def test_call(best: NativeOps, case: str) -> None:
    call, error, message = CALLS[case]
    with pytest.raises(error, match=message):
        call(best)


def sampling(**changes: Any) -> SamplingTensors:
    ones = torch.ones(2)
    fields: dict[str, Any] = {
        "temperature": ones,
        "top_k": torch.zeros(2, dtype=torch.int32),
        "top_p": ones,
        "min_p": ones,
        "seed": torch.zeros(2, dtype=torch.int64),
        "position": torch.zeros(2, dtype=torch.int64),
        "all_greedy": False,
        "any_filter": False,
    }
    return SamplingTensors(**(fields | changes))


SAMPLING: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rows": ({"temperature": torch.ones(3)}, ValueError, "temperature"),
    "type": ({"top_k": torch.zeros(2)}, TypeError, "top_k"),
    "bias_token": (
        {"bias": (torch.tensor([0]), torch.tensor([10]), torch.ones(1))},
        IndexError,
        "vocabulary",
    ),
    "banned_row": ({"banned": (torch.tensor([2]), torch.tensor([0]))}, IndexError, "token"),
    "mask_words": (
        {"mask_rows": torch.tensor([0]), "mask_bits": torch.zeros(1, 2, dtype=torch.int32)},
        ValueError,
        "mask_bits",
    ),
    "mask_row": (
        {"mask_rows": torch.tensor([5]), "mask_bits": torch.zeros(1, 1, dtype=torch.int32)},
        IndexError,
        "rows",
    ),
}


@pytest.mark.parametrize("case", SAMPLING)
def test_sampling(best: NativeOps, case: str) -> None:
    changes, error, message = SAMPLING[case]
    best.sample(torch.zeros(2, 10), sampling())
    with pytest.raises(error, match=message):
        best.sample(torch.zeros(2, 10), sampling(**changes))


DECODER: dict[str, tuple[str, torch.Tensor, type[Exception], str]] = {
    "token": ("input_ids", torch.tensor([0, 101]), IndexError, "token"),
    "token_type": ("input_ids", int32(0, 1), TypeError, "input_ids"),
    "position": ("positions", torch.tensor([0, 600]), IndexError, "position"),
    "slot": ("slots", torch.tensor([16, 999]), IndexError, "slot"),
    "logit_token": ("logit_tokens", torch.tensor([2]), IndexError, "logit token"),
    "length": ("slots", torch.tensor([16]), ValueError, "slots"),
}


def tiny(ops: NativeOps) -> tuple[DecoderStep, CompiledDecoder]:
    """A compiled model, and a step that it takes."""
    model = tiny_model(ops, torch.float32)
    decoder = ops.compile(model)
    assert decoder is not None
    step = prefill_step(model, [(2, 2)], torch.float32)
    return replace(step, logit_tokens=torch.tensor([1])), decoder


@pytest.mark.parametrize("case", DECODER)
def test_decoder_step(best: NativeOps, case: str) -> None:
    good, decoder = tiny(best)
    name, value, error, message = DECODER[case]
    changes: dict[str, Any] = {name: value}
    decoder(good)
    with pytest.raises(error, match=message):
        decoder(replace(good, **changes))


def test_weights_of_another_shape_do_not_compile(best: NativeOps) -> None:
    model = tiny_model(best, torch.float32)
    first, (attention, mlp) = model.layers
    assert isinstance(mlp.mixer, DenseMlp)
    wrong = replace(mlp.mixer, down=best.pack_linear(torch.zeros(48, 96)))
    layers = (first, (attention, replace(mlp, mixer=wrong)))
    with pytest.raises(ValueError, match=r"down: weight \[48, 96\], expected \[48, 80\]"):
        best.compile(replace(model, layers=layers))


def test_pools_of_another_shape_are_refused(best: NativeOps) -> None:
    step, decoder = tiny(best)
    attention, mlp, (k, v), last = step.caches
    with pytest.raises(ValueError, match="one per block, 4"):
        decoder(replace(step, caches=[attention]))
    with pytest.raises(ValueError, match=r"caches\[2\]: 1 tensors, expected 2"):
        decoder(replace(step, caches=[attention, mlp, (k,), last]))
    with pytest.raises(ValueError, match=r"caches\[2\]\[1\]"):
        decoder(replace(step, caches=[attention, mlp, (k, v[1:]), last]))
