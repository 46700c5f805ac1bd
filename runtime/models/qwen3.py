"""Qwen 3: Llama with a norm on each head of q and k; dense, or with experts in place of MLPs."""

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
from runtime.models.qwen2 import is_dense, qwen_windows
from runtime.models.rope import parse_rope

if TYPE_CHECKING:
    from ops.blocks.attention import Attention


def read(config: dict[str, Any]) -> Family:
    mlp, windows = dense_mlp(config), qwen_windows(config)
    mixers = _attention(config, head_dim(config, 128), windows)
    return family(config, tuple(pre_norm_layer(config, mixer, mlp) for mixer in mixers))


def read_moe(config: dict[str, Any]) -> Family:
    count = values.layers(config)
    slides = values.flag(config, "use_sliding_window", False)
    windows = (sliding_window(config) if slides else 0,) * count
    mixers = _attention(config, head_dim(config), windows)
    mlp = dense_mlp(config)
    experts = mixture_of_experts(
        config,
        path="mlp",
        renormalise=values.flag(config, "norm_topk_prob", False),
        intermediate_key="moe_intermediate_size",
    )
    return family(
        config,
        tuple(
            pre_norm_layer(config, mixer, mlp if dense else experts)
            for mixer, dense in zip(mixers, is_dense(config), strict=True)
        ),
    )


def _attention(config: dict[str, Any], dim: int, windows: tuple[int, ...]) -> list[Attention]:
    """The attention of each layer."""
    rope, bias = parse_rope(config, dim), values.flag(config, "attention_bias", False)
    return [
        attention(
            config,
            rope,
            dim=dim,
            window=window,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm_offset=0.0,
        )
        for window in windows
    ]
