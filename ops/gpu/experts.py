"""Mixtures of experts in plain torch, until there is a kernel that groups tokens by expert.

Every expert sees every token, and a token's other experts count for nothing. That wastes
arithmetic (E / k times), but no value is read by the host and no size depends on data, so a step
neither waits nor differs from the one that a graph captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ops.blocks.dense_mlp import act_and_mul
from ops.op_set import Expert

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from ops.op_set import OpSet

# Elements of the largest intermediate result: experts are taken so many at a time.
_MOST_ELEMENTS = 1 << 26


def pack_experts(experts: Iterable[Expert]) -> Expert:
    """Each weight stacked: gate_up [E, 2F, H], down [E, H, F], biases [E, 1, 2F] and [E, 1, H]."""
    gate_up, down, gate_up_bias, down_bias = zip(*experts, strict=True)

    def biases(each: tuple[Tensor | None, ...]) -> Tensor | None:
        given = [bias for bias in each if bias is not None]
        return torch.stack(given)[:, None] if given else None

    return Expert(torch.stack(gate_up), torch.stack(down), biases(gate_up_bias), biases(down_bias))


def run_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed: Expert,
    activation: str,
    ops: OpSet,
) -> Tensor:
    """See `OpSet.run_experts`. Reference: ops.reference.ReferenceOps.run_experts."""
    gate_up, down, gate_up_bias, down_bias = packed
    count, width = gate_up.shape[0], max(gate_up.shape[1], down.shape[1])
    at_once = max(1, _MOST_ELEMENTS // max(1, x.shape[0] * width))
    factors = x.new_zeros((x.shape[0], count), dtype=torch.float32).scatter_(1, ids, weights)
    out = torch.zeros_like(x, dtype=torch.float32)
    for first in range(0, count, at_once):
        some = slice(first, first + at_once)
        inner = torch.matmul(x, gate_up[some].transpose(1, 2))  # [e, T, 2F]
        if gate_up_bias is not None:
            inner = inner + gate_up_bias[some]
        inner = act_and_mul(inner.flatten(0, 1), activation, ops).unflatten(0, inner.shape[:2])
        each = torch.matmul(inner, down[some].transpose(1, 2))  # [e, T, H]
        each = each.float() if down_bias is None else each.float() + down_bias[some].float()
        factor = factors[:, some].t()[:, :, None]  # [e, T, 1]
        # Selected, not multiplied by 0: an expert may overflow on a token that is not its own.
        out += torch.where(factor > 0, each * factor, 0.0).sum(0)
    return out.to(x.dtype)
