"""A whole decoder as data, and what a backend may make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ops.op_set import OpSet

if TYPE_CHECKING:
    from torch import Tensor

    from ops.blocks.block import Block, DecoderStep, Norm, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderModel:
    """A decoder-only transformer: embedding, blocks, norm, output layer.

    Args:
        vocab_size: ids that have logits; the embedding may have more rows.
        embedding: what `OpSet.embed` takes, of at least as many rows. lm_head: linear, H -> V.
        layers: the blocks of each layer of the checkpoint, in the order in which they run.
        embed_scale: factor on the embeddings; logit_scale: factor on the logits.
        logit_soft_cap: logits become cap * tanh(logits / cap) at the end; 0: off.
    """

    vocab_size: int
    hidden_size: int
    embedding: Weight
    layers: tuple[tuple[Block, ...], ...]
    final_norm: Norm
    lm_head: Weight
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0

    @property
    def blocks(self) -> list[Block]:
        """All blocks in the order in which they run."""
        return [block for layer in self.layers for block in layer]


class CompiledDecoder(Protocol):
    """A whole decoder as one call."""

    def __call__(self, step: DecoderStep) -> Tensor:
        """Logits [N, V] float32 of `step.logit_tokens`, after storing what the blocks keep of all
        tokens."""
        ...


class Backend(OpSet, Protocol):
    """An op set that may have a compiled form of a model."""

    def compile(self, model: DecoderModel) -> CompiledDecoder | None:
        """The whole model as one call; None where a block's kind or shape has no compiled form
        here: the model then runs block by block, op by op.

        Raises:
            ValueError: a weight has another shape than its block says.
        """
        ...
