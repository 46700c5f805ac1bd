"""SmolLM3: Llama with no rotary embedding in every fourth layer."""

from __future__ import annotations

from typing import Any

from runtime.errors import ModelError
from runtime.models import config_values as values
from runtime.models.family import Family, decoder_spec, head_dim, windows_by_type
from runtime.models.rope import parse_rope


def read(config: dict[str, Any]) -> Family:
    rope = parse_rope(config, head_dim(config), default_theta=2_000_000.0)
    layers = values.layers(config)
    interval = values.integer(config, "no_rope_layer_interval", 4)
    # Despite its name, the list has 1 where rotary is applied.
    given = values.per_layer(config, "no_rope_layers")
    rotated = given or [(i + 1) % interval != 0 for i in range(layers)]
    if not any(rotated):
        raise ModelError("config.json: no_rope_layers leaves no layer with rotary embeddings")
    windows = (0,) * layers
    if values.flag(config, "use_sliding_window", False):
        windows = windows_by_type(config, lambda i: not rotated[i])
    attention_bias = values.flag(config, "attention_bias", False)
    return Family(
        spec=decoder_spec(
            config,
            rotary_dim=rope.dim,
            windows=windows,
            rope_layers=tuple(bool(on) for on in rotated),
        ),
        ropes=tuple(rope if on else None for on in rotated),
        tied=values.flag(config, "tie_word_embeddings", True),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=values.flag(config, "mlp_bias", False),
    )
