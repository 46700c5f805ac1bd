"""SmolLM3: Llama with no rotary embedding in every fourth layer."""

from __future__ import annotations

from typing import Any

from runtime.models.family import Family, decoder_spec, head_dim, required_int, windows_by_type
from runtime.models.rope import parse_rope


def read(config: dict[str, Any]) -> Family:
    rope = parse_rope(config, head_dim(config), default_theta=2_000_000.0)
    layers = required_int(config, "num_hidden_layers")
    interval = config.get("no_rope_layer_interval", 4)
    given = config.get("no_rope_layers")  # despite its name, 1 where rotary is applied
    rotated = given or [(i + 1) % interval != 0 for i in range(layers)]
    windows = (0,) * layers
    if config.get("use_sliding_window", False):
        windows = windows_by_type(config, lambda i: not rotated[i])
    attention_bias = bool(config.get("attention_bias", False))
    return Family(
        spec=decoder_spec(
            config,
            rotary_dim=rope.dim,
            windows=windows,
            rope_layers=tuple(bool(on) for on in rotated),
        ),
        ropes=tuple(rope if on else None for on in rotated),
        tied=bool(config.get("tie_word_embeddings", True)),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )
