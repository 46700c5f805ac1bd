"""Gemma 2 and the text models of Gemma 3: four norms a layer, windows in most layers, tied.

Their norms store weight - 1. Gemma 2 caps attention scores and logits; Gemma 3 has norms on q and
k instead, and another rotary base in its sliding layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runtime.models import config_values as values
from runtime.models.family import (
    Family,
    LayerNames,
    activation,
    decoder_spec,
    head_dim,
    windows_by_type,
)
from runtime.models.rope import RopeSpec, parse_rope

GEMMA2_NAMES = LayerNames(
    attention_out_norm="post_attention_layernorm",
    post_attention_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
GEMMA3_NAMES = replace(GEMMA2_NAMES, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")


def read_gemma2(config: dict[str, Any]) -> Family:
    config = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}
    windows = windows_by_type(config, lambda i: i % 2 == 0)
    rope = parse_rope(config, head_dim(config, 256))
    return _family(config, windows, (rope,) * len(windows), GEMMA2_NAMES)


def read_gemma3(config: dict[str, Any]) -> Family:
    pattern = values.integer(config, "sliding_window_pattern", 6)
    windows = windows_by_type(config, lambda i: (i + 1) % pattern != 0)
    dim = head_dim(config, 256)
    full = parse_rope(config, dim, layer_type="full_attention", default_theta=1_000_000.0)
    return _family(
        config,
        windows,
        tuple(_sliding_rope(config, dim) if window else full for window in windows),
        GEMMA3_NAMES,
    )


def _sliding_rope(config: dict[str, Any], dim: int) -> RopeSpec:
    if isinstance(config.get("rope_parameters"), dict):
        return parse_rope(config, dim, layer_type="sliding_attention")
    # Before transformers 5 the sliding layers had a base of their own and never a scaling.
    local = values.number(config, "rope_local_base_freq", 10_000.0)
    return parse_rope({**config, "rope_scaling": None, "rope_theta": local}, dim)


def _family(
    config: dict[str, Any],
    windows: tuple[int, ...],
    ropes: tuple[RopeSpec, ...],
    names: LayerNames,
) -> Family:
    dim = head_dim(config, 256)
    spec = decoder_spec(
        config,
        rotary_dim=ropes[0].dim,
        head_dim=dim,
        scale=values.number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        windows=windows,
        activation=activation(
            {"hidden_activation": "gelu_pytorch_tanh", **config}, "hidden_activation"
        ),
        qk_norm=names.q_norm is not None,
        post_norms=True,
        embed_scale=values.integer(config, "hidden_size") ** 0.5,
        attention_soft_cap=_cap(config, "attn_logit_softcapping"),
        logit_soft_cap=_cap(config, "final_logit_softcapping"),
    )
    attention_bias = values.flag(config, "attention_bias", False)
    return Family(
        spec=spec,
        ropes=ropes,
        tied=values.flag(config, "tie_word_embeddings", True),
        names=names,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        norm_offset=1.0,
    )


def _cap(config: dict[str, Any], key: str) -> float:
    """A cap on scores or logits; 0 for none."""
    return values.number(config, key) if config.get(key) else 0.0
