"""Norms, positions, KV stores and activations against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ops import reference
from tests.ops.cpu.cases import DTYPE_IDS, DTYPES, elementwise_error, generator, rope_table

if TYPE_CHECKING:
    from ops.cpu.native import NativeOps

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
HALF_ULP = 1.001 * 2**-8  # of bfloat16, and what sums in another order add
WIDTHS = [1, 8, 15, 16, 17, 63, 576, 1000]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("dim", WIDTHS)
def test_rms_norm(native: NativeOps, dim: int, dtype: torch.dtype) -> None:
    rand = generator()
    weight = torch.randn(dim, generator=rand).to(dtype)
    for shape in ((1, dim), (7, dim), (5, 3, dim)):
        x = torch.randn(*shape[:-1], dim + 5, generator=rand).mul(3).to(dtype)[..., :dim]
        want = reference.rms_norm(x, weight, 1e-5)
        assert elementwise_error(native.rms_norm(x, weight, 1e-5), want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("dim", WIDTHS)
def test_add_rms_norm(native: NativeOps, dim: int, dtype: torch.dtype) -> None:
    rand = generator()
    x, residual = (torch.randn(5, dim, generator=rand).to(dtype) for _ in range(2))
    weight = torch.randn(dim, generator=rand).to(dtype)
    expected_residual = residual.clone()
    want = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    got = native.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected_residual)
    assert elementwise_error(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dim", [17, 576])
def test_norms_with_float32_weights_round_the_result_alone(native: NativeOps, dim: int) -> None:
    rand = generator()
    weight = 1 + torch.randn(dim, generator=rand) * 0.01
    x, residual = (torch.randn(5, dim, generator=rand).bfloat16() for _ in range(2))
    exact = reference.rms_norm(x.float(), weight, 1e-5)
    assert elementwise_error(native.rms_norm(x, weight, 1e-5), exact) <= HALF_ULP
    exact = reference.rms_norm((x + residual).float(), weight, 1e-5)
    assert elementwise_error(native.add_rms_norm(x, residual, weight, 1e-5), exact) <= HALF_ULP


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 32), (16, 6), (72, 72), (8, 2)])
def test_rotary_turns_the_leading_dimensions(
    native: NativeOps, dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype
) -> None:
    rand = generator()
    rope = rope_table(50, rotary_dim)
    positions = torch.randint(0, 50, (7,), generator=rand)
    fused = torch.randn(7, 5, dim, generator=rand).to(dtype)
    expected = fused.clone()
    native.rotary(fused[:, :3], fused[:, 3:], positions, rope, interleaved=interleaved)
    reference.rotary(expected[:, :3], expected[:, 3:], positions, rope, interleaved=interleaved)
    assert torch.equal(fused[..., rotary_dim:], expected[..., rotary_dim:])
    assert elementwise_error(fused, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("pool_dtype", DTYPES, ids=["f32_pool", "bf16_pool"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("dim", [8, 20, 64])
def test_store_kv_writes_the_named_slots_alone(
    native: NativeOps, dim: int, dtype: torch.dtype, pool_dtype: torch.dtype
) -> None:
    fused = torch.randn(4, 5, dim, generator=generator()).to(dtype)
    k, v = fused[:, :2], fused[:, 2:4]
    slots = torch.tensor([3, -1, 7, -1])
    pools = [torch.full((9, 2, dim), 5.0).to(pool_dtype) for _ in range(4)]
    native.store_kv(k, v, pools[0], pools[1], slots)
    reference.store_kv(k, v, pools[2], pools[3], slots)
    assert torch.equal(pools[0], pools[2])
    assert torch.equal(pools[1], pools[3])
    assert (pools[0][-1] == 5).all()  # a negative slot is skipped, not taken from the end


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("dim", WIDTHS)
def test_activations(native: NativeOps, dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, 2 * dim, generator=generator()).mul(4).to(dtype)
    x[0, 0], x[1, 0] = 300.0, -300.0  # beyond exp's range
    for got, want in (
        (native.silu_and_mul(x), reference.silu_and_mul(x)),
        (native.gelu_and_mul(x, tanh=True), reference.gelu_and_mul(x, tanh=True)),
        (native.gelu_and_mul(x, tanh=False), reference.gelu_and_mul(x, tanh=False)),
    ):
        # float32: relative to values around 100 the exponential's error shows.
        assert elementwise_error(got, want) <= max(TOLERANCE[dtype], 1e-5)
