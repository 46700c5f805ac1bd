"""Phi 3 and 4-mini: fused projections, long rope, partial rotary, one window for all layers."""

from __future__ import annotations

from typing import Any

from runtime.models import config_values as values
from runtime.models.family import Family, LayerNames, decoder_spec, head_dim, windows_by_type
from runtime.models.rope import parse_rope

NAMES = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def read(config: dict[str, Any]) -> Family:
    # The first releases called their long rope "su", then (wrongly) "yarn".
    rope = parse_rope(config, head_dim(config), renamed={"yarn": "longrope"})
    windows = windows_by_type({**config, "layer_types": None}, lambda _: True)
    spec = decoder_spec(config, rotary_dim=rope.dim, windows=windows)
    return Family(
        spec=spec,
        ropes=(rope,) * spec.num_layers,
        tied=values.flag(config, "tie_word_embeddings", False),
        names=NAMES,
    )
