"""Qwen 2 and 2.5: Llama with biases on q, k and v, and windows in the upper layers if asked for."""

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


def qwen_windows(config: dict[str, Any]) -> tuple[int, ...]:
    """The windows of Qwen 2 and 3: off unless `use_sliding_window`."""
    if not values.flag(config, "use_sliding_window", False):
        return (0,) * values.layers(config)
    first = values.integer(config, "max_window_layers", 28, low=0)
    return windows_by_type(config, lambda i: i >= first)


def read(config: dict[str, Any]) -> Family:
    rope, mlp = parse_rope(config, head_dim(config)), dense_mlp(config)
    return family(
        config,
        tuple(
            pre_norm_layer(config, attention(config, rope, window=window, qkv_bias=True), mlp)
            for window in qwen_windows(config)
        ),
    )
