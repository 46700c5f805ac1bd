"""Granite 3 (dense): Llama with factors on embeddings, attention, residual branches and logits."""

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
        attention(
            config,
            parse_rope(config, head_dim(config)),
            scale=values.number(config, "attention_multiplier", 1.0),
            qkv_bias=bias,
            o_bias=bias,
        ),
        dense_mlp(config, bias=values.flag(config, "mlp_bias", False)),
        residual_scale=values.number(config, "residual_multiplier", 1.0),
    )
    return family(
        config,
        (layer,) * values.layers(config),
        embed_scale=values.number(config, "embedding_multiplier", 1.0),
        logit_scale=1.0 / values.number(config, "logits_scaling", 1.0),
    )
