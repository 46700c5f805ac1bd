"""How llama.cpp's architectures map to transformers' models: names, changed values, config.

What a file leaves out is what llama.cpp has as constants for the architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runtime.checkpoints.gguf_metadata import shortest
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
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_NORM_BETWEEN = {"post_attention_norm": "post_attention_layernorm"}
_LATENT = {  # k_b and v_b are kv_b in two parts
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
}
_GPT_OSS = _EXPERTS | {"ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks"}
_DELTA_NET = {  # attn_qkv and attn_gate are what older files have as ssm_in
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
# Groups of DeepSeek's experts, and how many of them are taken, by the number of experts: those of
# V2 and of V3, for files from before their conversion wrote them. V2-Lite has one group.
_EXPERT_GROUPS = {160: (8, 3), 256: (8, 4)}


def _nothing(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture.

    Args:
        model_type, class_name: transformers'.
        names: of the tensors of a layer, beside those of Llama; with what follows the last dot, or
            without. {} stands for each expert in turn.
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
        """transformers' name below the layer of a tensor that is called so below its block."""
        if name in self.names:
            return self.names[name]
        stem, _, suffix = name.rpartition(".")
        found = self.names.get(stem) or _DENSE.get(stem)
        return found and f"{found}.{suffix}"


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
    """OLMo 3 has windows. Its scaling of positions is of the other layers alone."""
    window = given.integer("{arch}.attention.sliding_window", 0, low=0)
    if not window:
        return {}
    sliding = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    by_type = {"full_attention": config["rope_parameters"], "sliding_attention": sliding}
    layers = config["num_hidden_layers"]
    usual = [i % 4 != 3 for i in range(layers)]
    slides = given.flags("{arch}.attention.sliding_window_pattern", layers, usual)
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": [f"{'sliding' if slide else 'full'}_attention" for slide in slides],
        "rope_parameters": by_type,
        "rope_scaling": None,
    }


def _gpt_oss(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """The published model has its ramp of frequencies not cut to whole dimensions."""
    return _mixtral(given, config) | {
        "intermediate_size": given.integer("{arch}.expert_feed_forward_length"),
        "stacked_experts": False,
        "sliding_window": given.integer("{arch}.attention.sliding_window"),
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
        "rope_scaling": None,
    }


def _routed_experts(given: GgufMetadata) -> dict[str, Any]:
    """As DeepSeek and GLM-4.5 have them."""
    count = given.integer("{arch}.expert_count")
    groups, taken = _EXPERT_GROUPS.get(count, (1, 1))
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": given.integer("{arch}.expert_used_count"),
        "n_shared_experts": given.integer("{arch}.expert_shared_count"),
        "moe_intermediate_size": given.integer("{arch}.expert_feed_forward_length"),
        "first_k_dense_replace": given.integer("{arch}.leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": given.number("{arch}.expert_weights_scale", 1.0),
        "norm_topk_prob": given.flag("{arch}.expert_weights_norm", False),
        "n_group": given.integer("{arch}.expert_group_count", groups),
        "topk_group": given.integer("{arch}.expert_group_used_count", taken),
        "num_nextn_predict_layers": 0,  # they are left out
    }


def _glm4_moe(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    return _routed_experts(given) | _partial(given, config)


def _deepseek2(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """V3 is the one that scores its experts by a sigmoid (2; 1 is a softmax)."""
    experts, rope = _routed_experts(given), dict(config["rope_parameters"])
    if given.raw("{arch}.rope.scaling.yarn_log_multiplier") is not None:
        scale = shortest(given.number("{arch}.rope.scaling.yarn_log_multiplier") / 0.1)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    rotary, sizes = given.integer("{arch}.rope.dimension_count"), []
    for what in ("key", "value"):  # of a head; files with k_b and v_b have those of latents beside
        plain = f"{{arch}}.attention.{what}_length"
        sizes.append(given.integer(f"{plain}_mla", given.integer(plain)))
    query = given.raw("{arch}.attention.q_lora_rank")
    version = 1 + given.integer("{arch}.expert_gating_func", 1, high=2)
    if version == 2:
        method = "greedy" if experts["n_group"] == 1 else "group_limited_greedy"
        experts["topk_method"] = method
    return experts | {
        "model_type": f"deepseek_v{version}",
        "architectures": [f"DeepseekV{version}ForCausalLM"],
        "q_lora_rank": query and given.integer("{arch}.attention.q_lora_rank"),
        "kv_lora_rank": given.integer("{arch}.attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": sizes[0] - rotary,
        "v_head_dim": sizes[1],
        "rope_parameters": rope,
        "rope_scaling": None,
    }


def _qwen3_next(given: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    heads = given.integer("{arch}.ssm.time_step_rank")
    return _qwen2_moe(given, config) | {
        **_partial(given, config),
        "norm_topk_prob": True,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": given.integer("{arch}.ssm.inner_size") // heads,
        "linear_num_key_heads": given.integer("{arch}.ssm.group_count"),
        "linear_key_head_dim": given.integer("{arch}.ssm.state_size"),
        "linear_conv_kernel_dim": given.integer("{arch}.ssm.conv_kernel"),
        "full_attention_interval": given.integer("{arch}.full_attention_interval", 4),
    }


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
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _EXPERTS | _SHARED_EXPERTS | _NORM_BETWEEN,
        extras=_glm4_moe,
    ),
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", _GPT_OSS | _NORM_BETWEEN, extras=_gpt_oss
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _EXPERTS | _SHARED_EXPERTS | _LATENT,
        extras=_deepseek2,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _EXPERTS | _SHARED_EXPERT | _DELTA_NET | _NORM_BETWEEN,
        norm_offset=1.0,
        extras=_qwen3_next,
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
