"""The compiled forms of blocks: each kind's condition, and its struct for csrc/decoder.cpp."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ops.blocks.attention import Attention
from ops.blocks.dense_mlp import DenseMlp
from ops.cpu import structs
from ops.cpu.arguments import FLOATS, NativeLinear, attention_struct, check, head_dim_fits
from ops.cpu.library import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.blocks.block import Block, Norm

# Gate and up are computed in pairs of whole panels.
_PANEL = 16


class Kept:
    """Makes structs of a model's weights and keeps alive what they point to."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self._objects: list[Any] = []

    def keep(self, item: Any) -> Any:
        self._objects.append(item)
        return item

    def linear(self, name: str, packed: NativeLinear, n: int, k: int) -> structs.Linear:
        if (packed.n, packed.k) != (n, k):
            raise ValueError(f"{name}: weight [{packed.n}, {packed.k}], expected [{n}, {k}]")
        self.keep(packed)
        return packed.struct()

    def norm(self, name: str, norm: Norm | None, size: int) -> structs.Norm:
        """The struct of a norm, with a float32 copy of its weight."""
        if norm is None:
            return structs.Norm()
        check(name, norm.weight, (size,), *FLOATS)
        return structs.Norm(self.keep(norm.weight.float().contiguous()).data_ptr(), norm.eps)


@dataclass(frozen=True, slots=True)
class CompiledKind:
    """A kind of mixer that the native step runs.

    Args:
        fits: whether it covers this one.
        fill: sets the mixer's part of a block's struct.
    """

    fits: Callable[[Any], bool]
    fill: Callable[[structs.Block, Any, Kept], None]


def _attention_fits(mixer: Attention) -> bool:
    packed = isinstance(mixer.qkv, NativeLinear) and isinstance(mixer.o, NativeLinear)
    return packed and head_dim_fits(mixer.head_dim) and mixer.gate is None


def _fill_attention(block: structs.Block, mixer: Attention, kept: Kept) -> None:
    (q_width, kv_width, _), dim, hidden = mixer.widths, mixer.head_dim, kept.hidden_size
    whole = mixer.qk_norm_whole
    struct = structs.AttentionBlock(
        qkv=kept.linear("qkv", mixer.qkv, sum(mixer.widths), hidden),
        o=kept.linear("o", mixer.o, hidden, q_width),
        heads=mixer.heads,
        kv_heads=mixer.kv_heads,
        head_dim=dim,
        q_norm=kept.norm("q_norm", mixer.q_norm, q_width if whole else dim),
        k_norm=kept.norm("k_norm", mixer.k_norm, kv_width if whole else dim),
        rope_interleaved=mixer.rope_interleaved,
        qk_norm_whole=whole,
    )
    if mixer.rope is not None:
        check("rope", mixer.rope, (None, None), FLOATS[0])
        struct.rope = kept.keep(mixer.rope).data_ptr()
        struct.rope_positions, struct.rotary_dim = mixer.rope.shape
    sinks = mixer.spec.sinks
    sinks = None if sinks is None else kept.keep(sinks.float().contiguous())
    struct.attention = attention_struct(mixer.spec, sinks, mixer.heads)
    block.attention = ctypes.pointer(kept.keep(struct))


def _mlp_fits(mixer: DenseMlp) -> bool:
    packed = isinstance(mixer.gate_up, NativeLinear) and isinstance(mixer.down, NativeLinear)
    shape_fits = mixer.intermediate_size % _PANEL == 0 and mixer.activation in ACTIVATIONS
    return packed and shape_fits and mixer.gate is None


def _fill_mlp(block: structs.Block, mixer: DenseMlp, kept: Kept) -> None:
    inner, hidden = mixer.intermediate_size, kept.hidden_size
    struct = structs.MlpBlock(
        gate_up=kept.linear("gate_up", mixer.gate_up, 2 * inner, hidden),
        down=kept.linear("down", mixer.down, hidden, inner),
        activation=ACTIVATIONS[mixer.activation],
    )
    block.mlp = ctypes.pointer(kept.keep(struct))


COMPILED_KINDS: dict[type, CompiledKind] = {
    Attention: CompiledKind(_attention_fits, _fill_attention),
    DenseMlp: CompiledKind(_mlp_fits, _fill_mlp),
}


def fits(block: Block) -> bool:
    """Whether the native step covers this block."""
    kind = COMPILED_KINDS.get(type(block.mixer))
    if kind is None or block.parallel or not (norm_fits(block.norm) and norm_fits(block.out_norm)):
        return False
    return kind.fits(block.mixer)


def norm_fits(norm: Norm | None) -> bool:
    """Whether the native step has this norm."""
    return norm is None or not norm.centered


def block_struct(block: Block, kept: Kept) -> structs.Block:
    """The struct of a block that `fits`; `kept` must outlive it.

    Raises:
        ValueError: a weight has another shape than the block says.
    """
    struct = structs.Block(
        norm=kept.norm("norm", block.norm, kept.hidden_size),
        out_norm=kept.norm("out_norm", block.out_norm, kept.hidden_size),
        residual_scale=block.residual_scale,
    )
    COMPILED_KINDS[type(block.mixer)].fill(struct, block.mixer, kept)
    return struct
