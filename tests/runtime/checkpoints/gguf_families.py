"""GGUF files of every architecture, written from transformers' models.

Tensors have the names that the `gguf` package maps transformers' to, the values and metadata that
llama.cpp's conversion writes: q and k reordered where its rotary is interleaved, Gemma's norms with
their 1, a layer's experts in one tensor, and what `gguf_conversion` does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize

from tests.runtime.checkpoints.gguf_conversion import converted as conversion
from tests.runtime.checkpoints.tiny_models import interleave

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel


class Case(NamedTuple):
    """model_type, config, whether q and k are reordered, what is added to norms, metadata."""

    model_type: str
    special: dict[str, Any]
    reordered: bool = False
    norm_offset: float = 0.0
    metadata: dict[str, Any] = {}  # noqa: RUF012


EXPERTS = {"expert_count": 4, "expert_used_count": 2}
LONG = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.5, 2.0, 3.0, 4.0]}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
ROUTED |= {"first_k_dense_replace": 1, "n_shared_experts": 2}
ROUTED_KEYS: dict[str, Any] = {"expert_count": 8, "expert_used_count": 2, "expert_shared_count": 2}
ROUTED_KEYS |= {"expert_feed_forward_length": 32, "leading_dense_block_count": 1}
ROUTED_KEYS |= {"expert_weights_scale": 1.5}
GROUPS = {"expert_group_count": 4, "expert_group_used_count": 2}
LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
}
LATENT |= {"v_head_dim": 12, "num_key_value_heads": 12, "routed_scaling_factor": 1.5}
LATENT_KEYS: dict[str, Any] = {
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 32,
    **ROUTED_KEYS,
}
LATENT_KEYS |= {"rope.dimension_count": 8}
WHOLE_KEYS = {"attention.key_length": 24, "attention.value_length": 12}
SPLIT_KEYS = {"attention.key_length": 40, "attention.value_length": 32}
SPLIT_KEYS |= {"attention.key_length_mla": 24, "attention.value_length_mla": 12}
SPLIT_KEYS |= {"attention.head_count_kv": 1}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 128}
YARN_KEYS: dict[str, Any] = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
YARN_KEYS |= {"rope.scaling.original_context_length": 128}
NEXT: dict[str, Any] = {
    "scale": 0.2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
NEXT |= {"shared_expert_intermediate_size": 64, "linear_num_key_heads": 2}
NEXT |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
NEXT_KEYS = {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64, **EXPERTS}
NEXT_KEYS |= {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2}
NEXT_KEYS |= {"ssm.time_step_rank": 4, "ssm.inner_size": 48, "rope.dimension_count": 4}
NEXT_KEYS |= {"full_attention_interval": 4}
CASES: dict[str, Case] = {
    "llama": Case("llama", {}, reordered=True),
    "llama:experts": Case(
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        reordered=True,
        metadata=EXPERTS,
    ),
    "qwen2": Case("qwen2", {}),
    "qwen2moe": Case(
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 64},
        metadata=EXPERTS
        | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64},
    ),
    "qwen3": Case("qwen3", {"head_dim": 16}),
    "qwen3moe": Case(
        "qwen3_moe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"head_dim": 16, "norm_topk_prob": True},
        metadata=EXPERTS | {"expert_feed_forward_length": 32},
    ),
    "gemma2": Case(
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
        norm_offset=1.0,
        metadata={"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
        | {"attention.sliding_window": 8},
    ),
    "gemma3": Case(
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 7}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        norm_offset=1.0,
        metadata={"attention.sliding_window": 8, "rope.freq_base": 1e6}
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": Case(
        "phi3",
        {"sliding_window": 8},
        metadata={"rope.dimension_count": 8, "attention.sliding_window": 8},
    ),
    "phi3:long": Case(
        "phi3",
        {"original_max_position_embeddings": 16}
        | {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG}
            | {"original_max_position_embeddings": 16, "factor": 32.0}
        },
        metadata={"rope.dimension_count": 8, "rope.scaling.original_context_length": 16}
        | {"rope.scaling.attn_factor": (1 + np.log(32) / np.log(16)) ** 0.5},
    ),
    "phi3:whole": Case(  # Phi 4
        "phi3",
        {"sliding_window": None, "partial_rotary_factor": 0.75}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        | {"head_dim": 8},
        metadata={"rope.dimension_count": 6, "attention.sliding_window": 0}
        | {"rope.scaling.original_context_length": 512},
    ),
    "granite": Case(
        "granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2}
        | {"residual_multiplier": 0.4, "logits_scaling": 0.5},
        reordered=True,
        metadata={"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.4}
        | {"logit_scale": 0.5},
    ),
    "smollm3": Case("smollm3", {}, reordered=True),
    "olmo2": Case("olmo2", {}),
    "olmo2:windows": Case(  # OLMo 3
        "olmo3",
        {"sliding_window": 8}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": YARN | {"attention_factor": 1.2},
            }
        }
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        metadata={"attention.sliding_window": 8, **YARN_KEYS}
        | {"attention.sliding_window_pattern": [True, False] * 2}
        | {"rope.scaling.yarn_attn_factor": 1.2},
    ),
    "glm4moe": Case(
        "glm4_moe",
        {**ROUTED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}
        | {"routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 4, "topk_group": 2},
        metadata={**ROUTED_KEYS, **GROUPS, "expert_weights_norm": True}
        | {"rope.dimension_count": 8, "nextn_predict_layers": 1, "block_count": 5},
    ),
    "gpt-oss": Case(
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
        | {"rope_parameters": YARN | {"truncate": False}},
        metadata={"expert_feed_forward_length": 96, "attention.sliding_window": 8}
        | {**EXPERTS, **YARN_KEYS},
    ),
    "deepseek2": Case(  # V3
        "deepseek_v3",
        {**ROUTED, **LATENT, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
        metadata={**LATENT_KEYS, **SPLIT_KEYS, **GROUPS, **YARN_KEYS}
        | {"expert_weights_norm": True, "expert_gating_func": 2}
        | {"rope.scaling.yarn_log_multiplier": 0.07},
    ),
    "deepseek2:old": Case(  # V2
        "deepseek_v2",
        {**ROUTED, **LATENT, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}
        | {"topk_method": "group_limited_greedy"},
        metadata={**LATENT_KEYS, **WHOLE_KEYS, **GROUPS},
    ),
    "deepseek2:lite": Case(
        "deepseek_v2",
        {**ROUTED, **LATENT, "q_lora_rank": None, "topk_method": "greedy"}
        | {"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        metadata={key: LATENT_KEYS[key] for key in LATENT_KEYS if "q_lora" not in key} | SPLIT_KEYS,
    ),
    "qwen3next": Case("qwen3_next", NEXT, norm_offset=1.0, metadata=NEXT_KEYS),
    "qwen3next:old": Case("qwen3_next", NEXT, norm_offset=1.0, metadata=NEXT_KEYS),
    "olmoe": Case(
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
        metadata=EXPERTS,
    ),
    "glm4": Case("glm4", {"head_dim": 16}, metadata={"rope.dimension_count": 8}),
    "cohere2": Case(
        "cohere2",
        {"sliding_window": 8, "logit_scale": 4.0},
        metadata={"logit_scale": 4.0, "attention.sliding_window": 8},
    ),
}
CASES["qwen3moe:fused"] = CASES["qwen3moe"]


def write(
    model: PreTrainedModel, path: Path, name: str, case: Case, kind: Kind = Kind.F32, **split: int
) -> Path:
    config, (architecture, _, variant) = model.config, name.partition(":")
    writer = gguf.GGUFWriter(path, architecture, **split)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": dim,
        "rope.freq_base": (config.rope_parameters or {}).get("rope_theta", 1e4),
    }
    if architecture == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add: dict[type, Any] = {float: writer.add_float32, np.float64: writer.add_float32}
    add |= {int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
    for key, value in (keys | case.metadata).items():
        add.get(type(value), writer.add_string)(f"{architecture}.{key}", value)
    writer.add_token_list([str(i) for i in range(config.vocab_size)])
    if "nextn_predict_layers" in case.metadata:
        for tensor in ("nextn.eh_proj", "attn_norm"):  # of a layer that is left out
            writer.add_tensor(f"blk.4.{tensor}.weight", np.ones((2, 32), np.float32))
    for tensor, values in converted(model, architecture, case, variant):
        own = kind if values.ndim > 1 and values.shape[-1] % 32 == 0 else Kind.F32
        writer.add_tensor(tensor, quantize(values, own), raw_dtype=own)
    if variant == "long":
        for which in ("long", "short"):
            factors = np.array(LONG[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(
    model: PreTrainedModel, architecture: str, case: Case, variant: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors as llama.cpp's conversion has them."""
    (which,) = (key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names, config = gguf.get_tensor_name_map(which, 16), model.config
    stacked: dict[str, dict[int, np.ndarray]] = {}
    changed = (
        pair
        for name, tensor in saved(model).items()
        for pair in conversion(name, tensor.numpy(), config, old=variant == "old")
    )
    for name, values in changed:
        if case.norm_offset and name.endswith("norm.weight"):
            values = values + np.float32(case.norm_offset)
        if case.reordered and "q_proj" in name:
            values = interleave(values, config.num_attention_heads)
        if case.reordered and "k_proj" in name:
            values = interleave(values, config.num_key_value_heads)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert:
            among = name.replace(expert[0], ".experts.")
            stacked.setdefault(among, {})[int(expert[1])] = values
            continue
        yield gguf_name(names, name), np.ascontiguousarray(values)
    whole = {
        gguf_name(names, name): np.stack([parts[i] for i in range(len(parts))])
        for name, parts in stacked.items()
    }
    for gate in [name for name in whole if variant == "fused" and "ffn_gate_exps" in name]:
        both = whole.pop(gate), whole.pop(gate.replace("gate", "up"))
        whole[gate.replace("gate", "gate_up")] = np.concatenate(both, axis=1)
    yield from whole.items()


def saved(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(f"{model.name_or_path}/model.safetensors")


def gguf_name(names: Any, name: str) -> str:
    whole = name if name.startswith("blk.") else names.get_name(name)
    if whole:
        return str(whole)
    stem, _, suffix = name.rpartition(".")
    found = names.get_name(stem)
    assert found, name
    return f"{found}.{suffix}"
