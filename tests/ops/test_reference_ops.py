"""The reference's rotary and activations against the published code in transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotary
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from ops import reference
from ops.op_set import AttentionSpec
from scripts._paged import paged_batch


def tables(positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1.0 / 10_000 ** (torch.arange(0, dim, 2) / dim)
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def test_rotary_in_halves_equals_llama() -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([0, 3, 3, 90])
    q, k = torch.randn(4, 5, 16, generator=generator), torch.randn(4, 2, 16, generator=generator)
    cos, sin = tables(torch.arange(100), 16)
    doubled = [torch.cat((t[positions], t[positions]), -1)[None] for t in (cos, sin)]
    want_q, want_k = llama_rotary(q[None], k[None], *doubled, unsqueeze_dim=2)
    reference.rotary(q, k, positions, torch.cat((cos, sin), -1), interleaved=False)
    torch.testing.assert_close(q, want_q[0])
    torch.testing.assert_close(k, want_k[0])


def test_rotary_in_pairs_equals_gptj_and_leaves_the_rest_of_a_head() -> None:
    generator = torch.Generator().manual_seed(1)
    positions = torch.tensor([0, 3, 3, 90])
    q, k = torch.randn(2, 4, 3, 20, generator=generator)
    before = q.clone()
    cos, sin = tables(torch.arange(100), 16)
    want = gptj_rotary(q[None, ..., :16], sin[positions][None], cos[positions][None])[0]
    reference.rotary(q, k, positions, torch.cat((cos, sin), -1), interleaved=True)
    torch.testing.assert_close(q[..., :16], want)
    assert torch.equal(q[..., 16:], before[..., 16:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_rms_norm_equals_llama(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, 33, generator=generator).to(dtype)
    norm = LlamaRMSNorm(33, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(33, generator=generator))
        assert torch.equal(reference.rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_layer_norm_equals_cohere(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(6, 33, generator=generator) + 2).to(dtype)
    norm = Cohere2LayerNorm(33, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(33, generator=generator))
        assert torch.equal(reference.layer_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_rms_norm_with_float32_weights_equals_gemma(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, 33, generator=generator).to(dtype)
    norm = Gemma3RMSNorm(33, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(33, generator=generator))
        weight = 1 + norm.weight.float()
        assert torch.equal(reference.rms_norm(x, weight, 1e-5), norm(x))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (reference.silu_and_mul, "silu"),
        (lambda x: reference.gelu_and_mul(x, tanh=True), "gelu_pytorch_tanh"),
        (lambda x: reference.gelu_and_mul(x, tanh=False), "gelu"),
    ],
    ids=["silu", "gelu-tanh", "gelu"],
)
def test_gated_activations_equal_transformers(
    ours: Callable[[torch.Tensor], torch.Tensor], theirs: str
) -> None:
    x = torch.randn(5, 14, generator=torch.Generator().manual_seed(3)) * 3
    torch.testing.assert_close(ours(x), ACT2FN[theirs](x[:, :7]) * x[:, 7:])


def test_attention_equals_the_library_on_gathered_keys() -> None:
    generator = torch.Generator().manual_seed(4)
    batch, _, _, size = paged_batch([(37, 37), (50, 9), (20, 1)], 8)
    k_pool, v_pool = torch.randn(2, size, 2, 16, generator=generator)
    q = torch.randn(47, 6, 16, generator=generator)
    got = reference.extend_attention(q, k_pool, v_pool, batch, AttentionSpec(0.25))
    for b, (kv, new) in enumerate([(37, 37), (50, 9), (20, 1)]):
        lo, hi = batch.qo_indptr[b], batch.qo_indptr[b + 1]
        slots = reference.row_slots(batch, b)
        keys, values = (pool[slots].transpose(0, 1)[None] for pool in (k_pool, v_pool))
        causal = torch.ones(new, kv, dtype=torch.bool).tril(kv - new)
        want = torch.nn.functional.scaled_dot_product_attention(
            q[lo:hi].transpose(0, 1)[None],
            keys,
            values,
            attn_mask=causal,
            scale=0.25,
            enable_gqa=True,
        )
        torch.testing.assert_close(got[lo:hi], want[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
