"""Which file reads which kind of model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.errors import ModelError, shown
from runtime.models import (
    cohere2,
    deepseek,
    gemma,
    glm,
    gpt_oss,
    granite,
    llama,
    mistral,
    olmo,
    phi3,
    qwen2,
    qwen3,
    qwen3_next,
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
    "qwen2_moe": qwen2.read_moe,
    "qwen3": qwen3.read,
    "qwen3_moe": qwen3.read_moe,
    "qwen3_next": qwen3_next.read,
    "phi3": phi3.read,
    "gemma2": gemma.read_gemma2,
    "gemma3_text": gemma.read_gemma3,
    "smollm3": smollm3.read,
    "granite": granite.read,
    "olmo2": olmo.read_olmo2,
    "olmo3": olmo.read_olmo3,
    "olmoe": olmo.read_olmoe,
    "glm": glm.read_glm,
    "glm4": glm.read_glm4,
    "glm4_moe": glm.read_glm4_moe,
    "cohere2": cohere2.read,
    "gpt_oss": gpt_oss.read,
    "deepseek_v2": deepseek.read_v2,
    "deepseek_v3": deepseek.read_v3,
}


def read_family(config: dict[str, Any]) -> Family:
    """The model that a `config.json` describes.

    Raises:
        ModelError: the model type is not supported, or the config lacks what its type needs.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(
            f"config.json: model_type {shown(kind)} is not supported; it must be one of"
            f" {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind](config)
