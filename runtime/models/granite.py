"""Granite 3 (dense): Llama with factors on embeddings, attention, residual branches and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runtime.models import config_values as values
from runtime.models import llama

if TYPE_CHECKING:
    from runtime.models.family import Family


def read(config: dict[str, Any]) -> Family:
    family = llama.read(config)
    spec = replace(
        family.spec,
        scale=values.number(config, "attention_multiplier", 1.0),
        embed_scale=values.number(config, "embedding_multiplier", 1.0),
        residual_scale=values.number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / values.number(config, "logits_scaling", 1.0),
    )
    return replace(family, spec=spec)
