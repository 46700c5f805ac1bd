"""Qwen 2 and 2.5: Llama with biases on q, k and v, and windows in some layers if asked for.

Qwen 2 MoE has experts, and beside them one that every token goes through, behind a gate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
from runtime.models.mixture import mixture_of_experts
from runtime.models.rope import parse_rope
from runtime.models.sources import Linear

if TYPE_CHECKING:
    from ops.blocks.dense_mlp import DenseMlp


def qwen_windows(config: dict[str, Any]) -> tuple[int, ...]:
    """The windows of Qwen 2 and 3: off unless `use_sliding_window`."""
    if not values.flag(config, "use_sliding_window", False):
        return (0,) * values.layers(config)
    first = values.integer(config, "max_window_layers", 28, low=0)
    return windows_by_type(config, lambda i: i >= first)


def is_dense(config: dict[str, Any]) -> tuple[bool, ...]:
    """Which layers of a mixture of Qwen 2 or 3 have an MLP in place of the experts."""
    dense = values.integers(config, "mlp_only_layers")
    interval = values.integer(config, "decoder_sparse_step", 1)
    return tuple(i in dense or (i + 1) % interval != 0 for i in range(values.layers(config)))


def shared_expert(config: dict[str, Any]) -> DenseMlp:
    """The expert that every token goes through, behind a gate."""
    inner = values.integer(config, "shared_expert_intermediate_size")
    gate = Linear(("mlp.shared_expert_gate",), (1,), values.integer(config, "hidden_size"))
    return replace(dense_mlp(config, path="mlp.shared_expert", inner=inner), gate=gate)


def read_moe(config: dict[str, Any]) -> Family:
    rope, bias = parse_rope(config, head_dim(config)), values.flag(config, "qkv_bias", True)
    first = values.integer(config, "max_window_layers", 28, low=0)
    windows = (0,) * values.layers(config)
    if values.flag(config, "use_sliding_window", False):
        windows = windows_by_type(config, lambda i: i % 2 == 0 and i < first)
    experts = mixture_of_experts(
        config,
        path="mlp",
        renormalise=values.flag(config, "norm_topk_prob", False),
        intermediate_key="moe_intermediate_size",
    )
    shared, mlp = shared_expert(config), dense_mlp(config)
    layers = []
    for window, dense in zip(windows, is_dense(config), strict=True):
        mixer = attention(config, rope, window=window, qkv_bias=bias)
        second, beside = (mlp, None) if dense else (experts, shared)
        layers.append(pre_norm_layer(config, mixer, second, beside=beside))
    return family(config, tuple(layers))


def read(config: dict[str, Any]) -> Family:
    rope, mlp = parse_rope(config, head_dim(config)), dense_mlp(config)
    return family(
        config,
        tuple(
            pre_norm_layer(config, attention(config, rope, window=window, qkv_bias=True), mlp)
            for window in qwen_windows(config)
        ),
    )
