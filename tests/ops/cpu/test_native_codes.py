"""Weights of integers in the kernels: every type of GGUF's blocks, compared with the `gguf`
package's values, and groups with zeros, compared with their formula.

The blocks are random bytes, so that every code, scale and minimum occurs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from ops.coded_weight import CodedMatrix, CodedWeight, Codes
from ops.cpu import native_codes
from ops.cpu.native_experts import NativeExperts
from ops.op_set import Expert, PackedEmbedding
from runtime.checkpoints.gguf_codes import code_kind, read_codes
from tests.ops.cpu.cases import generator
from tests.ops.cpu.conftest import all_paths, open_ops

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ops.cpu.native import NativeOps

# Where a block's half-precision factors stand.
TYPES = {
    Kind.Q4_0: [0],
    Kind.Q4_1: [0, 2],
    Kind.Q5_0: [0],
    Kind.Q5_1: [0, 2],
    Kind.Q8_0: [0],
    Kind.Q2_K: [80, 82],
    Kind.Q3_K: [108],
    Kind.Q4_K: [0, 2],
    Kind.Q5_K: [0, 2],
    Kind.Q6_K: [208],
    Kind.IQ4_NL: [0],
    Kind.IQ4_XS: [0],
    Kind.MXFP4: [],  # a power of two in one byte, its exponent + 127
}
LARGEST = {"int4_zero": 15, "int8_zero": 255}  # codes and zeros
ALL_TYPES = (*TYPES, *LARGEST)
by_type = pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: getattr(kind, "name", kind))


def random_blocks(kind: Kind, n: int, k: int, seed: int = 0, spread: float = 0.01) -> NDArray[Any]:
    """Rows of blocks, whose factors have this deviation."""
    rand = np.random.default_rng(seed)
    values, size = GGML_QUANT_SIZES[kind]
    blocks = rand.integers(0, 256, (n, k // values, size), dtype=np.uint8)
    for at in TYPES[kind]:
        factors = (rand.standard_normal(blocks.shape[:2]) * spread).astype(np.float16)
        blocks[..., at : at + 2] = factors[..., None].view(np.uint8)
    if kind is Kind.MXFP4:
        blocks[..., 0] = rand.integers(-24, 16, blocks.shape[:2]) + 128  # halves hold half of it
    return blocks.reshape(n, -1)


def coded(
    kind: Kind | str, n: int, k: int, seed: int = 0, *, ends: bool = False
) -> tuple[CodedMatrix, Tensor]:
    """A matrix of random numbers, and its values.

    Args: ends: codes at the ends of their range, and factors of 1.
    """
    if isinstance(kind, str):
        return grouped(kind, n, k, seed, ends=ends)
    rows = random_blocks(kind, n, k, seed)
    if ends:
        rows[rows < 85], rows[rows > 170] = 0, 255
        blocks = rows.reshape(n, -1, GGML_QUANT_SIZES[kind][1])
        for at in TYPES[kind]:
            blocks[..., at : at + 2] = np.array([0, 0x3C], np.uint8)  # 1
        if kind is Kind.MXFP4:
            blocks[..., 0] = 128  # 2, whose half is 1
    name = code_kind(kind)
    assert name is not None
    matrix = CodedMatrix(name, n, k, lambda first, last: read_codes(kind, rows[first:last]))
    return matrix, torch.from_numpy(dequantize(rows, kind))


def grouped(kind: str, n: int, k: int, seed: int, *, ends: bool) -> tuple[CodedMatrix, Tensor]:
    """Groups of 32 with zeros: scale * (code - zero)."""
    rand, top = np.random.default_rng(seed), LARGEST[kind]
    codes, zeros = rand.integers(0, top + 1, (n, k)), rand.integers(0, top + 1, (n, k // 32))
    factors = (rand.standard_normal(zeros.shape) * 0.01).astype(np.float16)
    if ends:
        codes, zeros, factors = codes // 8 % 2 * top, zeros // 8 % 2 * top, factors**0
    minima = (zeros - (128 if top == 255 else 0)).astype(np.int8)

    def read(first: int, last: int) -> Codes:
        rows = slice(first, last)
        return Codes(codes.astype(np.uint8)[rows], factors[rows], minima=minima[rows])

    values = factors.repeat(32, 1).astype(np.float32) * (codes - zeros.repeat(32, 1))
    return CodedMatrix(kind, n, k, read), torch.from_numpy(values.astype(np.float32))


def rounded(x: Tensor) -> Tensor:
    """The input as the kernels take it: int8 with a scale for each 32."""
    groups = x.reshape(len(x), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    whole = (groups / scale.where(scale > 0, torch.ones(()))).round()
    return (whole * scale).reshape(x.shape)


@by_type
def test_packed_values_are_the_packages_to_the_bit(
    native: NativeOps, kind: Kind | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_codes, "_PIECE", 768 * 32)  # in more than one piece
    matrix, values = coded(kind, 70, 768)
    embedding = PackedEmbedding(native.pack_linear(CodedWeight((matrix,))), "float32")
    assert torch.equal(native.embed(torch.arange(70), embedding), values)
    narrow = PackedEmbedding(embedding.linear, "bfloat16")
    assert torch.equal(
        native.embed(torch.tensor([69, 0, 69]), narrow), values[[69, 0, 69]].bfloat16()
    )
    with pytest.raises(IndexError, match="a token id is outside the vocabulary"):
        native.embed(torch.tensor([70]), embedding)


@by_type
def test_the_product_is_that_of_the_values_and_the_rounded_input(
    native: NativeOps, kind: Kind | str
) -> None:
    matrix, values = coded(kind, 50, 768)
    bias = torch.randn(50, generator=generator(2))
    packed = native.pack_linear(CodedWeight((matrix,)), bias)
    x = torch.randn(41, 768, generator=generator(3))
    x[3] = 0
    want = rounded(x).double() @ values.double().T + bias.double()
    alone = torch.cat([native.linear(row[None], packed) for row in x])
    assert float((alone - want).norm() / want.norm()) < 1e-6
    for rows in (*range(1, 14), 24, 32, 41):
        assert torch.equal(native.linear(x[:rows], packed), alone[:rows])


@by_type
def test_the_largest_integers_add_up_exactly(native: NativeOps, kind: Kind | str) -> None:
    """Codes and inputs at the ends of their ranges, which no smaller sum than int32 holds: with
    factors of 1 all values are integers, and so is the result."""
    matrix, values = coded(kind, 40, 512, seed=5, ends=True)
    x = torch.where(torch.rand(41, 512, generator=generator()) < 0.5, -127.0, 127.0)
    x[0] = 127.0
    packed = native.pack_linear(CodedWeight((matrix,)))
    for rows in (5, 41):
        got, want = native.linear(x[:rows], packed), x[:rows].double() @ values.double().T
        # Sums of more than 24 bits are rounded; float32 sums of the values would be as well.
        assert float(((got - want).abs() / want.abs().clamp(min=2**22)).max()) < 1e-6


def test_parts_of_different_kinds_give_what_each_gives_alone(native: NativeOps) -> None:
    """Pairs of panels lie across the borders of the parts."""
    kinds = (Kind.Q4_K, Kind.Q6_K, Kind.Q8_0, Kind.Q4_K)
    matrices = [
        coded(kind, n, 256, seed)[0]
        for seed, (kind, n) in enumerate(zip(kinds, (48, 16, 80, 21), strict=True))
    ]
    packed = native.pack_linear(CodedWeight(tuple(matrices)))
    x = torch.randn(9, 256, generator=generator())
    for rows in (1, 2, 9):
        parts = [native.linear(x[:rows], native.pack_linear(CodedWeight((m,)))) for m in matrices]
        assert torch.equal(native.linear(x[:rows], packed), torch.cat(parts, 1))


def test_inputs_in_another_order_give_what_they_give_in_that_of_the_panels(
    native: NativeOps,
) -> None:
    order = torch.randperm(512, generator=generator(4))
    plain = [coded("int4_zero", n, 512, n)[0] for n in (48, 21)]
    matrices = [replace(matrix, order=order.int().numpy()) for matrix in plain]
    packed = native.pack_linear(CodedWeight(tuple(matrices)))
    x = torch.randn(13, 512, generator=generator())
    for rows in (1, 2, 13):
        want = native.linear(x[:rows, order], native.pack_linear(CodedWeight(tuple(plain))))
        assert torch.equal(native.linear(x[:rows], packed), want)
    embedding = PackedEmbedding(native.pack_linear(CodedWeight((matrices[1],))), "float32")
    values = native.embed(torch.arange(21), embedding)[:, order]
    assert torch.equal(values, coded("int4_zero", 21, 512, 21)[1])


def test_an_order_that_does_not_fit_is_refused(best: NativeOps) -> None:
    matrix, _ = coded("int8_zero", 32, 64)
    order = np.arange(64, dtype=np.int32)[::-1].copy()
    ordered = replace(matrix, order=order)
    with pytest.raises(ValueError, match=r"part of shape \[32, 64\], of int8_zero: does not fit"):
        best.pack_linear(CodedWeight((ordered, matrix)))
    with pytest.raises(ValueError, match=r"order: shape \[32\], expected \[64\]"):
        best.pack_linear(CodedWeight((replace(matrix, order=order[:32]),)))
    order[3] = 64
    with pytest.raises(ValueError, match="an order that lacks inputs"):
        best.pack_linear(CodedWeight((ordered,)))


def test_experts_whose_inputs_are_in_an_order_run_one_by_one(best: NativeOps) -> None:
    order = torch.randperm(64, generator=generator()).int().numpy()
    pair = coded("int4_zero", 128, 64)[0], coded("int4_zero", 64, 64)[0]
    plain, ordered = (
        Expert(*(cast("Any", CodedWeight((replace(matrix, order=of_k),))) for matrix in pair))
        for of_k in (None, order)
    )
    assert isinstance(best.pack_experts([plain]), NativeExperts)
    assert not isinstance(best.pack_experts([plain, ordered]), NativeExperts)


def test_experts_with_parts_equal_those_one_by_one(native: NativeOps) -> None:
    """Gate and up are of different kinds: their panels are computed in pairs."""
    experts = []
    for seed in range(3):
        gate, up = coded(Kind.Q4_K, 256, 256, seed)[0], coded(Kind.Q6_K, 256, 256, seed + 9)[0]
        down = coded(Kind.Q5_K, 256, 256, seed + 20)[0]
        experts.append(Expert(CodedWeight((gate, up)), CodedWeight((down,))))
    packed = native.pack_experts(experts)
    x = torch.randn(7, 256, generator=generator())
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2], [2, 0], [0, 2]])
    weights = torch.rand(7, 2, generator=generator(1))
    want = torch.zeros(7, 256)
    for expert in range(3):
        gate_up, down = packed.pairs[expert]
        out = native.linear(native.silu_and_mul(native.linear(x, gate_up)), down)
        want += out * (weights * (ids == expert)).sum(1, keepdim=True)
    got = native.run_experts(x, ids, weights, packed, "silu")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@by_type
def test_every_path_and_number_of_threads_gives_the_same_bits(
    best: NativeOps, kind: Kind | str
) -> None:
    matrix, _ = coded(kind, 70, 512)
    x = torch.randn(30, 512, generator=generator())
    x[3, 40], x[4] = float("inf"), 0.0
    want = best.linear(x, best.pack_linear(CodedWeight((matrix,))))
    for path in all_paths():
        for threads in (1, 5):
            ops = open_ops(path, threads)
            got = ops.linear(x, ops.pack_linear(CodedWeight((matrix,))))
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_numbers_that_do_not_fit_the_kind_are_refused(best: NativeOps) -> None:
    matrix, _ = coded(Kind.Q4_K, 32, 512)
    codes = matrix.read(0, 32)

    def pack(*matrices: CodedMatrix, **changed: Any) -> None:
        changed_codes = replace(codes, **changed)
        parts = matrices or (replace(matrix, read=lambda first, last: changed_codes),)
        best.pack_linear(CodedWeight(parts))

    with pytest.raises(ValueError, match=r"scales: None, expected int8 \[32, 16\]"):
        pack(scales=None)
    with pytest.raises(ValueError, match=r"codes: uint8 \[32, 256\], expected uint8 \[32, 512\]"):
        pack(codes=codes.codes[:, :256])
    with pytest.raises(ValueError, match="codes: strides"):
        pack(codes=np.asfortranarray(codes.codes))
    with pytest.raises(ValueError, match=r"part of shape \[30, 512\], of q4_k: does not fit"):
        pack(replace(matrix, n=30), matrix)
    with pytest.raises(ValueError, match=r"part of shape \[32, 160\], of q4_k: does not fit"):
        pack(replace(matrix, k=160))
    with pytest.raises(ValueError, match="quantization 'int8' of a weight of integers"):
        best.pack_linear(CodedWeight((matrix,)), quantization="int8")
