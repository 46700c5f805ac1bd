"""Llama 1 to 3 and the many models of its form (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from typing import Any

from runtime.models import config_values as values
from runtime.models.family import (
    Family,
    attention,
    dense_mlp,
    family,
    head_dim,
    pre_norm_layer,
)
from runtime.models.rope import parse_rope


def read(config: dict[str, Any]) -> Family:
    bias = values.flag(config, "attention_bias", False)
    layer = pre_norm_layer(
        config,
        attention(config, parse_rope(config, head_dim(config)), qkv_bias=bias, o_bias=bias),
        dense_mlp(config, bias=values.flag(config, "mlp_bias", False)),
    )
    return family(config, (layer,) * values.layers(config))
