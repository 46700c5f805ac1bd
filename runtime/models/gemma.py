"""Gemma 2 and the text models of Gemma 3: four norms a layer, windows in most layers, tied.

Their norms store weight - 1 and multiply in float32. Gemma 2 caps attention scores and logits;
Gemma 3 has norms on q and k instead, and another rotary base in its sliding layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ops.blocks.block import Block
from runtime.models import config_values as values
from runtime.models.family import (
    Family,
    attention,
    dense_mlp,
    family,
    head_dim,
    norm,
    windows_by_type,
)
from runtime.models.rope import RopeSpec, parse_rope, sliding_rope

if TYPE_CHECKING:
    from ops.blocks.attention import Attention

OFFSET = 1.0


def read_gemma2(config: dict[str, Any]) -> Family:
    config = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}
    rope = parse_rope(config, head_dim(config, 256))
    windows = windows_by_type(config, lambda i: i % 2 == 0)
    return _family(config, [_attention(config, rope, window) for window in windows])


def read_gemma3(config: dict[str, Any]) -> Family:
    pattern = values.integer(config, "sliding_window_pattern", 6)
    windows = windows_by_type(config, lambda i: (i + 1) % pattern != 0)
    dim = head_dim(config, 256)
    full = parse_rope(config, dim, layer_type="full_attention", default_theta=1_000_000.0)
    sliding = sliding_rope(config, dim, values.number(config, "rope_local_base_freq", 10_000.0))
    return _family(
        config,
        [
            _attention(config, sliding if window else full, window, qk_norm_offset=OFFSET)
            for window in windows
        ],
    )


def _cap(config: dict[str, Any], key: str) -> float:
    """A cap on scores or logits; 0 for none."""
    return values.number(config, key) if config.get(key) else 0.0


def _attention(config: dict[str, Any], rope: RopeSpec, window: int, **special: Any) -> Attention:
    bias = values.flag(config, "attention_bias", False)
    return attention(
        config,
        rope,
        dim=head_dim(config, 256),
        scale=values.number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        window=window,
        soft_cap=_cap(config, "attn_logit_softcapping"),
        qkv_bias=bias,
        o_bias=bias,
        **special,
    )


def _family(config: dict[str, Any], mixers: list[Attention]) -> Family:
    config = {"hidden_activation": "gelu_pytorch_tanh", **config}
    mlp = dense_mlp(config, activation_key="hidden_activation")

    def block(mixer: Any, before: str, after: str) -> Block:
        return Block(
            mixer=mixer,
            norm=norm(config, before, offset=OFFSET),
            out_norm=norm(config, after, offset=OFFSET),
        )

    return family(
        config,
        tuple(
            (
                block(mixer, "input_layernorm", "post_attention_layernorm"),
                block(mlp, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
            )
            for mixer in mixers
        ),
        tied=True,
        norm_offset=OFFSET,
        embed_scale=values.integer(config, "hidden_size") ** 0.5,
        logit_soft_cap=_cap(config, "final_logit_softcapping"),
    )
