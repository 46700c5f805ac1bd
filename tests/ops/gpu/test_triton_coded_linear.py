"""Linear layers of integers in groups: the products of the floats that they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from ops.coded_weight import GROUP_KINDS
from ops.gpu import coded_linear
from ops.gpu.op_set import GpuOps
from ops.op_set import Expert, GroupedWeight, PackedEmbedding, Routing
from ops.reference import ReferenceOps, route
from scripts._paged import relative_error
from scripts._triton_interpreter import products_rounded_once

if TYPE_CHECKING:
    from torch import Tensor

OPS = GpuOps()
# OCP microscaling formats 1.0, table 4: a sign, two bits of exponent, one of mantissa.
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}

pytestmark = [
    # exp(-x) of a very negative gate is inf, and x / inf the right 0.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.usefixtures("nan_filled_outputs"),
]


def grouped(
    n: int, k: int, kind: str, group: int, *, zeros: bool, seed: int = 0
) -> tuple[GroupedWeight, Tensor]:
    """A weight, and its values."""
    bits = GROUP_KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    codes, stored = (
        torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
        for shape in ((n, k), (n, k // group))
    )
    scales = ((torch.rand(n, k // group, generator=generator) + 0.5) / k).half().float()
    if kind == "fp8":
        codes[codes & 127 == 127] = 3  # no NaN
        numbers = codes.view(torch.float8_e4m3fn).float()
        values = scales.repeat_interleave(group, 1) * numbers
        return GroupedWeight(kind, codes, scales, None), values
    if kind == "nf4":
        table = torch.rand(16, generator=generator) * 4 - 2
        values = scales.repeat_interleave(group, 1) * table[codes.long()]
        return GroupedWeight(kind, codes, scales, None, table), values
    if kind == "mxfp4":
        scales = torch.exp2(scales.log2().round())
        values = scales.repeat_interleave(group, 1) * torch.tensor(E2M1)[codes.long()]
        return GroupedWeight(kind, codes, scales, None), values
    spread = [part.repeat_interleave(group, 1) for part in (stored.float(), scales)]
    values = spread[1] * (codes.float() - (spread[0] if zeros else 2 ** (bits - 1)))
    return GroupedWeight(kind, codes, scales, stored if zeros else None), values


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 9) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("tokens", [1, 16, 70])
@pytest.mark.parametrize(
    ("kind", "n", "k", "group", "zeros"),
    [
        ("int4", 37, 256, 128, True),
        ("int4", 70, 544, 32, False),  # of several splits, the last one shorter
        ("int4", 64, 192, 64, True),
        ("int8", 37, 256, 256, False),
        ("int8", 33, 544, 32, True),
        ("int8", 16, 384, 128, True),
        ("fp8", 33, 544, 32, False),
        ("fp8", 20, 256, 256, False),
        ("mxfp4", 33, 544, 32, False),
        ("nf4", 33, 544, 32, False),
        ("nf4", 37, 192, 64, False),
        ("mxfp4", 70, 96, 32, False),
    ],
)
@pytest.mark.sampled(20)
def test_products_are_those_of_the_values(
    kind: str, n: int, k: int, group: int, zeros: bool, tokens: int, dtype: torch.dtype
) -> None:
    weight, values = grouped(n, k, kind, group, zeros=zeros)
    bias, x = randn(n, dtype=dtype), randn(tokens, k + 16, dtype=dtype)[:, :k]
    got = OPS.linear(x, OPS.pack_linear(weight, bias))
    assert got.dtype == dtype
    want = x.float() @ values.T + bias.float()
    assert relative_error(got, want) <= TOLERANCE[dtype]


def test_a_small_matrix_is_cut_and_a_large_one_is_not() -> None:
    assert coded_linear.split_of(70, 544, 32) == 288
    assert coded_linear.split_of(4096, 14_336, 128) == 3584
    assert coded_linear.split_of(28_672, 4096, 128) == 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("kind", ["int4", "int8", "nf4", "mxfp4"])
def test_a_token_is_the_same_alone_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    """In tiles of another size, and with splits summed by programs of their own."""
    weight, _ = grouped(40, 544, kind, 32, zeros=True)
    packed, x = OPS.pack_linear(weight, randn(40)), randn(37, 544, dtype=dtype)
    with products_rounded_once():
        together = OPS.linear(x, packed)
        for some in (slice(0, 1), slice(5, 21), slice(20, 37)):
            assert torch.equal(OPS.linear(x[some], packed), together[some])


@pytest.mark.parametrize(
    ("kind", "zeros"),
    [
        ("int4", False),
        ("int4", True),
        ("int8", True),
        ("fp8", False),
        ("nf4", False),
        ("mxfp4", False),
    ],
)
def test_an_embedding_shares_its_rows_with_the_output_layer(kind: str, zeros: bool) -> None:
    weight, values = grouped(50, 128, kind, 64, zeros=zeros)
    packed = OPS.pack_linear(weight.first_rows(48))
    ids = torch.tensor([0, 47, 3, 3])
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        assert torch.equal(OPS.embed(ids, PackedEmbedding(packed, name)), values[ids].to(dtype))
    x = randn(3, 128)
    got = OPS.linear(x, replace(packed, n=41))
    assert relative_error(got, x @ values[:41].T) <= 1e-6


def test_every_float_of_eight_bits_is_read() -> None:
    """The smallest and the largest among them, in float16 and float32."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127].repeat(2)[:288].view(9, 32)
    packed = OPS.pack_linear(GroupedWeight("fp8", codes, torch.ones(9, 1), None))
    for dtype in (torch.float32, torch.float16):
        got = OPS.linear(torch.eye(32, dtype=dtype), packed)
        assert torch.equal(got.T, codes.view(torch.float8_e4m3fn).to(dtype))


def test_every_float_of_four_bits_is_read() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(18).view(9, 32)
    packed = OPS.pack_linear(GroupedWeight("mxfp4", codes, torch.ones(9, 1), None))
    for dtype in (torch.float32, torch.float16):
        got = OPS.linear(torch.eye(32, dtype=dtype), packed)
        assert torch.equal(got.T, torch.tensor(E2M1, dtype=dtype)[codes.long()])


def test_values_of_a_table_are_rounded_once_to_the_type_of_inputs() -> None:
    """As bitsandbytes gives them to a product: the table times absmax in float32, then rounded."""
    weight, values = grouped(24, 64, "nf4", 32, zeros=False)
    packed = OPS.pack_linear(weight)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(OPS.linear(torch.eye(64, dtype=dtype), packed).T, values.to(dtype))


def turned(weight: GroupedWeight, values: Tensor, seed: int) -> tuple[GroupedWeight, Tensor]:
    """The same codes, of inputs in another order."""
    k = weight.codes.shape[1]
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    by_input = torch.empty_like(values)
    by_input[:, order] = values
    return replace(weight, order=order), by_input


@pytest.mark.parametrize("tokens", [1, 40])
def test_inputs_are_taken_in_the_order_of_the_groups(tokens: int) -> None:
    weight, values = turned(*grouped(37, 192, "int4", 64, zeros=True), seed=1)
    packed, x = OPS.pack_linear(weight), randn(tokens, 192)
    assert relative_error(OPS.linear(x, packed), x @ values.T) <= 1e-6
    ids = torch.tensor([3, 36])
    assert torch.equal(OPS.embed(ids, PackedEmbedding(packed, "float32")), values[ids])


def test_experts_have_orders_of_their_own() -> None:
    """All but the first, whose inputs are as they come."""
    count, hidden, inner, tokens = 4, 64, 96, 7
    coded, floats = [], []
    for e in range(count):
        layers = (
            grouped(2 * inner, hidden, "int4", 32, zeros=True, seed=e),
            grouped(hidden, inner, "int4", 32, zeros=True, seed=e + 50),
        )
        (gate_up, gate_up_values), (down, down_values) = (
            turned(*layer, seed=e) if e else layer for layer in layers
        )
        coded.append(Expert(gate_up, down))
        floats.append(Expert(gate_up_values, down_values))
    ids, weights = route(randn(tokens, count), Routing(2, True))
    x, reference = randn(tokens, hidden, seed=3), ReferenceOps()
    got = OPS.run_experts(x, ids, weights, OPS.pack_experts(coded), "silu")
    want = reference.run_experts(x, ids, weights, reference.pack_experts(floats), "silu")
    assert relative_error(got, want) <= 1e-6


def test_no_tokens_give_no_outputs() -> None:
    packed = OPS.pack_linear(grouped(32, 64, "int4", 32, zeros=True)[0])
    assert OPS.linear(torch.empty(0, 64), packed).shape == (0, 32)


@pytest.mark.parametrize(
    ("kind", "zeros"),
    [("int4", True), ("int8", False), ("fp8", False), ("nf4", False), ("mxfp4", False)],
)
def test_experts_of_codes_are_those_of_their_values(kind: str, zeros: bool) -> None:
    count, hidden, inner, tokens = 5, 64, 96, 11
    coded, floats = [], []
    for e in range(count):
        gate_up, gate_up_values = grouped(2 * inner, hidden, kind, 32, zeros=zeros, seed=e)
        down, down_values = grouped(hidden, inner, kind, 96, zeros=zeros, seed=e + 50)
        biases = randn(2 * inner, seed=e), randn(hidden, seed=e + 50)
        coded.append(Expert(gate_up, down, *biases))
        floats.append(Expert(gate_up_values, down_values, *biases))
    ids, weights = route(randn(tokens, count), Routing(2, True))
    x, reference = randn(tokens, hidden, seed=3), ReferenceOps()
    got = OPS.run_experts(x, ids, weights, OPS.pack_experts(coded), "silu")
    want = reference.run_experts(x, ids, weights, reference.pack_experts(floats), "silu")
    assert relative_error(got, want) <= 1e-6
