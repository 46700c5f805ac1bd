"""gpt-oss: experts with biases and a clamped activation, attention sinks, a window in every second
layer, yarn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runtime.errors import ModelError
from runtime.models import config_values as values
from runtime.models.family import (
    Family,
    attention,
    family,
    head_dim,
    pre_norm_layer,
    windows_by_type,
)
from runtime.models.mixture import stacked_mixture_of_experts
from runtime.models.rope import parse_rope
from runtime.models.sources import Wide

# What the activation is made for (`OpSet.clamped_silu_and_mul`).
_ACTIVATION = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
_ROPE |= {"original_max_position_embeddings": 4096}


def read(config: dict[str, Any]) -> Family:
    for key, value in _ACTIVATION.items():
        given = values.number(config, key, value)
        if given != value:
            raise ModelError(f"config.json: {key} {given:g} is not supported; it must be {value:g}")
    config = {"rms_norm_eps": 1e-5, "sliding_window": 128, **config}
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config["rope_scaling"] = _ROPE
    dim, heads = head_dim(config, 64), values.integer(config, "num_attention_heads")
    rope = parse_rope(config, dim, default_theta=150_000.0)
    bias = values.flag(config, "attention_bias", True)
    experts = stacked_mixture_of_experts(config, path="mlp")
    layers = []
    for window in windows_by_type(config, lambda i: i % 2 == 0):
        mixer = attention(config, rope, dim=dim, window=window, qkv_bias=bias, o_bias=bias)
        sinks = Wide("self_attn.sinks", heads)
        mixer = replace(mixer, spec=replace(mixer.spec, sinks=sinks))
        layers.append(pre_norm_layer(config, mixer, experts))
    return family(config, tuple(layers))
