"""GLM-4: half of a head turns, in pairs; biases on q, k and v; gate and up are one tensor.

The first release (`glm`) has norms before the mixers, the 0414 release (`glm4`) on both sides.
GLM-4.5 and 4.6 (`glm4_moe`) have experts, and turn a head in halves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ops.blocks.block import Block
from runtime.models import config_values as values
from runtime.models.deepseek import deepseek_family, deepseek_v3_experts
from runtime.models.family import (
    Family,
    attention,
    dense_mlp,
    family,
    head_dim,
    norm,
    pre_norm_layer,
)
from runtime.models.rope import parse_rope

if TYPE_CHECKING:
    from ops.blocks.attention import Attention
    from ops.blocks.dense_mlp import DenseMlp


def read_glm(config: dict[str, Any]) -> Family:
    config = _with_defaults(config)
    layer = pre_norm_layer(config, *_mixers(config))
    return family(config, (layer,) * values.layers(config))


def read_glm4(config: dict[str, Any]) -> Family:
    config = _with_defaults(config)
    mixer, mlp = _mixers(config)
    layer = (
        Block(
            mixer=mixer,
            norm=norm(config, "input_layernorm"),
            out_norm=norm(config, "post_self_attn_layernorm"),
        ),
        Block(
            mixer=mlp,
            norm=norm(config, "post_attention_layernorm"),
            out_norm=norm(config, "post_mlp_layernorm"),
        ),
    )
    return family(config, (layer,) * values.layers(config))


def read_glm4_moe(config: dict[str, Any]) -> Family:
    config = {"rms_norm_eps": 1e-5, **config}
    dim = head_dim(config)
    mixer = attention(
        config,
        parse_rope(config, dim, partial_rotary_factor=0.5),
        qkv_bias=values.flag(config, "attention_bias", False),
        qk_norm_offset=0.0 if values.flag(config, "use_qk_norm", False) else None,
    )
    return deepseek_family(config, mixer, deepseek_v3_experts(config))


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    return {"rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, **config}


def _mixers(config: dict[str, Any]) -> tuple[Attention, DenseMlp]:
    dim = head_dim(config, 128)
    return (
        attention(
            config,
            parse_rope(config, dim, partial_rotary_factor=0.5),
            dim=dim,
            qkv_bias=values.flag(config, "attention_bias", True),
            rope_interleaved=True,
        ),
        dense_mlp(config, gate_up_names=("gate_up_proj",)),
    )
