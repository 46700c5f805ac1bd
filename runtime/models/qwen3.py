"""Qwen 3 (dense): Llama with a norm on each head of q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.models import config_values as values
from runtime.models.family import Family, attention, dense_mlp, family, head_dim, pre_norm_layer
from runtime.models.qwen2 import qwen_windows
from runtime.models.rope import parse_rope

if TYPE_CHECKING:
    from ops.blocks.attention import Attention


def qwen3_attention(config: dict[str, Any]) -> list[Attention]:
    """The attention of each layer."""
    dim = head_dim(config, 128)
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
        for window in qwen_windows(config)
    ]


def read(config: dict[str, Any]) -> Family:
    mlp = dense_mlp(config)
    return family(
        config, tuple(pre_norm_layer(config, mixer, mlp) for mixer in qwen3_attention(config))
    )
