"""Llama 1 to 3 and the many models of its form (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from typing import Any

from runtime.models import config_values as values
from runtime.models.family import Family, decoder_spec, head_dim
from runtime.models.rope import parse_rope


def read(config: dict[str, Any]) -> Family:
    rope = parse_rope(config, head_dim(config))
    spec = decoder_spec(config, rotary_dim=rope.dim)
    attention_bias = values.flag(config, "attention_bias", False)
    return Family(
        spec=spec,
        ropes=(rope,) * spec.num_layers,
        tied=values.flag(config, "tie_word_embeddings", False),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=values.flag(config, "mlp_bias", False),
    )
