"""Models of random weights in the shapes of published ones, for timing: what they answer means
nothing. Prompts are made of the embedded model's words, so each has its tokenizer, with as many
names behind it as its vocabulary is longer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from runtime.checkpoints.cache_folder import build_once
from runtime.checkpoints.checkpoint import RawTensor, TensorInfo
from runtime.checkpoints.conversion import to_bfloat16
from runtime.checkpoints.embedded import ensure_embedded_model
from runtime.checkpoints.safetensors_file import write_safetensors
from scripts._floors import ModelSize

_COMMON = {"hidden_act": "silu", "tie_word_embeddings": True, "dtype": "bfloat16"}
# Wide heads and a vocabulary that is a third of the model; a wide MLP; many heads.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_COMMON,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
    "llama-3.2-1b": {
        **_COMMON,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
    },
    "smollm2-1.7b": {
        **_COMMON,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49_152,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 130_000.0,
        "rms_norm_eps": 1e-5,
    },
}
_BLOCK = 1 << 20  # random numbers that are drawn; tensors repeat them from different places


def size_of(config: dict[str, Any]) -> ModelSize:
    """What its steps cost in bfloat16."""
    matrices = [shape for name, shape in tensors_of(config).items() if len(shape) == 2]
    head = config["vocab_size"] * config["hidden_size"]
    body = sum(map(prod, matrices)) - head
    heads = config["num_attention_heads"] * config["head_dim"]
    return ModelSize(
        weight_bytes=2.0 * (body + head),
        token_flops=2.0 * body,
        head_flops=2.0 * head,
        attention_flops=4.0 * config["num_hidden_layers"] * heads,
    )


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a model of this config has."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def shape_folder(name: str, cache: Path) -> Path:
    """The folder of a model of this shape, made on first use: as large as the model."""

    def build(folder: Path) -> None:
        write_model(folder, SHAPES[name], ensure_embedded_model(cache, print))

    return build_once(cache / f"shape-{name}-1", build, print)


def write_model(folder: Path, config: dict[str, Any], tokenizer: Path) -> None:
    """A model of a config. tokenizer: a folder with the tokenizer to extend."""
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    settings = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    words = settings["model"]["vocab"]
    words |= {f"unused{i}": i for i in range(len(words), config["vocab_size"])}
    text = json.dumps(settings, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    shutil.copy(tokenizer / "tokenizer_config.json", folder)
    shapes = tensors_of(config)
    infos = {tensor: TensorInfo(shape, "bfloat16") for tensor, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", infos, _values(shapes))


def _values(shapes: dict[str, tuple[int, ...]]) -> Iterator[RawTensor]:
    drawn = np.random.default_rng(0).standard_normal(_BLOCK, dtype=np.float32)
    for number, shape in enumerate(shapes.values()):
        scale = shape[-1] ** -0.5
        block = to_bfloat16(np.roll(drawn, 7919 * number) * np.float32(scale))
        count = prod(shape)
        # Norms are ones.
        values = (
            np.resize(block, count) if len(shape) == 2 else to_bfloat16(np.ones(count, np.float32))
        )
        yield RawTensor(shape, "bfloat16", values.data.cast("B"))
