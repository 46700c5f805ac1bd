"""Mistral: Llama with one sliding window for all layers (null in later releases); Mixtral has
experts in place of the MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from runtime.models.mixture import mixture_of_experts
from runtime.models.rope import RopeSpec, parse_rope

if TYPE_CHECKING:
    from ops.blocks.block import Mixer


def read(config: dict[str, Any]) -> Family:
    rope = parse_rope(config, head_dim(config))
    return _family(config, rope, dense_mlp(config))


def read_mixtral(config: dict[str, Any]) -> Family:
    rope = parse_rope(config, head_dim(config), default_theta=1_000_000.0)
    experts = mixture_of_experts(
        config,
        path="block_sparse_moe",
        renormalise=True,
        intermediate_key="intermediate_size",
        names=("w1", "w3", "w2"),
    )
    return _family(config, rope, experts)


def _family(config: dict[str, Any], rope: RopeSpec, second: Mixer) -> Family:
    layer = pre_norm_layer(config, attention(config, rope, window=sliding_window(config)), second)
    return family(config, (layer,) * values.layers(config))
