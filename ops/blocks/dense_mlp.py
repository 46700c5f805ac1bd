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
        activation: "silu", "gelu_tanh" or "gelu".
    """

    intermediate_size: int
    gate_up: Weight
    down: Weight
    activation: str

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Nothing is kept: a token's output follows from its input alone."""
        return ()

    def run(self, x: Tensor, cache: tuple[Tensor, ...], step: DecoderStep, ops: OpSet) -> Tensor:
        return ops.linear(act_and_mul(ops.linear(x, self.gate_up), self.activation, ops), self.down)


def act_and_mul(x: Tensor, activation: str, ops: OpSet) -> Tensor:
    """activation(x[:, :F]) * x[:, F:] -> [T, F] for x [T, 2F]."""
    if activation == "silu":
        return ops.silu_and_mul(x)
    return ops.gelu_and_mul(x, tanh=activation == "gelu_tanh")
