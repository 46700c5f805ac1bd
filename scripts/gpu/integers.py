"""Linear layers of integers and of floats of 8 and 4 bits in groups, at a Llama-3.1-8B's shapes:
right, the same alone, and how fast beside the same layers in the device's own type."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ops.coded_weight import E2M1_VALUES, GROUP_KINDS
from ops.op_set import GroupedWeight
from scripts._paged import relative_error
from scripts.gpu.correctness import TOLERANCE, Check
from scripts.gpu.single_ops import call_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from runtime.execution.device import Device
    from scripts.gpu.speed import Limits

_GROUP = 128  # of all but mxfp4, whose groups are of 32
_KINDS = ("int4", "int8", "fp8", "nf4", "mxfp4")
_LAYER = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))  # qkv, o, gate and up, down


def _weight(device: Device, n: int, k: int, kind: str, group: int, zeros: bool) -> GroupedWeight:
    """Random codes, whose values have a variance near 1 / k."""
    bits, group = GROUP_KINDS[kind], 32 if kind == "mxfp4" else group
    where: dict[str, Any] = {"device": device.torch_device}
    codes, stored = (
        torch.randint(0, 2**bits, (n, count), dtype=torch.uint8, **where)
        for count in (k, k // group)
    )
    scales = (torch.rand(n, k // group, **where) + 0.5) * (k**-0.5 * 4 / 2**bits)
    if kind == "fp8":
        codes.remainder_(112)  # the finite positive ones up to 128
    table = 8 * torch.linspace(-1, 1, 16, **where) ** 3 if kind == "nf4" else None
    return GroupedWeight(kind, codes, scales.half().float(), stored if zeros else None, table)


def _packed(device: Device, weight: Any) -> Any:
    return device.ops.pack_linear(weight)


def _values(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """float32; those of a table as they are rounded to the type of x."""
    group = weight.codes.shape[1] // weight.scales.shape[1]
    if weight.kind in ("fp8", "mxfp4"):
        values = weight.codes.view(torch.float8_e4m3fn).float()
        if weight.kind == "mxfp4":
            values = values.new_tensor(E2M1_VALUES)[weight.codes.long()]
        return weight.scales.repeat_interleave(group, 1) * values
    if weight.table is not None:
        values = weight.scales.repeat_interleave(group, 1) * weight.table[weight.codes.long()]
        return values.to(dtype).float()
    zeros = torch.full_like(weight.scales, 2 ** (GROUP_KINDS[weight.kind] - 1))
    if weight.zeros is not None:
        zeros = weight.zeros.float()
    spread = [part.repeat_interleave(group, 1) for part in (weight.scales, zeros)]
    return spread[0] * (weight.codes.float() - spread[1])


def check_integers(device: Device, *, tiny: bool) -> Iterator[Check]:
    """Against the values in float32, and to the bit for a token among many, among few and alone."""
    n, k, group = (40, 544, 32) if tiny else (4096, 4096, _GROUP)
    limit = TOLERANCE[device.dtype]
    for kind in _KINDS:
        for zeros in (False, True) if kind.startswith("int") else (False,):
            name = f"{kind} layer{' with zeros' if zeros else ''}"
            weight = _weight(device, n, k, kind, group, zeros)
            packed = _packed(device, weight)
            x = torch.randn(20 if tiny else 300, k, device=device.torch_device).to(device.dtype)
            together = device.ops.linear(x, packed)
            error = relative_error(together, x.float() @ _values(weight, device.dtype).T)
            yield Check(name, error <= limit, f"error {error:.1e}, allowed {limit:.0e}")
            cuts = (slice(0, 1), slice(3, 19), slice(1, 18))
            same = [torch.equal(device.ops.linear(x[cut], packed), together[cut]) for cut in cuts]
            detail = f"alone, of 16 and of 17 equal to the bit: {same}"
            yield Check(f"{name}: the same in any step", all(same), detail)


def integer_rates(device: Device, limits: Limits, *, tiny: bool) -> list[dict[str, float | str]]:
    """Microseconds of a layer's four products against tokens and kinds, beside those of its bytes
    and FLOPs, and beside the same in the device's type (`float_us`)."""
    shapes, group = (((64, 96),), 32) if tiny else (_LAYER, _GROUP)
    where: dict[str, Any] = {"device": device.torch_device, "dtype": device.dtype}
    floats = [torch.randn(n, k, **where) for n, k in shapes]
    packed = {
        kind: [
            _packed(device, _weight(device, n, k, kind, group, kind.startswith("int")))
            for n, k in shapes
        ]
        for kind in _KINDS
    }
    results: list[dict[str, float | str]] = []
    for tokens in (3,) if tiny else (1, 16, 64, 256, 4096):
        inputs = [torch.randn(tokens, k, **where) for _, k in shapes]

        def layer(product: Any, weights: Any, inputs: list[Tensor] = inputs) -> Tensor:
            pairs = zip(inputs, weights, strict=True)
            last: Tensor = [product(x, weight) for x, weight in pairs][-1]
            return last

        float_s = call_seconds(device, partial(layer, F.linear, floats), 1)
        for kind, layers in packed.items():
            seconds = call_seconds(device, partial(layer, device.ops.linear, layers), 1)
            read = sum(one.codes.nbytes + one.scales.nbytes for one in layers)
            flops = 2 * tokens * sum(n * k for n, k in shapes)
            results.append(
                {
                    "tokens": tokens,
                    "kind": kind,
                    "us": 1e6 * seconds,
                    "byte_floor_us": 1e6 * read / limits.copy_bytes_per_s,
                    "flop_floor_us": 1e6 * flops / limits.matmul_flops,
                    "float_us": 1e6 * float_s,
                }
            )
    return results
