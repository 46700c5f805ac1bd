"""A mixture of experts: many gated MLPs, of which each token goes through a few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ops.blocks.block import DecoderStep, Weight
    from ops.op_set import OpSet, Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """The weighted sum of the experts that the router chooses for a token (Shazeer et al. 2017).

    Args:
        router: linear, H -> E, in float32: a rounding of its outputs may choose other experts.
        experts: see `OpSet.pack_experts`.
        activation: see `act_and_mul`.
        correction: [E] float32, see `OpSet.route`; None: none.
    """

    router: Weight
    experts: Weight
    routing: Routing
    activation: str
    correction: Weight | None = None

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Nothing is kept: a token's output follows from its input alone."""
        return ()

    def run(self, x: Tensor, cache: tuple[Tensor, ...], step: DecoderStep, ops: OpSet) -> Tensor:
        logits = ops.linear(x.float(), self.router)
        ids, weights = ops.route(logits, self.routing, self.correction)
        return ops.run_experts(x, ids, weights, self.experts, self.activation)
