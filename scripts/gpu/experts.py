"""Mixtures of experts at the shape of a Qwen3-30B-A3B: right, the same alone, and how fast."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ops.op_set import Expert, Routing
from ops.reference import ReferenceOps, route
from scripts._paged import relative_error
from scripts.gpu.correctness import TOLERANCE, Check
from scripts.gpu.speed import Limits, seconds_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from runtime.execution.device import Device

_HIDDEN, _INNER, _EXPERTS, _TOP_K = 2048, 768, 128, 8
_TINY = 40, 24, 5, 2


def _problem(device: Device, tokens: int, *, tiny: bool) -> tuple[list[Expert], Any]:
    """Experts, and x, ids and weights of some tokens."""
    hidden, inner, count, top_k = _TINY if tiny else (_HIDDEN, _INNER, _EXPERTS, _TOP_K)
    where: dict[str, Any] = {"device": device.torch_device, "dtype": device.dtype}
    gate_up = torch.randn(count, 2 * inner, hidden, **where) * hidden**-0.5
    down = torch.randn(count, hidden, inner, **where) * inner**-0.5
    experts = [Expert(*each) for each in zip(gate_up, down, strict=True)]
    logits = torch.randn(tokens, count, device=device.torch_device)
    return experts, (torch.randn(tokens, hidden, **where), *route(logits, Routing(top_k, True)))


def check_experts(device: Device, *, tiny: bool) -> Iterator[Check]:
    """Against the reference, and to the bit for a token among others and alone."""
    experts, (x, ids, weights) = _problem(device, 7 if tiny else 60, tiny=tiny)
    packed, truth = device.ops.pack_experts(experts), ReferenceOps()

    def run(some: slice) -> Tensor:
        return device.ops.run_experts(x[some], ids[some], weights[some], packed, "silu")

    together = run(slice(None))
    want = truth.run_experts(x, ids, weights, truth.pack_experts(experts), "silu")
    error, limit = relative_error(together, want), TOLERANCE[device.dtype]
    yield Check("experts", error <= limit, f"error {error:.1e}, allowed {limit:.0e}")
    same = sum(torch.equal(run(slice(t, t + 1))[0], together[t]) for t in range(len(x)))
    yield Check("experts of a token alone", same == len(x), f"{same} of {len(x)} equal to the bit")


def expert_rates(device: Device, limits: Limits, *, tiny: bool) -> list[dict[str, float]]:
    """Microseconds of a layer's experts against the tokens, beside those of its bytes and FLOPs."""
    results = []
    for tokens in (3,) if tiny else (1, 16, 256, 4096):
        experts, (x, ids, weights) = _problem(device, tokens, tiny=tiny)
        packed = device.ops.pack_experts(experts)
        of_expert = sum(part.nbytes for part in experts[0] if part is not None)
        elements = of_expert // device.dtype.itemsize
        call = partial(device.ops.run_experts, x, ids, weights, packed, "silu")
        seconds = seconds_of(device, call, repeats=10)
        read = int(ids.unique().numel()) * of_expert
        results.append(
            {
                "tokens": tokens,
                "us": 1e6 * seconds,
                "byte_floor_us": 1e6 * read / limits.copy_bytes_per_s,
                "flop_floor_us": 1e6 * 2 * ids.numel() * elements / limits.matmul_flops,
            }
        )
    return results
