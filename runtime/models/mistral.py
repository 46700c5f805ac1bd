"""Mistral: Llama with one sliding window for all layers (null in later releases)."""

from __future__ import annotations

from typing import Any

from runtime.models import config_values as values
from runtime.models.family import Family, decoder_spec, head_dim, windows_by_type
from runtime.models.rope import parse_rope


def read(config: dict[str, Any]) -> Family:
    rope = parse_rope(config, head_dim(config))
    windows = windows_by_type({**config, "layer_types": None}, lambda _: True)
    spec = decoder_spec(config, rotary_dim=rope.dim, windows=windows)
    return Family(
        spec=spec,
        ropes=(rope,) * spec.num_layers,
        tied=values.flag(config, "tie_word_embeddings", False),
    )
