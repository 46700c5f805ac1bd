"""Runs a decoder, described as data, on any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ops.blocks.block import Block, DecoderStep, Norm
    from ops.decoder import Backend, DecoderModel


class Decoder:
    """A model ready to run: in one call where the backend compiles it whole, else block by block.

    Raises:
        ValueError: see `Backend.compile`.
    """

    def __init__(self, model: DecoderModel, ops: Backend) -> None:
        self.model = model
        self.ops = ops
        self.compiled = ops.compile(model)
        self._blocks = model.blocks

    def __call__(self, step: DecoderStep) -> Tensor:
        """Logits [N, V] of `step.logit_tokens`, after storing what the blocks keep of all tokens;
        see `logits`, compiled in float32."""
        if self.compiled is not None:
            return self.compiled(step)
        return self.logits(self.hidden(step))

    def hidden(self, step: DecoderStep) -> Tensor:
        """What `logits` takes, [N, H]: the normed output of the last block. See `__call__`."""
        model = self.model
        residual = self.ops.embed(step.input_ids, model.embedding)
        if model.embed_scale != 1.0:
            residual = residual * model.embed_scale
        # A block's output is added where the next one is normed, which is one operation.
        pending: Tensor | None = None
        for block, cache in zip(self._blocks, step.caches, strict=True):
            if block.parallel and pending is not None:
                x = self._normed(residual, block.norm)
                pending = pending + self._output(block, x, cache, step)
            else:
                x = self._added_and_normed(pending, residual, block.norm)
                pending = self._output(block, x, cache, step)
        if not step.logit_tokens.shape[0]:  # a step of middle chunks only
            return residual[:0]
        residual = residual.index_select(0, step.logit_tokens)
        if pending is not None:
            pending = pending.index_select(0, step.logit_tokens)
        return self._added_and_normed(pending, residual, model.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] for hidden states [N, H], in their type, which is that of the products; float32
        where they are scaled or capped."""
        model = self.model
        if not hidden.shape[0]:
            return hidden.new_empty((0, model.vocab_size))
        logits = self.ops.linear(hidden, model.lm_head)
        if model.logit_scale == 1.0 and model.logit_soft_cap == 0:
            return logits
        logits = logits.float()
        if model.logit_scale != 1.0:
            logits = logits * model.logit_scale
        if model.logit_soft_cap > 0:
            logits = model.logit_soft_cap * torch.tanh(logits / model.logit_soft_cap)
        return logits

    def _output(
        self, block: Block, x: Tensor, cache: tuple[Tensor, ...], step: DecoderStep
    ) -> Tensor:
        """What a block adds to the residual stream."""
        x = block.mixer.run(x, cache, step, self.ops)
        x = self._normed(x, block.out_norm)
        return x if block.residual_scale == 1.0 else x * block.residual_scale

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x
        if norm.centered:
            return self.ops.layer_norm(x, norm.weight, norm.eps)
        return self.ops.rms_norm(x, norm.weight, norm.eps)

    def _added_and_normed(
        self, pending: Tensor | None, residual: Tensor, norm: Norm | None
    ) -> Tensor:
        """In place residual += pending; returns the normed sum."""
        if pending is None:
            return self._normed(residual, norm)
        if norm is None or norm.centered:
            return self._normed(residual.add_(pending), norm)
        return self.ops.add_rms_norm(pending, residual, norm.weight, norm.eps)
