"""The gated MLP that every token goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ops.blocks.block import DecoderStep, Weight
    from ops.op_set import OpSet


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlp:
    """down(activation(gate) * up).

    Args:
        gate_up: linear, H -> [gate | up], F columns each. down: linear, F -> H.
        activation: see `act_and_mul`.
        gate: linear, H -> 1: the output is multiplied by its sigmoid (an expert that every token
            goes through, in Qwen 2); None: it is not.
    """

    intermediate_size: int
    gate_up: Weight
    down: Weight
    activation: str
    gate: Weight | None = None

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Nothing is kept: a token's output follows from its input alone."""
        return ()

    def run(self, x: Tensor, cache: tuple[Tensor, ...], step: DecoderStep, ops: OpSet) -> Tensor:
        out = ops.linear(act_and_mul(ops.linear(x, self.gate_up), self.activation, ops), self.down)
        return out if self.gate is None else out * ops.linear(x, self.gate).sigmoid()


def act_and_mul(x: Tensor, activation: str, ops: OpSet) -> Tensor:
    """activation(x[:, :F]) * x[:, F:] -> [T, F] for x [T, 2F].

    Args:
        activation: "silu", "gelu_tanh", "gelu", or "clamped_silu", which holds x within bounds and
            adds 1 to the second factor (`OpSet.clamped_silu_and_mul`).
    """
    if activation == "silu":
        return ops.silu_and_mul(x)
    if activation == "clamped_silu":
        return ops.clamped_silu_and_mul(x)
    return ops.gelu_and_mul(x, tanh=activation == "gelu_tanh")
