"""Cohere 2 (Command R7B, Command A): attention and MLP side by side, under one centered norm.

Three layers of four have a window and rotary positions in pairs; the others see everything and
have no positions.
"""

from __future__ import annotations

from typing import Any

from ops.blocks.block import Block
from runtime.models import config_values as values
from runtime.models.family import (
    Family,
    attention,
    dense_mlp,
    family,
    norm,
    windows_by_type,
)
from runtime.models.rope import parse_rope


def read(config: dict[str, Any]) -> Family:
    config = {"sliding_window": 4096, **config}
    hidden, heads = (values.integer(config, key) for key in ("hidden_size", "num_attention_heads"))
    dim = max(1, hidden // heads)  # whatever the config's head_dim says
    rope = parse_rope(config, dim)
    pattern = values.integer(config, "sliding_window_pattern", 4)
    bias = values.flag(config, "attention_bias", False)
    before, mlp = norm(config, "input_layernorm", centered=True), dense_mlp(config)
    layers = []
    for window in windows_by_type(config, lambda i: (i + 1) % pattern != 0):
        mixer = attention(
            config,
            rope if window else None,
            dim=dim,
            window=window,
            qkv_bias=bias,
            o_bias=bias,
            rope_interleaved=True,
        )
        layers.append(
            (Block(mixer=mixer, norm=before), Block(mixer=mlp, norm=before, parallel=True))
        )
    return family(
        config,
        tuple(layers),
        tied=True,
        norm_centered=True,
        logit_scale=values.number(config, "logit_scale", 0.0625),
    )
