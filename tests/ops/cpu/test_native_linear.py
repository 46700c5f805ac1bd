"""The packed linear layer against float64, over odd shapes and every kind of weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.ops.cpu.cases import DTYPE_IDS, DTYPES, elementwise_error, generator
from tests.ops.cpu.conftest import all_paths, open_ops

if TYPE_CHECKING:
    from ops.cpu.native import NativeOps

SHAPES = [(1, 1), (16, 64), (33, 37), (100, 576), (17, 130), (64, 1537)]
ROWS = [1, 2, 3, 5, 11, 12, 13, 29]
KINDS = [None, "int8", "int4"]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_linear_equals_the_product_in_float64(
    native: NativeOps, n: int, k: int, bias: bool, dtype: torch.dtype
) -> None:
    rand = generator()
    weight = torch.randn(n, k, generator=rand).mul(k**-0.5).to(dtype)
    added = torch.randn(n, generator=rand).to(dtype) if bias else None
    packed = native.pack_linear(weight, added)
    for rows in ROWS:
        x = torch.randn(rows, k + 3, generator=rand).to(dtype)[:, :k]  # strided
        want = x.double() @ weight.double().T + (added.double() if added is not None else 0)
        got = native.linear(x, packed)
        assert got.dtype == dtype
        # bfloat16: half a unit in the last place of the output, 2**-8, beside the float32 sum.
        assert elementwise_error(got, want) <= (1e-5 if dtype == torch.float32 else 2**-8 + 1e-5)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(("n", "k"), SHAPES[1:])
def test_quantized_weights_stay_within_half_a_step(
    native: NativeOps, n: int, k: int, quantization: str
) -> None:
    """An input row that is one everywhere in one group and zero elsewhere is quantized without
    error, so the output shows the group's weights; each is at most half a step off."""
    weight = torch.randn(n, k, generator=generator())
    packed = native.pack_linear(weight, quantization=quantization)
    got = native.linear(torch.eye(k), packed).T  # [n, k]: the weights as stored
    group = 32
    for begin in range(0, k, group):
        part = weight[:, begin : begin + group]
        if quantization == "int8":
            step = part.abs().amax(1, keepdim=True) / 127
        else:
            # A group that is padded has zeros beside its weights.
            low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
            if part.shape[1] < group:
                low, high = low.clamp(max=0), high.clamp(min=0)
            step = (high - low) / 15
        error = (got[:, begin : begin + group] - part).abs()
        # Scales and minima are half floats: 2**-11 of the largest value on top.
        slack = part.abs().amax(1, keepdim=True) * 2**-10
        assert (error <= step / 2 + slack).all()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_on_the_grid_are_stored_exactly(native: NativeOps, quantization: str) -> None:
    """What a 4-bit file holds, 16 levels between a group's minimum and maximum, comes back."""
    levels = 15 if quantization == "int4" else 254
    group = 32
    rand = generator()
    q = torch.randint(0, levels + 1, (48, 4, group), generator=rand)
    q[:, :, 0], q[:, :, 1] = 0, levels
    weight = ((q - levels // 2) if quantization == "int8" else (q - 5)).flatten(1) * 0.125
    packed = native.pack_linear(weight.float(), quantization=quantization)
    got = native.linear(torch.eye(weight.shape[1]), packed).T
    assert elementwise_error(got, weight.float()) <= 1e-3


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_quantized_linear_is_close_to_the_exact_product(
    native: NativeOps, quantization: str, dtype: torch.dtype
) -> None:
    rand = generator()
    weight = torch.randn(96, 576, generator=rand).to(dtype)
    packed = native.pack_linear(weight, quantization=quantization)
    x = torch.randn(29, 576, generator=rand).to(dtype)
    want = x.double() @ weight.double().T
    error = float((native.linear(x, packed).double() - want).norm() / want.norm())
    assert error <= (0.012 if quantization == "int8" else 0.1)


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_a_row_does_not_depend_on_its_neighbours(
    native: NativeOps, quantization: str | None, dtype: torch.dtype
) -> None:
    rand = generator()
    weight = torch.randn(50, 200, generator=rand).to(dtype)
    packed = native.pack_linear(weight, quantization=quantization)
    x = torch.randn(41, 200, generator=rand).to(dtype)
    alone = torch.cat([native.linear(row[None], packed) for row in x])
    for rows in range(1, 42):
        assert torch.equal(native.linear(x[:rows], packed), alone[:rows])


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_many_rows_and_a_long_k_change_no_bit_of_a_row(
    native: NativeOps, dtype: torch.dtype, quantization: str | None
) -> None:
    """Some blocks of rows and of K, neither of them whole."""
    rand = generator()
    weight = torch.randn(67, 1123, generator=rand).mul(1123**-0.5).to(dtype)
    packed = native.pack_linear(weight, quantization=quantization)
    x = torch.randn(211, 1123, generator=rand).to(dtype)
    got = native.linear(x, packed)
    want = x.double() @ weight.double().T
    if quantization is None:
        assert elementwise_error(got, want) <= (1e-5 if dtype == torch.float32 else 2**-8 + 1e-5)
    else:
        error = float((got.double() - want).norm() / want.norm())
        assert error <= (0.012 if quantization == "int8" else 0.1)
    for first, count in ((0, 1), (95, 2), (96, 7), (130, 81)):
        part = native.linear(x[first : first + count], packed)
        assert torch.equal(part, got[first : first + count])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_largest_integers_add_up_exactly(native: NativeOps, quantization: str) -> None:
    """Weights and inputs at the ends of their ranges, whose products no smaller sum than int32
    holds; the scales are 1, so that the result is the integer itself."""
    rand, k = generator(), 96
    low, high = (-127, 127) if quantization == "int8" else (0, 15)
    weight = torch.where(torch.rand(40, k, generator=rand) < 0.5, low, high)
    weight[0], weight[1] = low, high
    weight[:, ::32], weight[:, 1::32] = low, high  # each group has both ends
    x = torch.where(torch.rand(9, k, generator=rand) < 0.5, -127, 127)
    x[0], x[1] = -127, 127
    packed = native.pack_linear(weight.float(), quantization=quantization)
    want = (x.long() @ weight.long().T).float()
    for rows in (1, 2, 3, 9):
        assert torch.equal(native.linear(x[:rows].float(), packed), want[:rows])


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("path", all_paths()[1:])
def test_every_instruction_path_gives_the_same_bits(
    best: NativeOps, path: str, quantization: str
) -> None:
    """Products of integers are exact however they are computed, and the rest is in one order."""
    rand = generator()
    weight, x = torch.randn(70, 200, generator=rand), torch.randn(40, 200, generator=rand)
    x[3, 40], x[4] = float("inf"), 0.0
    want = best.linear(x, best.pack_linear(weight, quantization=quantization))
    ops = open_ops(path)
    packed = ops.pack_linear(weight, quantization=quantization)
    for rows in (*range(1, 14), 24, 40):
        got = ops.linear(x[:rows], packed)
        torch.testing.assert_close(got, want[:rows], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("quantization", KINDS)
def test_a_row_does_not_depend_on_the_number_of_threads(
    best: NativeOps, quantization: str | None
) -> None:
    weight = torch.randn(70, 96, generator=generator())
    x = torch.randn(31, 96, generator=generator(1))
    name = best.library.path.name.split("-")[0]
    results = []
    for threads in (1, 2, 5):
        ops = open_ops(name, threads)
        results.append(ops.linear(x, ops.pack_linear(weight, quantization=quantization)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_nan_shows_in_its_row_alone(
    native: NativeOps, quantization: str | None, bad: float
) -> None:
    weight = torch.rand(16, 64, generator=generator()) + 0.5
    packed = native.pack_linear(weight, quantization=quantization)
    x = torch.rand(3, 64, generator=generator(1))
    x[1, 5] = bad
    got = native.linear(x, packed)
    assert not got[1].isfinite().any()
    assert got[[0, 2]].isfinite().all()


def test_no_rows_give_no_rows(best: NativeOps) -> None:
    packed = best.pack_linear(torch.randn(8, 16, generator=generator()))
    assert best.linear(torch.empty(0, 16), packed).shape == (0, 8)
