"""Quantized checkpoints: what is computed is the float model of the values that the layout spells."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ops.coded_weight import CODE_SHAPES, CodedMatrix, GroupedMatrix
from ops.cpu import build
from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.checkpoints.quantized.in_blocks import in_blocks
from runtime.errors import ModelError
from tests.runtime.checkpoints.damage import MISSING, WRONG, outcome
from tests.runtime.checkpoints.quantized_formats import (
    FORMATS,
    GPTQ,
    SHAPE,
    compressed,
    pack_gptq,
    write_config,
    write_gpt_oss,
    write_quantized,
)
from tests.runtime.models.tiny_models import (
    Probe,
    expected_logits,
    make_model,
    open_runner,
    random_tokens,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


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
KEPT_FLOATS = {"compressed-fp8": "fp8", "fp8-tensor": "fp8", "nf4": "nf4", "nf4-nested": "nf4"}


def in_order(values: Tensor, matrix: CodedMatrix | GroupedMatrix) -> Tensor:
    """The values of a matrix [n, k] by its k."""
    return values if matrix.order is None else values[:, torch.from_numpy(matrix.order)]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in KEPT_FLOATS])
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


@pytest.mark.parametrize("name", KEPT_FLOATS)
def test_codes_of_floats_are_kept_to_the_bit(name: str, tmp_path: Path) -> None:
    _, expected = write_quantized(name, tmp_path)
    checkpoint, found = open_checkpoint(tmp_path), 0
    for weight, values in expected.items():
        matrix = in_blocks(checkpoint.coded(weight))
        if matrix is None:  # a block of nf4 goes on in the next row
            assert name.startswith("nf4")
            assert values.shape[1] % 64
            continue
        assert (matrix.kind, matrix.n, matrix.k) == (KEPT_FLOATS[name], *values.shape)
        found += 1
        for first, last in ((0, 16), (16, matrix.n)):
            codes = matrix.read(first, last)
            if matrix.table is None:
                numbers = torch.from_numpy(codes.codes).view(torch.float8_e4m3fn).float()
            else:
                numbers = torch.from_numpy(matrix.table)[torch.from_numpy(codes.codes).long()]
            span = CODE_SHAPES[matrix.kind].span
            scales = torch.from_numpy(codes.factors).repeat_interleave(span, 1)
            assert torch.equal(numbers * scales[:, : matrix.k], values[first:last].float())
    assert found


def fp8_groups(k: int, scales: np.ndarray) -> GroupedMatrix:
    codes = np.arange(2 * k, dtype=np.uint8).reshape(2, k)
    return GroupedMatrix("fp8", 2, k, scales, None, lambda first, last: codes[first:last] & 63)


def test_scales_of_fp8_are_repeated_for_each_128_neighbours() -> None:
    for k, groups, spans in ((512, 2, 4), (384, 3, 3), (160, 1, 2), (512, 1, 4)):
        scales = np.random.default_rng(1).random((2, groups)).astype(np.float32)
        matrix = in_blocks(fp8_groups(k, scales))
        assert matrix is not None
        factors = matrix.read(1, 2).factors
        assert np.array_equal(factors, scales[1:].repeat(spans // groups, 1))
    assert in_blocks(fp8_groups(256, np.ones((2, 4), np.float32))) is None  # 64 neighbours
    assert in_blocks(fp8_groups(120, np.ones((2, 1), np.float32))) is None
    assert in_blocks(fp8_groups(128, np.full((2, 1), np.nan, np.float32))) is None


def test_a_code_of_fp8_that_is_no_number_is_told() -> None:
    given = fp8_groups(128, np.ones((2, 1), np.float32))
    codes = np.full((2, 128), 255, np.uint8)
    matrix = in_blocks(replace(given, read=lambda first, last: codes[first:last]))
    assert matrix is not None
    with pytest.raises(ModelError, match="an FP8 weight is no number"):
        matrix.read(0, 2)


GROUPED = {*KEPT, *KEPT_FLOATS, "fp8-narrow-blocks"}


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
@pytest.mark.parametrize("name", KEPT | KEPT_FLOATS)
def test_what_is_kept_is_served_within_the_rounding_of_inputs(name: str, tmp_path: Path) -> None:
    model, _ = write_quantized(name, tmp_path)
    tokens = random_tokens(20)
    runner = open_runner(tmp_path)
    (got,) = Probe(runner).step({1: (0, tokens)})
    decoder: Any = runner.decoder.model
    assert decoder.layers[0][0].mixer.qkv.kinds == ((KEPT | KEPT_FLOATS)[name],) * 3
    runner.close()
    # The first token attends to itself alone; large random scores of others choose at random.
    want = expected_logits(model, tokens)[0]
    assert float((got[0] - want).norm() / want.norm()) < 0.03


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
