"""GGUF files of every architecture give transformers' logits; split files; every quantized type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.errors import ModelError
from tests.runtime.checkpoints.gguf_families import CASES, saved, write
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

    from transformers import PreTrainedModel


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[PreTrainedModel, Path]]:
    def make(name: str, kind: Kind = Kind.F32, **split: int) -> tuple[PreTrainedModel, Path]:
        case = CASES[name]
        shape = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}
        model = make_model(tmp_path, case.model_type, **(shape | case.special))
        for parameter in model.parameters():
            if parameter.ndim == 1:  # so that adding 1 to a norm and taking it away changes nothing
                parameter.data.mul_(4096).round_().div_(4096)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(2)))
        model.save_pretrained(tmp_path)
        model.name_or_path = str(tmp_path)
        return model, write(model, tmp_path / "model.gguf", name, case, kind, **split)

    return make


def assert_logits_equal(model: PreTrainedModel, path: Path) -> None:
    tokens = random_tokens(25)
    runner = open_runner(path, dtype="float32")
    (got,) = Probe(runner).step({1: (0, tokens)})
    runner.close()
    torch.testing.assert_close(got, expected_logits(model, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(5)
def test_logits_equal_transformers(name: str, made: Any) -> None:
    assert_logits_equal(*made(name))


def test_positions_of_pictures_and_halves_that_do_not_fit_are_refused(made: Any) -> None:
    def refused(name: str, keys: dict[str, Any], why: str, **changed: Any) -> None:
        model, path = made(name)
        path.unlink()
        case = CASES[name]._replace(metadata=CASES[name].metadata | keys)
        write(model, path, name, case, **changed)
        with pytest.raises(ModelError, match=why):
            open_runner(path)

    refused("glm4", {"rope.dimension_sections": [8, 4, 4, 0]}, r"M-RoPE")
    refused("deepseek2", {"attention.value_length_mla": 10}, r"kv_b_proj.weight' has shape")
    refused("olmo2:windows", {"attention.sliding_window_pattern": [True]}, r"a list of 4 of true")
    refused("qwen3next", {"ssm.group_count": 4}, r"in_proj_(qkvz|ba)|num_key_heads")


def test_older_files_of_deepseek_have_the_published_groups(made: Any) -> None:
    model, path = made("deepseek2:lite")
    path.unlink()
    keys = CASES["deepseek2:lite"].metadata
    case = CASES["deepseek2:lite"]._replace(metadata=keys | {"expert_count": 160})
    config = open_checkpoint(write(model, path, "deepseek2:lite", case)).config
    assert (config["n_group"], config["topk_group"]) == (8, 3)
    assert config["topk_method"] == "group_limited_greedy"


def test_experts_of_mxfp4_are_kept_as_they_are(made: Any) -> None:
    _, path = made("gpt-oss", Kind.MXFP4)
    kept, wide = open_runner(path), open_runner(path, dtype="float32")
    tokens = random_tokens(25)
    got, want = (Probe(runner).step({1: (0, tokens)})[0] for runner in (kept, wide))
    model: Any = kept.decoder.model
    pairs = model.layers[1][1].mixer.experts.pairs
    assert {layer.kinds for pair in pairs for layer in pair} == {("mxfp4", "mxfp4"), ("mxfp4",)}
    assert float((got - want).norm() / want.norm()) < 0.2  # activations are bfloat16 too
    kept.close()
    wide.close()


def test_a_model_in_several_files(made: Any, tmp_path: Path) -> None:
    model, _ = made("qwen3", split_max_tensors=10)
    first, *others = sorted(tmp_path.glob("model-*-of-*.gguf"))
    assert len(others) > 2
    assert_logits_equal(model, first)
    with pytest.raises(ModelError, match=rf"is not the first of \d+ parts; name {first}"):
        open_checkpoint(others[0])
    with pytest.raises(ModelError, match=r"whose names must end in -00001-of-0000\d\.gguf"):
        open_checkpoint(first.rename(tmp_path / "other.gguf"))
    first = (tmp_path / "other.gguf").rename(first)
    kept = others[0].read_bytes()
    others[0].write_bytes(others[1].read_bytes())
    with pytest.raises(ModelError, match=r"says that it is part 2 of \d+, counted from 0; 1 of"):
        open_checkpoint(first)
    others[0].write_bytes(kept)
    others[1].unlink()
    with pytest.raises(ModelError, match=f"{others[1]}: cannot be read"):
        open_checkpoint(first)


@pytest.mark.parametrize("name", ["qwen3moe", "qwen3moe:fused"])
def test_experts_of_a_quantized_file_are_those_of_the_whole_tensor(made: Any, name: str) -> None:
    model, path = made(name, Kind.Q8_0)
    checkpoint, stored = open_checkpoint(path), saved(model)
    for which in ("gate", "up"):
        tensor = f"model.layers.1.mlp.experts.2.{which}_proj.weight"
        raw = checkpoint.read(tensor)
        got = np.frombuffer(raw.buffer, np.float32).reshape(raw.shape)
        want = dequantize(quantize(stored[tensor].numpy(), Kind.Q8_0), Kind.Q8_0)
        assert np.array_equal(got, want)


# Where a block's half-precision factors stand.
TYPES = {
    Kind.Q4_0: [0],
    Kind.Q4_1: [0, 2],
    Kind.Q5_0: [0],
    Kind.Q5_1: [0, 2],
    Kind.Q8_0: [0],
    Kind.Q2_K: [80, 82],
    Kind.Q3_K: [108],
    Kind.Q4_K: [0, 2],
    Kind.Q5_K: [0, 2],
    Kind.Q6_K: [208],
    Kind.IQ4_NL: [0],
    Kind.IQ4_XS: [0],
}


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_random_blocks_of_every_type_are_the_packages_values(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (24, 512 // block, size), dtype=np.uint8)
    for at in TYPES[kind]:
        blocks[..., at + 1] &= 0xBF  # an exponent below that of infinities and NaN
    data = blocks.reshape(24, -1)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen2")
    for key in ("context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"qwen2.{key}", 512)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_block_count(1)
    writer.add_token_list(["a"])
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw = open_checkpoint(tmp_path / "model.gguf").read("model.layers.0.mlp.up_proj.weight")
    got = np.frombuffer(raw.buffer, np.float32).reshape(raw.shape)
    assert got.shape == (24, 512)
    assert np.isfinite(got).all()
    assert np.array_equal(got, dequantize(data, kind))
