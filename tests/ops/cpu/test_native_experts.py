"""Experts in one native call: against the reference, and their independence of all but the token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ops.cpu.native_experts import NativeExperts
from ops.cpu.op_set import CpuOps
from ops.op_set import Expert, Routing
from ops.reference import ReferenceOps, route
from tests.ops.cpu.cases import DTYPE_IDS, DTYPES, generator
from tests.ops.cpu.conftest import open_ops

if TYPE_CHECKING:
    from torch import Tensor

    from ops.cpu.native import NativeOps

HIDDEN, INNER, EXPERTS, TOP_K = 72, 48, 10, 3
QUANTIZATIONS = [None, "int8", "int4"]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def make_experts(dtype: torch.dtype, count: int = EXPERTS, *, inner: int = INNER) -> list[Expert]:
    return [
        Expert(
            (randn(2 * inner, HIDDEN, seed=4 * i) * HIDDEN**-0.5).to(dtype),
            (randn(HIDDEN, inner, seed=4 * i + 1) * inner**-0.5).to(dtype),
            randn(2 * inner, seed=4 * i + 2).to(dtype) if i % 2 else None,
            randn(HIDDEN, seed=4 * i + 3).to(dtype) if i % 2 else None,
        )
        for i in range(count)
    ]


def routed(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, strided, with ids and weights; most tokens go through expert 4, none through expert 7."""
    logits = randn(tokens, EXPERTS, seed=1)
    logits[:, 4] += 2.0
    logits[:, 7] = -100.0
    x = randn(tokens, HIDDEN + 8, seed=2).to(dtype)[:, :HIDDEN]
    return x, *route(logits, Routing(TOP_K, True))


def widened(expert: Expert) -> Expert:
    gate_up, down, *biases = expert
    first, second = (None if bias is None else bias.float() for bias in biases)
    return Expert(gate_up.float(), down.float(), first, second)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_the_sum_equals_the_reference(
    native: NativeOps, tokens: int, dtype: torch.dtype, quantization: str | None
) -> None:
    experts = make_experts(dtype)
    packed = native.pack_experts(experts, quantization=quantization)
    assert isinstance(packed, NativeExperts)
    x, ids, weights = routed(tokens, dtype)
    got = native.run_experts(x, ids, weights, packed, "silu")
    exact = ReferenceOps()
    wide = [widened(expert) for expert in experts]
    want = exact.run_experts(x.float(), ids, weights, exact.pack_experts(wide), "silu")
    tolerance = {None: 2e-6 if dtype == torch.float32 else 1e-2, "int8": 0.03, "int4": 0.25}
    error = float((got.float() - want).norm() / want.norm())
    assert (got.dtype, error <= tolerance[quantization]) == (dtype, True)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_a_token_depends_on_itself_alone_to_the_bit(
    native: NativeOps, dtype: torch.dtype, quantization: str | None
) -> None:
    """Alone, among more tokens than run at once, and whatever the order of its experts."""
    packed = native.pack_experts(make_experts(dtype), quantization=quantization)
    x, ids, weights = routed(1100, dtype)
    together = native.run_experts(x, ids, weights, packed, "silu")
    for some in (slice(0, 1), slice(3, 10), slice(1000, 1100)):
        got = native.run_experts(x[some], ids[some], weights[some], packed, "silu")
        assert torch.equal(got, together[some])
    turned = native.run_experts(x[:9], ids[:9].flip(1), weights[:9].flip(1), packed, "silu")
    assert torch.equal(turned, together[:9])


def test_the_number_of_threads_changes_nothing(best: NativeOps) -> None:
    x, ids, weights = routed(20, torch.bfloat16)
    path = best.library.path.name.split("-")[0]
    results = []
    for threads in (1, 2, 3):
        ops = open_ops(path, threads)
        packed = ops.pack_experts(make_experts(torch.bfloat16))
        results.append(ops.run_experts(x, ids, weights, packed, "clamped_silu"))
    assert all(torch.equal(result, results[0]) for result in results)


def test_an_expert_that_no_token_goes_through_is_not_computed(best: NativeOps) -> None:
    experts = make_experts(torch.float32)
    x, ids, weights = routed(12, torch.float32)
    want = best.run_experts(x, ids, weights, best.pack_experts(experts), "silu")
    experts[7].down.fill_(float("nan"))
    got = best.run_experts(x, ids, weights, best.pack_experts(experts), "silu")
    assert torch.equal(got, want)


@pytest.mark.parametrize("inner", [40, 48], ids=["no whole panels", "unlike shapes"])
def test_what_the_kernel_does_not_cover_runs_one_by_one(best: NativeOps, inner: int) -> None:
    experts = make_experts(torch.float32, EXPERTS - 1, inner=inner)
    experts += make_experts(torch.float32, 1, inner=40)
    packed = best.pack_experts(experts)
    assert not isinstance(packed, NativeExperts)
    x, ids, weights = routed(9, torch.float32)
    got = best.run_experts(x, ids, weights, packed, "silu")
    plain = CpuOps()
    want = plain.run_experts(x, ids, weights, plain.pack_experts(experts), "silu")
    torch.testing.assert_close(got, want)


def test_wrong_arguments_raise(best: NativeOps) -> None:
    packed = best.pack_experts(make_experts(torch.float32))
    x, ids, weights = routed(2, torch.float32)
    for wrong in (-1, EXPERTS):
        bad = ids.clone()
        bad[1, 2] = wrong
        with pytest.raises(IndexError, match="an expert's id"):
            best.run_experts(x, bad, weights, packed, "silu")
    with pytest.raises(ValueError, match=r"x: shape \[2, 71\]"):
        best.run_experts(x[:, :71], ids, weights, packed, "silu")
    with pytest.raises(ValueError, match=r"weights: shape \[1, 3\]"):
        best.run_experts(x, ids, weights[:1], packed, "silu")
    with pytest.raises(TypeError, match="ids"):
        best.run_experts(x, ids.int(), weights, packed, "silu")
