"""Llama 1 to 3 and the many models of its form (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from typing import Any

from runtime.models.family import Family, decoder_spec, head_dim
from runtime.models.rope import parse_rope


def read(config: dict[str, Any]) -> Family:
    rope = parse_rope(config, head_dim(config))
    spec = decoder_spec(config, rotary_dim=rope.dim)
    attention_bias = bool(config.get("attention_bias", False))
    return Family(
        spec=spec,
        ropes=(rope,) * spec.num_layers,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )
