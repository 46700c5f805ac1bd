"""OLMo 2 and 3: norms behind the mixers and none before them, one norm over all heads of q and k.

OLMo 3 has windows in three layers of four, and its long rotary embedding in the others alone.
OLMoE has experts, and its norms where Llama has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ops.blocks.block import Block
from runtime.errors import ModelError
from runtime.models import config_values as values
from runtime.models.family import (
    Family,
    attention,
    dense_mlp,
    family,
    head_dim,
    norm,
    pre_norm_layer,
    sliding_layers,
    sliding_window,
)
from runtime.models.mixture import mixture_of_experts
from runtime.models.rope import RopeSpec, parse_rope, sliding_rope

if TYPE_CHECKING:
    from ops.blocks.attention import Attention


def read_olmo2(config: dict[str, Any]) -> Family:
    config = {"rms_norm_eps": 1e-5, **config}
    mixer = _attention(config, parse_rope(config, head_dim(config)), 0)
    return _family(config, [mixer] * values.layers(config))


def read_olmo3(config: dict[str, Any]) -> Family:
    config = {"rms_norm_eps": 1e-5, "sliding_window": 4096, **config}
    dim, theta = head_dim(config), 500_000.0
    full = parse_rope(config, dim, layer_type="full_attention", default_theta=theta)
    sliding = sliding_rope(config, dim, values.number(config, "rope_theta", theta))
    window = sliding_window(config)
    kinds = _attention(config, full, 0), _attention(config, sliding, window)
    slides = sliding_layers(config, lambda i: (i + 1) % 4 != 0)
    return _family(config, [kinds[slide] for slide in slides])


def read_olmoe(config: dict[str, Any]) -> Family:
    if config.get("clip_qkv") is not None:
        raise ModelError("config.json: clip_qkv is not supported; it must be null")
    config = {"rms_norm_eps": 1e-5, **config}
    experts = mixture_of_experts(
        config,
        path="mlp",
        renormalise=values.flag(config, "norm_topk_prob", False),
        intermediate_key="intermediate_size",
    )
    mixer = _attention(config, parse_rope(config, head_dim(config)), 0)
    return family(config, (pre_norm_layer(config, mixer, experts),) * values.layers(config))


def _attention(config: dict[str, Any], rope: RopeSpec, window: int) -> Attention:
    bias = values.flag(config, "attention_bias", False)
    return attention(
        config,
        rope,
        window=window,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm_offset=0.0,
        qk_norm_whole=True,
    )


def _family(config: dict[str, Any], mixers: list[Attention]) -> Family:
    mlp = dense_mlp(config)
    after = norm(config, "post_attention_layernorm"), norm(config, "post_feedforward_layernorm")
    return family(
        config,
        tuple(
            (
                Block(mixer=mixer, norm=None, out_norm=after[0]),
                Block(mixer=mlp, norm=None, out_norm=after[1]),
            )
            for mixer in mixers
        ),
    )
