"""SmolLM3: Llama with no rotary embedding in every fourth layer."""

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
    windows_by_type,
)
from runtime.models.rope import parse_rope


def read(config: dict[str, Any]) -> Family:
    rope = parse_rope(config, head_dim(config), default_theta=2_000_000.0)
    layers = values.layers(config)
    interval = values.integer(config, "no_rope_layer_interval", 4)
    # Despite its name, the list has 1 where rotary is applied.
    given = values.per_layer(config, "no_rope_layers")
    rotated = given or [(i + 1) % interval != 0 for i in range(layers)]
    windows = (0,) * layers
    if values.flag(config, "use_sliding_window", False):
        windows = windows_by_type(config, lambda i: not rotated[i])
    bias = values.flag(config, "attention_bias", False)
    mlp = dense_mlp(config, bias=values.flag(config, "mlp_bias", False))
    mixers = [
        attention(config, rope if on else None, window=window, qkv_bias=bias, o_bias=bias)
        for on, window in zip(rotated, windows, strict=True)
    ]
    return family(config, tuple(pre_norm_layer(config, mixer, mlp) for mixer in mixers), tied=True)
