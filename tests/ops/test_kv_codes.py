"""Keys and values as codes with scales: what the encoding promises."""

from __future__ import annotations

import pytest
import torch

from ops import kv_codes, reference
from ops.kv_codes import CODE_DTYPES
from ops.op_set import KvScales

KINDS = pytest.mark.parametrize("kind", CODE_DTYPES)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_int8_is_off_by_half_a_step_at_most() -> None:
    x = randn(50, 3, 64) * torch.logspace(-6, 6, 50)[:, None, None]
    codes, scales = kv_codes.encode(x, torch.int8)
    assert (codes.dtype, scales.shape) == (torch.int8, (50, 3))
    error = (kv_codes.decode(codes, scales) - x).abs()
    assert bool((error <= 0.5001 * x.abs().amax(-1, keepdim=True) / 127).all())


def test_fp8_has_four_significant_bits() -> None:
    """Half a unit in the last place: 2^-4 of the number, or of the smallest normal one."""
    x = randn(50, 3, 64) * torch.logspace(-6, 6, 50)[:, None, None]
    codes, scales = kv_codes.encode(x, torch.float8_e4m3fn)
    error = (kv_codes.decode(codes, scales) - x).abs()
    smallest = scales[..., None] * 2.0**-6
    assert bool((error <= 0.0626 * x.abs().maximum(smallest)).all())


@KINDS
def test_the_largest_number_is_kept_and_zeros_are_zeros(kind: str) -> None:
    x = torch.tensor([[0.0, -3.0, 3.0, 1.5], [0.0, 0.0, 0.0, 0.0]])
    back = kv_codes.decode(*kv_codes.encode(x, CODE_DTYPES[kind]))
    torch.testing.assert_close(back[:, :3], x[:, :3])
    assert not back[1].any()


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_does_not_become_one(kind: str, bad: float) -> None:
    x = randn(2, 8)
    x[0, 3] = bad
    back = kv_codes.decode(*kv_codes.encode(x, CODE_DTYPES[kind]))
    assert back[0].isnan().all()
    assert back[1].isfinite().all()


@KINDS
def test_a_token_is_stored_where_its_slot_says(kind: str) -> None:
    k, v = randn(3, 2, 8), randn(3, 2, 8, seed=1)
    k_pool, v_pool = (torch.zeros(6, 2, 8).to(CODE_DTYPES[kind]) for _ in range(2))
    scales = KvScales(torch.zeros(6, 2), torch.zeros(6, 2))
    reference.store_kv(k, v, k_pool, v_pool, torch.tensor([4, -1, 2]), scales)
    stored = scales.k.any(-1)
    assert stored.tolist() == [False, False, True, False, True, False]
    back = kv_codes.gather(v_pool, scales.v, torch.tensor([4, 2]))
    assert torch.equal(back, kv_codes.decode(*kv_codes.encode(v[[0, 2]], CODE_DTYPES[kind])))
