"""Qwen 3 (dense): Llama with a norm on each head of q and k."""

from __future__ import annotations

from typing import Any

from runtime.models import config_values as values
from runtime.models.family import Family, LayerNames, decoder_spec, head_dim
from runtime.models.qwen2 import qwen_windows
from runtime.models.rope import parse_rope

NAMES = LayerNames(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")


def read(config: dict[str, Any]) -> Family:
    dim = head_dim(config, 128)
    rope = parse_rope(config, dim)
    spec = decoder_spec(
        config,
        rotary_dim=rope.dim,
        head_dim=dim,
        scale=dim**-0.5,
        windows=qwen_windows(config),
        qk_norm=True,
    )
    attention_bias = values.flag(config, "attention_bias", False)
    return Family(
        spec=spec,
        ropes=(rope,) * spec.num_layers,
        tied=values.flag(config, "tie_word_embeddings", False),
        names=NAMES,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
    )
