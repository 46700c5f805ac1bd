"""Phi 3 and 4-mini: fused projections, long rope, partial rotary, one window for all layers."""

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
    sliding_window,
)
from runtime.models.rope import parse_rope


def read(config: dict[str, Any]) -> Family:
    # The first releases called their long rope "su", then (wrongly) "yarn".
    rope = parse_rope(config, head_dim(config), renamed={"yarn": "longrope"})
    layer = pre_norm_layer(
        config,
        attention(
            config,
            rope,
            window=sliding_window(config),
            qkv_names=("self_attn.qkv_proj",),
        ),
        dense_mlp(config, gate_up_names=("gate_up_proj",)),
    )
    return family(config, (layer,) * values.layers(config))
