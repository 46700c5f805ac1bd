"""Mistral: Llama with one sliding window for all layers (null in later releases)."""

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
    rope = parse_rope(config, head_dim(config))
    window = sliding_window(config)
    layer = pre_norm_layer(config, attention(config, rope, window=window), dense_mlp(config))
    return family(config, (layer,) * values.layers(config))
