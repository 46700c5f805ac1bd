"""Quantized checkpoints: what is computed is the float model of the values that the layout spells.

Each `pack_*` writes one weight as its format publishes it (AutoGPTQ and GPTQModel, AutoAWQ,
compressed-tensors, DeepSeek's FP8, bitsandbytes), and gives the values that its reference unpacks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ops.coded_weight import CodedMatrix, GroupedMatrix
from ops.cpu import build
from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.checkpoints.quantized.in_blocks import in_blocks
from runtime.errors import ModelError
from tests.runtime.checkpoints.damage import MISSING, WRONG, outcome
from tests.runtime.models.tiny_models import (
    Probe,
    expected_logits,
    make_model,
    open_runner,
    random_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    Packed = tuple[dict[str, Tensor], Tensor]

SHAPE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
GROUP = 32


def random(low: int, high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def scales_of(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.02 + 0.01


def words_of(values: Tensor, bits: int, axis: int) -> Tensor:
    """Unsigned values in int32 words along an axis, the first one in the lowest bits."""
    parts = values.movedim(axis, -1).unflatten(-1, (-1, 32 // bits)).long()
    words = (parts << torch.arange(0, 32, bits)).sum(-1)
    return words.to(torch.int32).movedim(-1, axis).contiguous()


def pack_gptq(
    shape: torch.Size,
    seed: int,
    *,
    bits: int,
    form: str,
    ordered: bool,
    indexed: bool = True,
    symmetric: bool = False,
) -> Packed:
    n, k = shape
    top, groups = 2**bits, k // GROUP
    index = torch.arange(k) // GROUP
    if ordered:
        index = index[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
    q, scales = random(0, top, k, n, seed=seed), scales_of(groups, n, seed=seed).half()
    # What is stored as the highest code is, in the first form, the zero 0.
    zeros = random(0, top, groups, n, seed=seed + 1)
    if symmetric:
        zeros = torch.full_like(zeros, top // 2)
    stored = zeros if form == "gptq_v2" else (zeros - 1) % top
    values = scales.float()[index] * (q - zeros[index])
    parts = {
        "qweight": words_of(q, bits, 0),
        "qzeros": words_of(stored, bits, 1),
        "scales": scales,
        "g_idx": index.int(),
    }
    if not indexed:
        del parts["g_idx"]
    return parts, values.T


def pack_awq(shape: torch.Size, seed: int) -> Packed:
    n, k = shape
    index, columns = torch.arange(k) // GROUP, torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    q, zeros = random(0, 16, k, n, seed=seed), random(0, 16, k // GROUP, n, seed=seed + 1)
    scales = scales_of(k // GROUP, n, seed=seed).half()

    def words(values: Tensor) -> Tensor:
        return words_of(values.unflatten(1, (-1, 8))[..., columns].flatten(1), 4, 1)

    parts = {"qweight": words(q), "qzeros": words(zeros), "scales": scales}
    return parts, (scales.float()[index] * (q - zeros[index])).T


def pack_int8(shape: torch.Size, seed: int, *, zeros: bool = False) -> Packed:
    q, scales = random(-128, 128, *shape, seed=seed), scales_of(shape[0], 1, seed=seed).bfloat16()
    parts, zero = {"weight": q.to(torch.int8), "weight_scale": scales}, torch.zeros(1)
    if zeros:
        zero = random(-9, 9, shape[0], 1, seed=seed + 1)
        parts["weight_zero_point"] = zero.to(torch.int8)
    return parts, scales.float() * (q - zero)


def pack_words(
    shape: torch.Size, seed: int, *, zeros: bool = False, ordered: bool = False
) -> Packed:
    n, k = shape
    index = torch.arange(k) // GROUP
    if ordered:
        index = index[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
    q, scales = random(-8, 8, n, k, seed=seed), scales_of(n, k // GROUP, seed=seed).bfloat16()
    parts = {
        "weight_packed": words_of(q + 8, 4, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }
    zero = torch.zeros(n, k // GROUP)
    if zeros:
        zero = random(-8, 8, n, k // GROUP, seed=seed + 1)
        parts["weight_zero_point"] = words_of(zero + 8, 4, 0)
    if ordered:
        parts["weight_g_idx"] = index.int()
    return parts, scales.float()[:, index] * (q - zero[:, index])


def pack_fp8(
    shape: torch.Size, seed: int, *, scale: str, blocks: tuple[int, int], static: bool = False
) -> Packed:
    n, k = shape
    q = (scales_of(n, k, seed=seed) * 9000 - 180).to(torch.float8_e4m3fn)
    counts = -(-n // blocks[0]), -(-k // blocks[1])
    scales = scales_of(*counts, seed=seed + 1) / 100
    spread = scales.repeat_interleave(blocks[0], 0)[:n].repeat_interleave(blocks[1], 1)[:, :k]
    parts = {"weight": q, scale: scales[0, 0] if counts == (1, 1) else scales}
    if static:
        parts["input_scale"] = torch.tensor(0.5)
    return parts, q.float() * spread


def pack_bnb(shape: torch.Size, seed: int, *, nested: bool) -> Packed:
    n, k = shape
    block, outer = 64, 256
    codes = random(0, 16, n * k, seed=seed)
    table = torch.linspace(-1, 1, 16) ** 3
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "shape": [n, k]}
    absmax = scales_of(n * k // block, seed=seed)
    parts = {"weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]}
    if nested:
        levels, chosen = torch.linspace(-1, 1, 256), random(0, 256, len(absmax), seed=seed + 1)
        steps = scales_of(-(-len(absmax) // outer), seed=seed + 2)
        absmax = levels[chosen] * steps.repeat_interleave(outer)[: len(absmax)] + 0.03
        state |= {"nested_blocksize": outer, "nested_offset": 0.03, "nested_dtype": "float32"}
        parts["weight.nested_absmax"], parts["weight.nested_quant_map"] = steps, levels
        parts["weight.absmax"] = chosen.to(torch.uint8)
    else:
        parts["weight.absmax"] = absmax
    text = json.dumps(state).encode()
    parts["weight.quant_map"] = table
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return parts, (table[codes] * absmax.repeat_interleave(block)).view(n, k)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "int", "strategy": "channel", **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": False}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Packed], dict[str, Any]]] = {
    "gptq-4": ({**GPTQ, "bits": 4}, pack_gptq, {"bits": 4, "form": "gptq", "ordered": False}),
    "gptq-4-no-index": (
        {**GPTQ, "bits": 4},
        pack_gptq,
        {"bits": 4, "form": "gptq", "ordered": False, "indexed": False},
    ),
    "gptq-4-symmetric": (
        {**GPTQ, "bits": 4, "sym": True},
        pack_gptq,
        {"bits": 4, "form": "gptq", "ordered": False, "symmetric": True},
    ),
    "gptq-8": ({**GPTQ, "bits": 8}, pack_gptq, {"bits": 8, "form": "gptq", "ordered": False}),
    "gptq-8-symmetric": (
        {**GPTQ, "bits": 8, "sym": True},
        pack_gptq,
        {"bits": 8, "form": "gptq", "ordered": False, "symmetric": True},
    ),
    "gptq-8-act-order": (
        {**GPTQ, "bits": 8, "desc_act": True},
        pack_gptq,
        {"bits": 8, "form": "gptq", "ordered": True},
    ),
    "gptq-v2-act-order": (
        {**GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"},
        pack_gptq,
        {"bits": 4, "form": "gptq_v2", "ordered": True},
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, pack_awq, {}),
    "w8a8": (compressed("int-quantized"), pack_int8, {}),
    "w8a8-zeros": (compressed("int-quantized"), pack_int8, {"zeros": True}),
    "w4a16": (compressed("pack-quantized", **INT4), pack_words, {}),
    "w4a16-zeros": (compressed("pack-quantized", **INT4), pack_words, {"zeros": True}),
    "w4a16-act-order": (compressed("pack-quantized", **INT4), pack_words, {"ordered": True}),
    "compressed-fp8": (
        compressed("float-quantized", type="float"),
        pack_fp8,
        {"scale": "weight_scale", "blocks": (1, 10_000)},
    ),
    "compressed-fp8-blocks": (
        compressed("float-quantized", type="float", strategy="block", block_structure=[48, 48]),
        pack_fp8,
        {"scale": "weight_scale", "blocks": (48, 48)},
    ),
    "fp8-blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48]},
        pack_fp8,
        {"scale": "weight_scale_inv", "blocks": (48, 48)},
    ),
    "fp8-narrow-blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 32]},
        pack_fp8,
        {"scale": "weight_scale_inv", "blocks": (48, 32)},
    ),
    "fp8-tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        pack_fp8,
        {"scale": "weight_scale", "blocks": (10_000, 10_000), "static": True},
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        pack_bnb,
        {"nested": False},
    ),
    "nf4-nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        pack_bnb,
        {"nested": True},
    ),
}


def write_config(folder: Path, quantization: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )


def write_quantized(name: str, tmp_path: Path) -> tuple[Any, dict[str, Tensor]]:
    """A model of the format's values, written as the format has it, and those values."""
    quantization, pack, options = FORMATS[name]
    model = make_model(tmp_path, "llama", num_attention_heads=4, **SHAPE)
    stored = load_file(tmp_path / "model.safetensors")
    expected = {}
    with torch.no_grad():
        for i, (module, layer) in enumerate(model.named_modules()):
            if isinstance(layer, torch.nn.Linear) and module != "lm_head":
                parts, values = pack(layer.weight.shape, 10 * i, **options)
                layer.weight.copy_(values)
                expected[f"{module}.weight"] = values
                del stored[f"{module}.weight"]
                stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    save_file(stored, tmp_path / "model.safetensors")
    write_config(tmp_path, quantization)
    return model, expected


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sampled(6)
def test_logits_are_those_of_the_float_model_of_the_stored_values(
    name: str, tmp_path: Path
) -> None:
    model, expected = write_quantized(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for weight, values in expected.items():
        raw = checkpoint.read(weight)
        got = torch.frombuffer(raw.buffer, dtype=torch.float32).view(raw.shape)
        torch.testing.assert_close(got, values.float(), rtol=1e-6, atol=1e-9)
    tokens = random_tokens(20)
    runner = open_runner(tmp_path, dtype="float32")
    (got,) = Probe(runner).step({1: (0, tokens)})
    runner.close()
    torch.testing.assert_close(got, expected_logits(model, tokens), atol=5e-5, rtol=5e-5)


# Those that are kept as they are, in panels of these kinds.
KEPT = {
    "gptq-4": "int4_zero",
    "gptq-4-no-index": "int4_zero",
    "gptq-4-symmetric": "int4_zero",
    "gptq-8": "int8_zero",
    "gptq-8-symmetric": "int8",
    "gptq-8-act-order": "int8_zero",
    "gptq-v2-act-order": "int4_zero",
    "awq": "int4_zero",
    "w4a16": "int4_zero",
    "w4a16-zeros": "int4_zero",
    "w4a16-act-order": "int4_zero",
    "w8a8": "int8",
    "w8a8-zeros": "int8_zero",
}


def in_order(values: Tensor, matrix: CodedMatrix | GroupedMatrix) -> Tensor:
    """The values of a matrix [n, k] by its k."""
    return values if matrix.order is None else values[:, torch.from_numpy(matrix.order)]


@pytest.mark.parametrize("name", FORMATS)
def test_integers_are_kept_to_the_bit(name: str, tmp_path: Path) -> None:
    _, expected = write_quantized(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for weight, values in expected.items():
        matrix = in_blocks(checkpoint.coded(weight))
        assert (matrix and matrix.kind) == KEPT.get(name)
        if matrix is None:
            continue
        assert (matrix.n, matrix.k) == values.shape
        for first, last in ((0, 16), (16, matrix.n)):
            codes = matrix.read(first, last)
            whole = torch.from_numpy(codes.codes).float() - 128 * matrix.kind.startswith("int8")
            if codes.minima is not None:
                whole -= torch.from_numpy(codes.minima).float().repeat_interleave(32, 1)
            got = whole * torch.from_numpy(codes.factors).float().repeat_interleave(32, 1)
            assert torch.equal(got, in_order(values, matrix)[first:last].float())


GROUPED = {*KEPT, "compressed-fp8", "fp8-tensor", "fp8-narrow-blocks", "nf4", "nf4-nested"}


def values_of(matrix: GroupedMatrix, first: int, last: int) -> Tensor:
    """Rows first to last - 1, as its kind says."""
    codes = torch.from_numpy(matrix.read(first, last).copy())
    scales = torch.from_numpy(matrix.scales[first:last].copy())
    if matrix.kind == "fp8":
        numbers = codes.view(torch.float8_e4m3fn).float()
    elif matrix.kind == "nf4":
        assert matrix.table is not None
        numbers = torch.from_numpy(matrix.table.copy())[codes.long()]
    elif matrix.kind == "mxfp4":
        halves = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        numbers = torch.tensor([*halves, *(-half for half in halves)])[codes.long()]
    else:
        assert matrix.zeros is not None
        zeros = torch.from_numpy(matrix.zeros[first:last].copy()).float()
        numbers = codes.float() - zeros.repeat_interleave(matrix.group, 1)
    return scales.repeat_interleave(matrix.group, 1) * numbers


@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_groups_are_told_to_the_bit(name: str, tmp_path: Path) -> None:
    _, expected = write_quantized(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for weight, values in expected.items():
        matrix = checkpoint.coded(weight)
        goes_on = name.startswith("nf4") and values.shape[1] % 64  # a block in the next row
        assert isinstance(matrix, GroupedMatrix) == (name in GROUPED and not goes_on)
        if not isinstance(matrix, GroupedMatrix):
            continue
        assert (matrix.n, matrix.k) == values.shape
        for first, last in ((0, 13), (13, matrix.n)):
            got = values_of(matrix, first, last)
            assert torch.equal(got, in_order(values, matrix)[first:last].float())


@pytest.mark.skipif(not build.available_paths(), reason="this CPU has no native instruction path")
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_served_within_the_rounding_of_inputs(name: str, tmp_path: Path) -> None:
    model, _ = write_quantized(name, tmp_path)
    tokens = random_tokens(20)
    runner = open_runner(tmp_path)
    (got,) = Probe(runner).step({1: (0, tokens)})
    decoder: Any = runner.decoder.model
    assert decoder.layers[0][0].mixer.qkv.kinds == (KEPT[name],) * 3
    runner.close()
    # The first token attends to itself alone; large random scores of others choose at random.
    want = expected_logits(model, tokens)[0]
    assert float((got[0] - want).norm() / want.norm()) < 0.03


def write_gpt_oss(tmp_path: Path) -> tuple[Any, dict[str, Tensor]]:
    """A model with its experts in MXFP4, and their values."""
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
    model = make_model(tmp_path, "gpt_oss", **SHAPE, **experts)
    stored, expected = load_file(tmp_path / "model.safetensors"), {}
    for i, layer in enumerate(model.model.layers):
        for j, name in enumerate(("gate_up_proj", "down_proj")):
            weight = getattr(layer.mlp.experts, name)
            count, inputs, outputs = weight.shape
            shape = (count, outputs, inputs // 32)
            blocks = random(0, 256, *shape, 16, seed=i + 2 * j).to(torch.uint8)
            scales = random(120, 126, *shape, seed=i).to(torch.uint8)
            with torch.no_grad():
                weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            at = f"model.layers.{i}.mlp.experts.{name}"
            expected[at] = stored.pop(at).copy_(weight)
            stored |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
    save_file(stored, tmp_path / "model.safetensors")
    write_config(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model, expected


def test_codes_of_mxfp4_are_those_of_its_values(tmp_path: Path) -> None:
    """Outputs of all experts one below the other, where the values have the inputs first."""
    _, expected = write_gpt_oss(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for name, values in expected.items():
        matrix = checkpoint.coded(name)
        assert isinstance(matrix, GroupedMatrix)
        assert (matrix.kind, matrix.group) == ("mxfp4", 32)
        got = torch.cat([values_of(matrix, 0, 40), values_of(matrix, 40, matrix.n)])
        assert torch.equal(got, values.transpose(1, 2).flatten(0, 1))


def test_a_power_of_two_beyond_float32_leaves_mxfp4_to_its_values(tmp_path: Path) -> None:
    _, expected = write_gpt_oss(tmp_path)
    stored, name = load_file(tmp_path / "model.safetensors"), next(iter(expected))
    stored[f"{name}_scales"][-1, -1, -1] = 255
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert [checkpoint.coded(name) is None for name in expected] == [True, False, False, False]


def test_gpt_oss_with_its_experts_in_mxfp4(tmp_path: Path) -> None:
    model, _ = write_gpt_oss(tmp_path)
    tokens = random_tokens(20)
    runner = open_runner(tmp_path, dtype="float32")
    (got,) = Probe(runner).step({1: (0, tokens)})
    runner.close()
    torch.testing.assert_close(got, expected_logits(model, tokens), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method is 'hqq'; it must be one of gptq, awq,"),
        ("gptq", "quant_method is null"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; it must be one of 4, 8"),
        ({**GPTQ, "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**GPTQ, "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
        (compressed("marlin-24"), "format is 'marlin-24'"),
        (compressed("int-quantized", num_bits=2), "num_bits is 2"),
        ({**compressed("int-quantized"), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit true"),
        ({"quant_method": "compressed-tensors", "format": "dense"}, "format is 'dense'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    quantization: Any, message: str, tmp_path: Path
) -> None:
    make_model(tmp_path, "llama", num_attention_heads=4, **SHAPE)
    write_config(tmp_path, quantization)
    with pytest.raises(ModelError) as error:
        open_checkpoint(tmp_path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{tmp_path}: config.json")


@pytest.mark.parametrize("name", ["gptq-8-act-order", "awq", "w4a16-zeros", "fp8-blocks", "nf4"])
def test_settings_of_any_kind_are_read_or_refused(name: str, tmp_path: Path) -> None:
    quantization, pack, options = FORMATS[name]
    parts, _ = pack(torch.Size((64, 64)), 1, **options)
    save_file(
        {f"a.{part}": tensor for part, tensor in parts.items()}, tmp_path / "model.safetensors"
    )
    refused = 0
    for key, kept in list(quantization.items()):
        for value in WRONG:
            config = {**quantization, key: value}
            if value is MISSING:
                del config[key]
            text = json.dumps({"quantization_config": config})
            (tmp_path / "config.json").write_text(text)

            def read() -> None:
                open_checkpoint(tmp_path).read("a.weight")

            refused += outcome(read) is not None
        assert quantization[key] == kept
    assert refused > 50


def test_parts_that_do_not_fit_one_another_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", num_attention_heads=4, **SHAPE)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj"
    whole, _ = pack_gptq(torch.Size((64, 64)), 1, bits=4, form="gptq", ordered=False)
    write_config(tmp_path, {**GPTQ, "bits": 4})
    wrong = {
        "scales": torch.ones(2, 63).half(),
        "qzeros": whole["qzeros"][:1],
        "g_idx": whole["g_idx"] + 1,
        "qweight": whole["qweight"].long(),
    }
    for part, tensor in wrong.items():
        parts = {f"{name}.{key}": value for key, value in (whole | {part: tensor}).items()}
        save_file({**stored, **parts}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=f"{name}.{part}"):
            open_checkpoint(tmp_path).read(f"{name}.weight")


def test_blocks_of_mxfp4_hold_its_values(tmp_path: Path) -> None:
    """As doubled integers with halved powers, where half floats hold these; the power of a block of
    zeros may be anything."""
    scales = np.array([[2.0**-23, 2.0**15, 2.0**127], [2.0**-23, 1.0, 2.0**-127]], np.float32)
    codes = np.random.default_rng(1).integers(0, 16, (2, 96)).astype(np.uint8)
    codes[0, 64:], codes[1, 64:] = np.tile([0, 8], 16), 0

    def given(scales: np.ndarray) -> GroupedMatrix:
        return GroupedMatrix("mxfp4", 2, 96, scales, None, lambda first, last: codes[first:last])

    matrix = in_blocks(given(scales))
    assert matrix is not None
    found = matrix.read(0, 2)
    positive = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
    twice = np.concatenate((positive, -positive))[found.codes]
    got = twice * found.factors.astype(np.float32).repeat(32, 1)
    want = values_of(given(np.where(scales > 2.0**99, 1, scales)), 0, 2)
    assert np.array_equal(got, want.numpy())
    for beyond in (2.0**17, 2.0**-24):
        scales[1, 1] = beyond
        assert in_blocks(given(scales)) is None


@pytest.mark.skipif(not build.available_paths(), reason="this CPU has no native instruction path")
def test_experts_of_mxfp4_stay_so_on_a_cpu(tmp_path: Path) -> None:
    model, _ = write_gpt_oss(tmp_path)
    tokens = random_tokens(20)
    runner = open_runner(tmp_path)
    decoder: Any = runner.decoder.model
    pairs = decoder.layers[0][1].mixer.experts.pairs
    assert {layer.kinds for pair in pairs for layer in pair} == {("mxfp4", "mxfp4"), ("mxfp4",)}
    assert "mxfp4" in runner.device.weights
    (got,) = Probe(runner).step({1: (0, tokens)})
    runner.close()
    # The first token attends to itself and its layer's sink alone.
    want = expected_logits(model, tokens)[0]
    assert float((got[0] - want).norm() / want.norm()) < 0.03
