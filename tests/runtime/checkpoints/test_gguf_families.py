"""GGUF files of every architecture give transformers' logits; split files; every quantized type.

Tensors have the names that the `gguf` package maps transformers' to, the values and metadata that
llama.cpp's conversion writes: q and k reordered where its rotary is interleaved, Gemma's norms with
their 1, a layer's experts in one tensor.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.errors import ModelError
from tests.runtime.checkpoints.tiny_models import interleave
from tests.runtime.models.tiny_models import (
    Probe,
    expected_logits,
    make_model,
    open_runner,
    random_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transformers import PreTrainedModel


class Case(NamedTuple):
    """model_type, config, whether q and k are reordered, what is added to norms, metadata."""

    model_type: str
    special: dict[str, Any]
    reordered: bool = False
    norm_offset: float = 0.0
    metadata: dict[str, Any] = {}  # noqa: RUF012


EXPERTS = {"expert_count": 4, "expert_used_count": 2}
LONG = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.5, 2.0, 3.0, 4.0]}
CASES: dict[str, Case] = {
    "llama": Case("llama", {}, reordered=True),
    "llama-experts": Case(
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        reordered=True,
        metadata=EXPERTS,
    ),
    "qwen2": Case("qwen2", {}),
    "qwen2moe": Case(
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 64},
        metadata=EXPERTS
        | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64},
    ),
    "qwen3": Case("qwen3", {"head_dim": 16}),
    "qwen3moe": Case(
        "qwen3_moe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"head_dim": 16, "norm_topk_prob": True},
        metadata=EXPERTS | {"expert_feed_forward_length": 32},
    ),
    "gemma2": Case(
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
        norm_offset=1.0,
        metadata={"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
        | {"attention.sliding_window": 8},
    ),
    "gemma3": Case(
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 7}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        norm_offset=1.0,
        metadata={"attention.sliding_window": 8, "rope.freq_base": 1e6}
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": Case(
        "phi3",
        {"sliding_window": 8},
        metadata={"rope.dimension_count": 8, "attention.sliding_window": 8},
    ),
    "phi3-long": Case(
        "phi3",
        {"original_max_position_embeddings": 16}
        | {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG}
            | {"original_max_position_embeddings": 16, "factor": 32.0}
        },
        metadata={"rope.dimension_count": 8, "rope.scaling.original_context_length": 16}
        | {"rope.scaling.attn_factor": (1 + np.log(32) / np.log(16)) ** 0.5},
    ),
    "granite": Case(
        "granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2}
        | {"residual_multiplier": 0.4, "logits_scaling": 0.5},
        reordered=True,
        metadata={"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.4}
        | {"logit_scale": 0.5},
    ),
    "smollm3": Case("smollm3", {}, reordered=True),
    "olmo2": Case("olmo2", {}),
    "olmoe": Case(
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
        metadata=EXPERTS,
    ),
    "glm4": Case("glm4", {"head_dim": 16}, metadata={"rope.dimension_count": 8}),
    "cohere2": Case(
        "cohere2",
        {"sliding_window": 8, "logit_scale": 4.0},
        metadata={"logit_scale": 4.0, "attention.sliding_window": 8},
    ),
}


def write(
    model: PreTrainedModel, path: Path, name: str, case: Case, kind: Kind = Kind.F32, **split: int
) -> Path:
    config, architecture = model.config, name.split("-")[0]
    writer = gguf.GGUFWriter(path, architecture, **split)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    if architecture == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = {"rope.freq_base": (config.rope_parameters or {}).get("rope_theta", 1e4)}
    for key, value in (rope | case.metadata).items():
        add = {float: writer.add_float32, np.float64: writer.add_float32, int: writer.add_uint32}
        add.get(type(value), writer.add_string)(f"{architecture}.{key}", value)
    writer.add_token_list([str(i) for i in range(config.vocab_size)])
    for tensor, values in converted(model, architecture, case):
        own = kind if values.ndim > 1 and values.shape[-1] % 32 == 0 else Kind.F32
        writer.add_tensor(tensor, quantize(values, own), raw_dtype=own)
    if "-long" in name:
        for which in ("long", "short"):
            factors = np.array(LONG[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(
    model: PreTrainedModel, architecture: str, case: Case
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors as llama.cpp's conversion has them."""
    (which,) = (key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names, config = gguf.get_tensor_name_map(which, 16), model.config
    stacked: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in saved(model).items():
        values = tensor.numpy()
        if case.norm_offset and name.endswith("norm.weight"):
            values = values + np.float32(case.norm_offset)
        if case.reordered and "q_proj" in name:
            values = interleave(values, config.num_attention_heads)
        if case.reordered and "k_proj" in name:
            values = interleave(values, config.num_key_value_heads)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert:
            whole = name.replace(expert[0], ".experts.")
            stacked.setdefault(whole, {})[int(expert[1])] = values
            continue
        yield gguf_name(names, name), np.ascontiguousarray(values)
    for name, parts in stacked.items():
        yield gguf_name(names, name), np.stack([parts[i] for i in range(len(parts))])


def saved(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(f"{model.name_or_path}/model.safetensors")


def gguf_name(names: Any, name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    found = names.get_name(stem)
    assert found, name
    return f"{found}.{suffix}"


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[PreTrainedModel, Path]]:
    def make(name: str, kind: Kind = Kind.F32, **split: int) -> tuple[PreTrainedModel, Path]:
        case = CASES[name]
        shape = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}
        model = make_model(tmp_path, case.model_type, **shape, **case.special)
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


def test_experts_of_a_quantized_file_are_those_of_the_whole_tensor(made: Any) -> None:
    model, path = made("qwen3moe", Kind.Q8_0)
    checkpoint, stored = open_checkpoint(path), saved(model)
    name = "model.layers.1.mlp.experts.2.gate_proj.weight"
    raw = checkpoint.read(name)
    got = np.frombuffer(raw.buffer, np.float32).reshape(raw.shape)
    want = dequantize(quantize(stored[name].numpy(), Kind.Q8_0), Kind.Q8_0)
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
