"""How llama.cpp's architectures map to transformers' models: names, changed values, config.

What a file leaves out is what llama.cpp has as constants for the architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runtime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.checkpoints.gguf_metadata import GgufMetadata

    Extras = Callable[[GgufMetadata, dict[str, Any]], dict[str, Any]]

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_DENSE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def _nothing(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    Args:
        model_type, class_name: transformers'.
        names: of the tensors of a layer, beside those of Llama; {} stands for each expert in turn.
        reordered: q and k have their rows in the order of interleaved rotary.
        norm_offset: what is stored of a norm is its weight plus this.
        centered: the norms subtract the mean, which names their epsilon.
        extras: further entries of the config.
    """

    model_type: str
    class_name: str
    names: dict[str, str] = field(default_factory=dict)
    reordered: bool = False
    norm_offset: float = 0.0
    centered: bool = False
    extras: Extras = _nothing

    def layer_name(self, name: str) -> str | None:
        return self.names.get(name) or _DENSE.get(name)


def _experts(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": given.integer("{arch}.expert_count"),
        "num_experts_per_tok": given.integer("{arch}.expert_used_count"),
    }


def _mixtral(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    experts = _experts(given, config)
    return {**experts, "num_local_experts": experts.pop("num_experts")}


def _qwen2_moe(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    return _experts(given, config) | {
        "moe_intermediate_size": given.integer("{arch}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": given.integer(
            "{arch}.expert_shared_feed_forward_length"
        ),
        "norm_topk_prob": False,
        "qkv_bias": config["attention_bias"],
    }


def _qwen3_moe(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    inner = given.integer("{arch}.expert_feed_forward_length")
    return _experts(given, config) | {"moe_intermediate_size": inner, "norm_topk_prob": True}


def _olmoe(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    return _experts(given, config) | {"norm_topk_prob": False}


def _olmo2(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    if given.raw("{arch}.attention.sliding_window"):
        raise ModelError(f"{given.path}: OLMo 3 is not read from GGUF files, OLMo 2 is")
    return {}


def _gemma(given: GgufMetadata, config: dict[str, Any], largest: int) -> dict[str, Any]:
    """largest: layers of the size whose scores are scaled by other than the heads' dimension."""
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == largest:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": given.integer("{arch}.attention.sliding_window", 4096),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma2(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(given, config, 46) | {
        "attn_logit_softcapping": given.number("{arch}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": given.number("{arch}.final_logit_softcapping", 30.0),
    }


def _gemma3(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    sliding = {"rope_type": "default", "rope_theta": 10_000.0}
    by_type = {"full_attention": config["rope_parameters"], "sliding_attention": sliding}
    return _gemma(given, config, 62) | {
        "rope_parameters": by_type,
        "rope_scaling": None,
        "rope_local_base_freq": 10_000.0,
    }


def _partial(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """Some of a head's dimensions turn."""
    dim = config["head_dim"]
    part = given.integer("{arch}.rope.dimension_count", dim, high=dim) / dim
    rope = {**config["rope_parameters"], "partial_rotary_factor": part}
    return {"rope_parameters": rope, "partial_rotary_factor": part}


def _phi3(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    window = given.integer("{arch}.attention.sliding_window", 0, low=0)
    return _partial(given, config) | {"sliding_window": window or None}


def _granite(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": given.number("{arch}.embedding_scale", 1.0),
        "attention_multiplier": given.number("{arch}.attention.scale", 1.0),
        "residual_multiplier": given.number("{arch}.residual_scale", 1.0),
        "logits_scaling": given.number("{arch}.logit_scale", 1.0),
    }


def _cohere2(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "logit_scale": given.number("{arch}.logit_scale"),
        "sliding_window": given.integer("{arch}.attention.sliding_window"),
        "sliding_window_pattern": 4,
        "layer_norm_eps": config["rms_norm_eps"],
    }


ARCHITECTURES = {  # by general.architecture
    "llama": Architecture("llama", "LlamaForCausalLM", reordered=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", _EXPERTS | _SHARED_EXPERT, extras=_qwen2_moe
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS, extras=_qwen3_moe),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", _FOUR_NORMS, norm_offset=1.0, extras=_gemma2
    ),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _FOUR_NORMS, norm_offset=1.0, extras=_gemma3
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        extras=_phi3,
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", reordered=True, extras=_granite),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", reordered=True),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        extras=_olmo2,
    ),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", _EXPERTS, extras=_olmoe),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        extras=_partial,
    ),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", centered=True, extras=_cohere2),
}
_WITH_EXPERTS = Architecture(
    "mixtral", "MixtralForCausalLM", _MIXTRAL, reordered=True, extras=_mixtral
)


def architecture_of(metadata: GgufMetadata) -> Architecture:
    """Raises: ModelError: not one of those above."""
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{metadata.path}: architecture {name!r}: GGUF files of {', '.join(ARCHITECTURES)} can"
            " be served"
        )
    if name == "llama" and metadata.integer("{arch}.expert_count", 0, low=0):
        return _WITH_EXPERTS
    return ARCHITECTURES[name]
