"""Granite 3 (dense): Llama with factors on embeddings, attention, residual branches and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runtime.models import llama

if TYPE_CHECKING:
    from runtime.models.family import Family


def read(config: dict[str, Any]) -> Family:
    family = llama.read(config)
    spec = replace(
        family.spec,
        scale=float(config.get("attention_multiplier", 1.0)),
        embed_scale=float(config.get("embedding_multiplier", 1.0)),
        residual_scale=float(config.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / float(config.get("logits_scaling", 1.0)),
    )
    return replace(family, spec=spec)
