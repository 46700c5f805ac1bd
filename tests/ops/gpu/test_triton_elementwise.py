"""Norms, rotary, activations and the KV scatter against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ops import reference
from ops.gpu.op_set import GpuOps
from ops.op_set import HeadNorm
from ops.reference import ReferenceOps

OPS = GpuOps()
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"]
)
# Float32 sums in another order, and a rounding of the stored type. The interpreter cuts float32 to
# bfloat16 where a GPU rounds, so each of two roundings may be off by a whole last place.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}

pytestmark = [
    # exp(-x) of a very negative gate is inf, and x / inf the right 0.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.usefixtures("nan_filled_outputs"),
]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_close(got: torch.Tensor, expected: torch.Tensor, atol: float | None = None) -> None:
    assert got.dtype == expected.dtype
    rtol = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol if atol is None else atol)


@DTYPES
@pytest.mark.parametrize("size", [1, 63, 576, 2048])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = randn(5, size + 3, dtype=dtype)[:, :size], randn(size, dtype=dtype, seed=1)
    check_close(OPS.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_rms_norm_of_heads_inside_a_fused_row(head_dim: int, dtype: torch.dtype) -> None:
    qkv = randn(7, 9, head_dim, dtype=dtype)
    k, weight = qkv[:, 5:8], randn(head_dim, dtype=dtype, seed=1)
    check_close(OPS.rms_norm(k, weight, 1e-6), reference.rms_norm(k, weight, 1e-6))


@DTYPES
def test_add_rms_norm_changes_the_residual(dtype: torch.dtype) -> None:
    x, weight = randn(3, 576, dtype=dtype), randn(576, dtype=dtype, seed=1)
    residual = randn(3, 576, dtype=dtype, seed=2)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    check_close(OPS.add_rms_norm(x, residual, weight, 1e-5), expected)
    check_close(residual, expected_residual)


def test_norms_with_float32_weights_round_the_result_alone() -> None:
    """In float16, to which the interpreter rounds like a GPU."""
    weight = 1 + 0.01 * randn(576, dtype=torch.float32)
    x, residual = (randn(3, 576, dtype=torch.float16, seed=seed) for seed in (1, 2))
    half_ulp: dict[str, Any] = {"rtol": 1.002 * 2**-11, "atol": 2**-24}
    exact = reference.rms_norm(x.float(), weight, 1e-5)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5).float(), exact, **half_ulp)
    exact = reference.rms_norm((x + residual).float(), weight, 1e-5)
    got = OPS.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(got.float(), exact, **half_ulp)


def test_norms_of_no_tokens() -> None:
    x = torch.empty(0, 64)
    assert OPS.rms_norm(x, torch.ones(64), 1e-5).shape == (0, 64)
    assert OPS.add_rms_norm(x, x.clone(), torch.ones(64), 1e-5).shape == (0, 64)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 96), (96, 24), (128, 128), (256, 128)]
)
@pytest.mark.sampled(10)
def test_rotary(head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype) -> None:
    """q and k are views of one fused row; what lies beside the rotated part stays as it is."""
    qkv = randn(6, 8, head_dim, dtype=dtype)
    angles = torch.rand(300, rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 7
    rope = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([0, 1, 299, 17, 17, 63])
    expected = qkv.clone()
    reference.rotary(expected[:, :5], expected[:, 5:7], positions, rope, interleaved=interleaved)
    OPS.rotary(qkv[:, :5], qkv[:, 5:7], positions, rope, interleaved=interleaved)
    check_close(qkv, expected)
    assert torch.equal(qkv[:, :, rotary_dim:], expected[:, :, rotary_dim:])
    assert torch.equal(qkv[:, 7], expected[:, 7])


@DTYPES
@pytest.mark.parametrize("features", [1, 88, 1536])
@pytest.mark.sampled(4)
def test_gated_activations(features: int, dtype: torch.dtype) -> None:
    x = randn(3, 2 * features, dtype=dtype) * 4
    x[0, 0] = -95.0  # exp(95) is not a float32
    # Where the gate is far below 0, 1 + tanh or 1 + erf keeps few digits in the reference.
    atol = max(1e-5, TOLERANCE[dtype])
    check_close(OPS.silu_and_mul(x), reference.silu_and_mul(x))
    check_close(OPS.gelu_and_mul(x, tanh=True), reference.gelu_and_mul(x, tanh=True), atol)
    check_close(OPS.gelu_and_mul(x, tanh=False), reference.gelu_and_mul(x, tanh=False), atol)


@DTYPES
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (3, 80), (8, 128)])
def test_store_kv(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """K and V of different strides; a pool of another type takes rounded values."""
    k, v = (
        randn(5, heads + 2, head_dim, dtype=dtype)[:, 1:-1],
        randn(5, heads, head_dim, dtype=dtype),
    )
    slots = torch.tensor([31, 2, -1, 17, 0])
    got, expected = torch.zeros(2, 2, 32, heads, head_dim, dtype=dtype)
    OPS.store_kv(k, v, got[0], got[1], slots)
    reference.store_kv(k, v, expected[0], expected[1], slots)
    assert torch.equal(got, expected)


@DTYPES
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "interleaved", "norms"),
    [
        (64, 64, False, "both"),  # Qwen 3
        (128, 128, False, "none"),  # Llama
        (96, 24, True, "k"),
        (80, 32, False, "both"),
        (64, 0, False, "both"),  # a layer without positions
        (80, 0, False, "none"),
        (256, 256, True, "float32"),  # Gemma's norms
    ],
)
@pytest.mark.sampled(7)
def test_heads_are_placed_as_op_by_op(
    head_dim: int, rotary_dim: int, interleaved: bool, norms: str, dtype: torch.dtype
) -> None:
    """q, k and v are views of one fused row. Slot -1 stores nothing; what lies beside q, and in the
    pools' other slots, stays as it is."""
    heads, kv_heads = 6, 2
    qkv = randn(5, heads + 2 * kv_heads + 1, head_dim, dtype=dtype)
    pools = torch.zeros(2, 2, 16, kv_heads + 1, head_dim, dtype=dtype)
    weights = [
        HeadNorm(1 + 0.1 * randn(head_dim, dtype=kind, seed=seed), 1e-6)
        for seed in (1, 2)
        for kind in [torch.float32 if norms == "float32" else dtype]
    ]
    angles = torch.rand(40, rotary_dim // 2, generator=torch.Generator().manual_seed(3)) * 7
    options: dict[str, Any] = {
        "q_norm": weights[0] if norms in ("both", "float32") else None,
        "k_norm": None if norms == "none" else weights[1],
        "rope": torch.cat((angles.cos(), angles.sin()), dim=-1) if rotary_dim else None,
        "interleaved": interleaved,
    }
    positions, slots = torch.tensor([0, 1, 39, 17, 17]), torch.tensor([3, -1, 0, 15, 7])
    found = []
    for place, pool in ((OPS.place_heads, pools[0]), (ReferenceOps().place_heads, pools[1])):
        row = qkv.clone()
        q, k, v, beside = row.split((heads, kv_heads, kv_heads, 1), dim=1)
        q = place(q, k, v, pool[0, :, 1:], pool[1, :, 1:], positions, slots, **options)
        found.append(q)
        assert torch.equal(beside, qkv[:, -1:])
    check_close(found[0], found[1])
    check_close(pools[0], pools[1])
    empty = [i for i in range(16) if i not in slots]
    assert not pools[0][:, empty].any()
    assert not pools[0][:, :, 0].any()
    assert pools[0][:, [0, 3, 7, 15], 1:].any(-1).all()


def test_linear_and_its_packing() -> None:
    x, weight, bias = (randn(*s, dtype=torch.float32) for s in ((3, 8), (5, 8), (5,)))
    check_close(OPS.linear(x, OPS.pack_linear(weight, bias)), x @ weight.T + bias)
    with pytest.raises(ValueError, match="quantization 'int4'"):
        OPS.pack_linear(weight, quantization="int4")
