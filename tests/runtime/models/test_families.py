"""Every family against transformers in float32: whole prompts, chunks, decoding, cached prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from tests.runtime.models.tiny_models import (
    Probe,
    expected_logits,
    make_model,
    open_runner,
    random_tokens,
)

if TYPE_CHECKING:
    from pathlib import Path

GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8}
MLA = {"num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12}
MLA |= {"qk_rope_head_dim": 8, "v_head_dim": 10, "moe_intermediate_size": 32}
MLA_YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "mscale": 1.0}
MLA_YARN |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24},
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"norm_topk_prob": True},
    ),
    "qwen3-moe-some-dense": (
        "qwen3_moe",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        | {"norm_topk_prob": False, "mlp_only_layers": [1], "decoder_sparse_step": 2}
        | {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8},
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen2-moe-windows": (
        "qwen2_moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "norm_topk_prob": True, "qkv_bias": False}
        | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    ),
    "olmoe": (
        "olmoe",
        {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "glm4-moe": (
        "glm4_moe",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2}
        | {"routed_scaling_factor": 1.7},
    ),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 8}
        | {"max_position_embeddings": 4096 * 32},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {**MLA, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0}
        | {"first_k_dense_replace": 1, "n_shared_experts": 2},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {**MLA, "q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"attention_bias": True, "rope_parameters": MLA_YARN},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {**MLA, "n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
        | {"first_k_dense_replace": 1, "rope_parameters": MLA_YARN},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": 6, "sliding_window": 8, "head_dim": 16}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-window": ("phi3", {"sliding_window": 8}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "smollm3": ("smollm3", {}),
    "smollm3-windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.5,
            "attention_bias": True,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 8,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
                "full_attention": {"rope_type": "yarn", "rope_theta": 5e3, "factor": 8.0}
                | {"original_max_position_embeddings": 64},
            },
        },
    ),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": False}),
    "phi4-mini": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}
            | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 512}
            | {"short_factor": [1.0, 1.3, 2.2], "long_factor": [4.0] * 3},
        },
    ),
    "cohere2": ("cohere2", {"sliding_window": 8, "logit_scale": 0.4}),
    "cohere2-untied": (
        "cohere2",
        {
            "sliding_window": 8,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "logit_scale": 4.0,
        }
        | {"layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(14)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model_type, special = FAMILIES[name]
    model = make_model(tmp_path, model_type, **special)
    runner = open_runner(tmp_path)
    tokens, other = random_tokens(43, seed=1), random_tokens(31, seed=2)
    other[:20] = tokens[:20]
    want, want_other = expected_logits(model, tokens), expected_logits(model, other)
    assert want.abs().max() > 1  # so that the tolerance means something

    def close(got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got, expected, atol=5e-5, rtol=5e-5)

    probe = Probe(runner)
    # Row 1 at once; row 2 in chunks that end inside pages, beside row 1's decoding; row 3 behind
    # the cached prefix of row 1.
    (whole,) = probe.step({1: (0, tokens[:39])})
    close(whole, want[:39])
    first, decoded = probe.step({2: (0, tokens[:17]), 1: (39, tokens[39:40])})
    close(first, want[:17])
    close(decoded, want[39:40])
    second, decoded = probe.step({2: (17, tokens[17:18]), 1: (40, tokens[40:41])})
    close(second, want[17:18])
    close(decoded, want[40:41])
    probe.share(3, source=1, tokens=20)
    third, cached, decoded = probe.step(
        {2: (18, tokens[18:]), 3: (20, other[20:]), 1: (41, tokens[41:42])}
    )
    close(third, want[18:])
    close(cached, want_other[20:])
    close(decoded, want[41:42])
    runner.close()


@pytest.mark.parametrize("kernels", [pytest.param("torch", marks=pytest.mark.slow), "auto"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(6)
def test_bfloat16_is_no_further_from_float32_than_transformers_own(
    name: str, kernels: str, tmp_path: Path
) -> None:
    model_type, special = FAMILIES[name]
    model = make_model(tmp_path, model_type, **special)
    rounded = model.bfloat16()
    rounded.save_pretrained(tmp_path)
    prompts = [random_tokens(43, seed=seed) for seed in range(3)]
    theirs = torch.cat([expected_logits(rounded, tokens).float() for tokens in prompts])
    exact = rounded.float()
    want = torch.cat([expected_logits(exact, tokens) for tokens in prompts])
    runner = open_runner(tmp_path, dtype="bfloat16", cpu_kernels=kernels, cpu_threads=1)
    ours = torch.cat(Probe(runner).step({row: (0, p) for row, p in enumerate(prompts)}))
    runner.close()
    # Where a rounding chooses another expert, a token's error says nothing: what is compared is
    # the error that a quarter of the tokens stay below.
    error, their_error = ((got - want).abs().mean(-1).quantile(0.25) for got in (ours, theirs))
    assert error < 1.5 * their_error


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_head_dimension_without_a_kernel_runs_in_plain_torch(
    kernels: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path, "llama", head_dim=12)
    tokens = random_tokens(30)
    runner = open_runner(tmp_path, cpu_kernels=kernels)
    (got,) = Probe(runner).step({1: (0, tokens)})
    runner.close()
    torch.testing.assert_close(got, expected_logits(model, tokens), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gemmas_norms_are_one_plus_the_stored_weight_unrounded(name: str, tmp_path: Path) -> None:
    """1 + w in bfloat16 would lose up to eight bits of w."""
    model_type, special = FAMILIES[name]
    make_model(tmp_path, model_type, **special).bfloat16().save_pretrained(tmp_path)
    runner = open_runner(tmp_path, dtype="bfloat16")
    runner.close()
    stored = load_file(tmp_path / "model.safetensors")
    model = runner.decoder.model
    assert torch.equal(model.final_norm.weight, 1 + stored["model.norm.weight"].float())
    attention, _ = model.layers[2]
    assert attention.out_norm is not None
    want = 1 + stored["model.layers.2.post_attention_layernorm.weight"].float()
    assert torch.equal(attention.out_norm.weight, want)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    """DeepSeek V3's file has one behind the model's 61, whose tensors the model does not have."""
    model_type, special = FAMILIES["deepseek-v3"]
    model = make_model(tmp_path, model_type, **special)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    save_file({**stored, "model.layers.4.eh_proj.weight": torch.ones(48, 96)}, path)
    tokens = random_tokens(9)
    runner = open_runner(tmp_path)
    (got,) = Probe(runner).step({1: (0, tokens)})
    runner.close()
    torch.testing.assert_close(got, expected_logits(model, tokens), atol=5e-5, rtol=5e-5)
    save_file({**stored, "model.layers.5.eh_proj.weight": torch.ones(48, 96)}, path)
    with pytest.raises(ModelError, match=r"layers\.5\.eh_proj"):
        open_runner(tmp_path)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("name", ["gemma3", "deepseek-v2-lite", "gpt-oss"])
def test_keys_and_values_as_codes_stay_near(name: str, kernels: str, tmp_path: Path) -> None:
    """With norms of q and k and windows, as a latent that is key and value at once, and with sinks;
    whole and in pieces, which read the codes of those before."""
    model_type, special = FAMILIES[name]
    model = make_model(tmp_path, model_type, **special)
    tokens = random_tokens(40)
    want = expected_logits(model, tokens)
    for codes, most in (("int8", 0.05), ("fp8", 0.2)):
        runner = open_runner(tmp_path, kv_cache_dtype=codes, cpu_kernels=kernels)
        probe = Probe(runner)
        (got,) = probe.step({1: (0, tokens)})
        pieces = [probe.step({2: (at, tokens[at : at + 10])})[0] for at in range(0, 40, 10)]
        runner.close()
        assert 0 < float((got - want).norm() / want.norm()) < most
        assert float((torch.cat(pieces) - got).norm() / want.norm()) < most
