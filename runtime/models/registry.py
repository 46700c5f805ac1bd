"""Which file reads which kind of model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.errors import ModelError
from runtime.models import (
    cohere2,
    gemma,
    glm,
    granite,
    llama,
    mistral,
    olmo,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.models.family import Family

FAMILIES: dict[str, Callable[[dict[str, Any]], Family]] = {
    "llama": llama.read,
    "mistral": mistral.read,
    "mixtral": mistral.read_mixtral,
    "qwen2": qwen2.read,
    "qwen3": qwen3.read,
    "qwen3_moe": qwen3.read_moe,
    "phi3": phi3.read,
    "gemma2": gemma.read_gemma2,
    "gemma3_text": gemma.read_gemma3,
    "smollm3": smollm3.read,
    "granite": granite.read,
    "olmo2": olmo.read_olmo2,
    "olmo3": olmo.read_olmo3,
    "glm": glm.read_glm,
    "glm4": glm.read_glm4,
    "cohere2": cohere2.read,
}


def read_family(config: dict[str, Any]) -> Family:
    """The model that a `config.json` describes.

    Raises:
        ModelError: the model type is not supported, or the config lacks what its type needs.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(
            f"config.json: model_type {kind!r} is not supported; it must be one of"
            f" {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind](config)
