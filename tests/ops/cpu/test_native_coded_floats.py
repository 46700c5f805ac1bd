"""Weights of codes that stand for floats: FP8 (e4m3) and nf4, with float32 scales.

A weight's value is number * scale in float32, which is what the formats' own code dequantizes to.
A layer then has the bits of a layer with these values as float32 weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from ops.coded_weight import CODE_SHAPES, CodedMatrix, CodedWeight, Codes
from ops.cpu import native_codes
from ops.cpu.native_experts import NativeExperts
from ops.op_set import Expert, PackedEmbedding
from tests.ops.cpu.cases import generator
from tests.ops.cpu.conftest import all_paths, open_ops
from tests.ops.cpu.test_native_codes import coded

if TYPE_CHECKING:
    from torch import Tensor

    from ops.cpu.native import NativeOps

KINDS = ("fp8", "nf4")
by_kind = pytest.mark.parametrize("kind", KINDS)
# A whole number of spans and of blocks of K, less than one span, and one that ends within a span.
SIZES = [(70, 768), (16, 32), (33, 416)]


def matrix_of(kind: str, n: int, k: int, seed: int = 0) -> tuple[CodedMatrix, Tensor]:
    """Random codes, every one of the kind's among them, and their values."""
    rand, span = np.random.default_rng(seed), CODE_SHAPES[kind].span
    codes = rand.integers(0, 256 if kind == "fp8" else 16, (n, k)).astype(np.uint8)
    codes[codes & 127 == 127] = 128  # NaN; what has no place becomes -0
    scales = (rand.standard_normal((n, -(-k // span))) * 0.1).astype(np.float32)
    table = rand.standard_normal(16).astype(np.float32)
    if kind == "fp8":
        numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    else:
        numbers = torch.from_numpy(table[codes])
    values = numbers * torch.from_numpy(scales).repeat_interleave(span, 1)[:, :k]

    def read(first: int, last: int) -> Codes:
        return Codes(codes[first:last], scales[first:last])

    return CodedMatrix(kind, n, k, read, table=table if kind == "nf4" else None), values


def packed_as(ops: NativeOps, *matrices: CodedMatrix, bias: Tensor | None = None) -> Any:
    return ops.pack_linear(CodedWeight(matrices), bias)


@by_kind
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_packed_values_are_the_formats_to_the_bit(
    native: NativeOps, kind: str, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_codes, "_PIECE", k * 32)  # in more than one piece
    matrix, values = matrix_of(kind, n, k)
    embedding = PackedEmbedding(packed_as(native, matrix), "float32")
    assert torch.equal(native.embed(torch.arange(n), embedding), values)


def test_every_code_of_fp8_is_its_number_with_scales_at_the_ends_of_floats(
    native: NativeOps,
) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    codes[codes & 127 == 127] = 0
    numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    for scale in (1.0, 2.0**-149, 3e-39, 2.0**117):
        scales = np.full((2, 1), scale, np.float32)
        given = Codes(codes, scales)
        matrix = CodedMatrix("fp8", 2, 128, lambda *_, given=given: given)
        embedding = PackedEmbedding(packed_as(native, matrix), "float32")
        assert torch.equal(native.embed(torch.arange(2), embedding), numbers * scales[0, 0])


@by_kind
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_sums_have_the_bits_of_float32_weights_for_any_number_of_rows(
    native: NativeOps, kind: str, n: int, k: int
) -> None:
    matrix, values = matrix_of(kind, n, k)
    bias, x = torch.randn(n, generator=generator(2)), torch.randn(211, k, generator=generator(3))
    packed, wide = packed_as(native, matrix, bias=bias), native.pack_linear(values, bias)
    want = native.linear(x, wide)
    exact = x.double() @ values.double().T + bias.double()
    assert float((want - exact).norm() / exact.norm()) < 1e-6
    for rows in (*range(1, 15), 25, 96, 97, 211):
        assert torch.equal(native.linear(x[:rows], packed), want[:rows])
    assert torch.equal(native.linear(x[130:], packed), want[130:])


@pytest.mark.slow
@by_kind
def test_every_path_and_number_of_threads_gives_the_same_bits(best: NativeOps, kind: str) -> None:
    matrix, _ = matrix_of(kind, 70, 544)
    x = torch.randn(31, 544, generator=generator())
    x[3, 40], x[4] = float("inf"), 0.0
    want = best.linear(x, packed_as(best, matrix))
    for path in all_paths():
        for threads in (1, 2, 5):
            ops = open_ops(path, threads)
            got = ops.linear(x, packed_as(ops, matrix))
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_parts_of_both_kinds_give_what_each_gives_alone(native: NativeOps) -> None:
    """Pairs of panels lie across the borders of the parts."""
    sizes = (("fp8", 48), ("nf4", 16), ("fp8", 80), ("nf4", 21))
    matrices = [matrix_of(kind, n, 256, seed)[0] for seed, (kind, n) in enumerate(sizes)]
    packed = packed_as(native, *matrices)
    x = torch.randn(40, 256, generator=generator())
    for rows in (1, 2, 9, 12, 40):
        parts = [native.linear(x[:rows], packed_as(native, matrix)) for matrix in matrices]
        assert torch.equal(native.linear(x[:rows], packed), torch.cat(parts, 1))


@by_kind
def test_experts_equal_those_of_float32_weights(native: NativeOps, kind: str) -> None:
    experts, wide = [], []
    for seed in range(4):
        gate_up, down = matrix_of(kind, 64, 64, seed), matrix_of(kind, 64, 32, seed + 9)
        experts.append(Expert(*(cast("Any", CodedWeight((m,))) for m, _ in (gate_up, down))))
        wide.append(Expert(gate_up[1], down[1]))
    x = torch.randn(40, 64, generator=generator())
    ids = torch.rand(40, 4, generator=generator(1)).argsort(1)[:, :2].contiguous()
    weights = torch.rand(40, 2, generator=generator(2))
    packed = native.pack_experts(experts)
    assert isinstance(packed, NativeExperts)
    got = native.run_experts(x, ids, weights, packed, "silu")
    want = native.run_experts(x, ids, weights, native.pack_experts(wide), "silu")
    assert torch.equal(got, want)


def test_numbers_that_do_not_fit_the_kind_are_refused(best: NativeOps) -> None:
    matrix, _ = matrix_of("nf4", 32, 128)
    codes = matrix.read(0, 32)
    with pytest.raises(ValueError, match=r"table: None, expected float32 \[1, 16\]"):
        packed_as(best, replace(matrix, table=None))
    halves = replace(codes, factors=codes.factors.astype(np.float16))
    with pytest.raises(ValueError, match=r"factors: float16 \[32, 2\], expected float32 \[32, 2\]"):
        packed_as(best, replace(matrix, read=lambda first, last: halves))
    with pytest.raises(ValueError, match=r"part of shape \[32, 120\], of nf4: does not fit"):
        packed_as(best, replace(matrix, k=120))
    with pytest.raises(ValueError, match=r"part of shape \[32, 128\], of int8_zero: does not fit"):
        packed_as(best, matrix, coded("int8_zero", 32, 128)[0])
    order = np.arange(128, dtype=np.int32)
    with pytest.raises(ValueError, match="an order of nf4"):
        packed_as(best, replace(matrix, order=order))
