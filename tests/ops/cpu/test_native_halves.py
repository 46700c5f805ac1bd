"""float16 weights in panels of their own: exact values, float32 inputs and sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ops.cpu.native_experts import NativeExperts
from ops.op_set import Expert, PackedEmbedding
from tests.ops.cpu.cases import DTYPE_IDS, DTYPES, elementwise_error, generator
from tests.ops.cpu.conftest import all_paths, open_ops

if TYPE_CHECKING:
    from torch import Tensor

    from ops.cpu.native import NativeOps

SHAPES = [(1, 1), (16, 64), (33, 37), (100, 576), (17, 130), (64, 1537)]


def weight_of(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=generator()).mul(k**-0.5).half()


def test_every_number_comes_back_as_it_is(native: NativeOps) -> None:
    """All 65,536 patterns of bits: normal and subnormal numbers, infinities, and what is none."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    weight = bits[torch.randperm(2**16, generator=generator())].view(torch.float16).view(512, 128)
    weight = weight[:500, :125]  # strided, neither whole panels nor whole lines
    packed = native.pack_linear(weight)
    assert (packed.kind, packed.panels.nbytes) == ("float16", 512 * 126 * 2)
    rows = native.embed(torch.arange(500), PackedEmbedding(packed, "float32"))
    torch.testing.assert_close(rows, weight.float(), rtol=0, atol=0, equal_nan=True)
    narrow = native.embed(torch.tensor([499, 0, 499]), PackedEmbedding(packed, "bfloat16"))
    want = weight[[499, 0, 499]].bfloat16()
    torch.testing.assert_close(narrow, want, rtol=0, atol=0, equal_nan=True)


def test_the_product_with_one_is_the_weight(native: NativeOps) -> None:
    """Subnormal numbers and 65504 among them, on the way that few rows take and that of many."""
    weight = weight_of(50, 96)
    weight[3, :4] = torch.tensor([2**-24, 65504.0, -(2**-14) + 2**-24, -65504.0])
    packed = native.pack_linear(weight)
    assert torch.equal(native.linear(torch.eye(96), packed).T, weight.float())
    assert torch.equal(native.linear(torch.eye(96)[:2], packed).T, weight.float()[:, :2])


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_equals_the_product_in_float64(
    native: NativeOps, n: int, k: int, dtype: torch.dtype
) -> None:
    weight, bias = weight_of(n, k), torch.randn(n, generator=generator(1)).half()
    packed = native.pack_linear(weight, bias)
    for rows in (1, 2, 3, 5, 11, 12, 13, 29):
        x = torch.randn(rows, k + 3, generator=generator(2)).to(dtype)[:, :k]
        want = x.double() @ weight.double().T + bias.double()
        got = native.linear(x, packed)
        assert got.dtype == dtype
        # Inputs are float32 on every machine: only an output in bfloat16 is rounded.
        assert elementwise_error(got, want) <= (1e-5 if dtype == torch.float32 else 2**-8 + 1e-5)


def test_inputs_of_float16_give_outputs_of_float16(native: NativeOps) -> None:
    weight, x = weight_of(40, 96), torch.randn(5, 96, generator=generator(1)).half()
    packed = native.pack_linear(weight)
    assert torch.equal(native.linear(x, packed), native.linear(x.float(), packed).half())


def test_many_rows_and_a_long_k_change_no_bit_of_a_row(native: NativeOps) -> None:
    """Some blocks of rows and of K, neither of them whole."""
    packed = native.pack_linear(weight_of(67, 387))
    x = torch.randn(211, 387, generator=generator(1))
    got = native.linear(x, packed)
    alone = torch.cat([native.linear(row[None], packed) for row in x])
    assert torch.equal(got, alone)
    for first, count in ((0, 1), (95, 2), (96, 7), (130, 81)):
        part = native.linear(x[first : first + count], packed)
        assert torch.equal(part, got[first : first + count])


@pytest.mark.slow
def test_every_path_and_number_of_threads_gives_the_bits_of_float32_weights(
    best: NativeOps,
) -> None:
    """Widened numbers are multiplied and added up as those of float32 weights are."""
    weight, x = weight_of(70, 201), torch.randn(31, 201, generator=generator(1))
    x[3, 40], x[4], x[5, 7] = float("inf"), 0.0, float("nan")
    want = best.linear(x, best.pack_linear(weight.float()))
    for path in all_paths():
        for threads in (1, 2, 5):
            ops = open_ops(path, threads)
            got = ops.linear(x, ops.pack_linear(weight))
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_experts_equal_those_of_float32_weights(native: NativeOps) -> None:
    rand = generator(3)

    def matrix(n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=rand).mul(k**-0.5).half()

    experts = [Expert(matrix(64, 48), matrix(48, 32)) for _ in range(5)]
    wide = [Expert(expert.gate_up.float(), expert.down.float()) for expert in experts]
    x = torch.randn(40, 48, generator=rand)
    ids = torch.rand(40, 5, generator=rand).argsort(1)[:, :2].contiguous()
    weights = torch.rand(40, 2, generator=rand)
    packed = native.pack_experts(experts)
    assert isinstance(packed, NativeExperts)
    got = native.run_experts(x, ids, weights, packed, "silu")
    want = native.run_experts(x, ids, weights, native.pack_experts(wide), "silu")
    assert torch.equal(got, want)


def test_halves_are_quantized_from_their_values(best: NativeOps) -> None:
    weight = weight_of(40, 96)
    for quantization in ("int8", "int4"):
        got, want = (
            best.pack_linear(of, quantization=quantization).panels
            for of in (weight, weight.float())
        )
        assert torch.equal(got, want)
