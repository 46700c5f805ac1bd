"""What a decoder is made of: blocks, each of which adds to the residual stream.

    residual += residual_scale * out_norm(mixer(norm(residual)))

What a block computes is its mixer, and each kind of mixer has a file of this folder: its weights,
its variants as fields, and its op-by-op form. Everything in which layers differ is a field of a
block or of its mixer, so a model is a list of blocks and no layer need be like another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ops.op_set import AttentionBatch, OpSet, RecurrentBatch

# A weight of a block. In a loaded model it is what `OpSet.pack_linear` or `pack_experts` returned,
# or a tensor; where a family describes a model, it says what to read (runtime/models/sources.py).
Weight = Any


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """What a decoder computes in one step, and the memory that it works on.

    Args:
        input_ids: [T] int64. positions: [T] int64, each token's row of the rotary tables.
        slots: [T] int64, the KV slot of each token.
        attention: the step's rows.
        logit_tokens: [N] int64, indices into the T tokens: whose logits are wanted.
        caches: for each block the tensors of its `Mixer.cache_shapes`, [S, ...] each;
            behind pools of codes their scales (`ops.kv_codes`), of one dimension less. Of a
            recurrent mixer: those of its `state_shapes`, [N, ...] each.
        recurrent: the rows' states; None where no mixer is recurrent.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionBatch
    logit_tokens: Tensor
    caches: Sequence[tuple[Tensor, ...]]
    recurrent: RecurrentBatch | None = None


class Mixer(Protocol):
    """What a block computes of its normed input: the kind of the block."""

    @property
    def cache_shapes(self) -> tuple[tuple[int, ...], ...]:
        """What it keeps of every token, by KV slot: the shape of each tensor behind [S]."""
        ...

    def run(self, x: Tensor, cache: tuple[Tensor, ...], step: DecoderStep, ops: OpSet) -> Tensor:
        """The op-by-op form: [T, H] for x [T, H] of the step's tokens. It must not change x."""
        ...


@runtime_checkable
class RecurrentMixer(Mixer, Protocol):
    """A mixer whose output follows from a state that every token of a row changes."""

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """What it keeps of every row: the shape of each tensor behind [N], in float32."""
        ...


@dataclass(frozen=True, slots=True)
class Norm:
    """A root mean square norm: weight [D], see `OpSet.rms_norm`.

    Args:
        centered: the mean is subtracted first, which makes it `OpSet.layer_norm` (Cohere).
    """

    weight: Weight
    eps: float
    centered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One addition to the residual stream; see the module's docstring.

    Args:
        norm: before the mixer; None: it reads the residual stream itself (OLMo 2).
        out_norm: of the mixer's output (Gemma 2 and 3); None: none.
        parallel: it reads what the block before it read, not that block's sum (Cohere, GPT-NeoX).
    """

    mixer: Mixer
    norm: Norm | None
    out_norm: Norm | None = None
    residual_scale: float = 1.0
    parallel: bool = False
