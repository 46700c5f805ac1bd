"""Keys and values as codes in Triton's interpreter: stored as the reference stores them, and read
as the numbers that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ops import reference
from ops.gpu.op_set import GpuOps
from ops.kv_codes import CODE_DTYPES
from ops.op_set import HeadNorm, KvScales
from ops.reference import ReferenceOps
from scripts._paged import paged_problem, relative_error

OPS = GpuOps()
KINDS = pytest.mark.parametrize("kind", CODE_DTYPES)
NAN = float("nan")

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    # What is not finite must become the scale NaN.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.usefixtures("nan_filled_outputs"),
]


def empty_pools(slots: int, heads: int, dim: int, kind: str) -> tuple[Any, Any, KvScales]:
    k, v = (torch.full((slots, heads, dim), 77).to(CODE_DTYPES[kind]) for _ in range(2))
    return k, v, KvScales(torch.full((slots, heads), NAN), torch.full((slots, heads), NAN))


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (3, 80)])
@pytest.mark.sampled(4)
def test_codes_and_scales_are_those_of_the_reference(
    heads: int, dim: int, dtype: torch.dtype, kind: str
) -> None:
    x = torch.randn(20, heads + 1, dim, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-4, 3, 20)[:, None, None]
    x[2], x[3, 0, 1], x[4, :, 5] = 0.0, NAN, float("inf")
    x[5, :, ::2] *= 1e-4
    x = x.to(dtype)[:, :heads]
    slots = torch.randperm(30, generator=torch.Generator().manual_seed(1))[:20]
    slots[6] = -1
    got, want = (empty_pools(30, heads, dim, kind) for _ in range(2))
    OPS.store_kv(x, -x, got[0], got[1], slots, got[2])
    reference.store_kv(x, -x, want[0], want[1], slots, want[2])
    for ours, theirs in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize(
    ("dim", "turned", "norms"), [(64, 64, False), (80, 32, True), (64, 0, True)]
)
def test_heads_are_placed_as_codes_in_one_launch(
    dim: int, turned: int, norms: bool, dtype: torch.dtype, kind: str
) -> None:
    """As op by op; a norm's sum in another order may move a value to the code beside it."""
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(6, 8, dim, generator=draw).to(dtype)
    qkv[3, 6, 2], qkv[4, 5, 1] = NAN, float("inf")
    weights = [HeadNorm(torch.randn(dim, generator=draw).to(dtype), 1e-6) for _ in range(2)]
    angles = torch.rand(40, turned // 2, generator=draw) * 7
    positions, slots = torch.arange(6), torch.tensor([3, -1, 0, 15, 7, 1])
    found = []
    for place in (OPS.place_heads, ReferenceOps().place_heads):
        k_pool, v_pool, scales = empty_pools(16, 2, dim, kind)
        q, k, v = qkv.clone().split((4, 2, 2), dim=1)
        q = place(
            q, k, v, k_pool, v_pool, positions, slots,
            q_norm=weights[0] if norms else None, k_norm=weights[1] if norms else None,
            rope=torch.cat((angles.cos(), angles.sin()), -1) if turned else None,
            interleaved=False, scales=scales,
        )  # fmt: skip
        found.append((q, k_pool.float(), v_pool.float(), *scales))
    for name, ours, theirs in zip(("q", "k", "v", "scale k", "scale v"), *found, strict=True):
        rtol = atol = 2e-3 if dtype is torch.float16 else 1e-6
        if not norms or name in ("v", "scale v"):
            rtol = atol = 0.0
        elif name == "k":
            rtol, atol = 0.13, 1.01  # codes of fp8 stand up to an eighth of a value apart
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True, msg=name)
    assert float((found[0][1] != found[1][1]).float().mean()) < 0.02


@KINDS
@pytest.mark.parametrize(
    ("head_dim", "group", "dtype", "options"),
    [
        (64, 3, torch.float32, {}),
        (80, 1, torch.float16, {"window": 19, "page_size": 1}),
        (128, 4, torch.float32, {"soft_cap": 2.0, "sinks": True}),
    ],
    ids=["plain", "window", "cap_and_sinks"],
)
@pytest.mark.sampled(3)
def test_attention_over_codes_equals_the_reference(
    head_dim: int, group: int, dtype: torch.dtype, options: dict[str, Any], kind: str
) -> None:
    """What no row may read has the scale NaN."""
    for op, rows in (
        (OPS.extend_attention, [(111, 40), (17, 1), (0, 5)]),
        (OPS.decode_attention, [(150, 1), (17, 1), (0, 1)]),
    ):
        problem = paged_problem(rows, head_dim=head_dim, group=group, dtype=dtype, **options)
        slots, heads = problem.k_pool.shape[:2]
        k, v, scales = empty_pools(slots, heads, head_dim, kind)
        written = (~problem.k_pool[:, 0, 0].isnan()).nonzero()[:, 0]
        keys, values = problem.k_pool[written], problem.v_pool[written]
        reference.store_kv(keys, values, k, v, written, scales)
        arguments = (problem.q, k, v, problem.batch, problem.spec, scales)
        got, want = op(*arguments), reference.extend_attention(*arguments)
        assert got.dtype == dtype
        assert relative_error(got, want) <= (1e-5 if dtype is torch.float32 else 2e-3)
