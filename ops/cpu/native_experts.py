"""A mixture's experts as one native call (csrc/experts.cpp)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ops.cpu import structs
from ops.cpu.arguments import FLOATS, NativeLinear, check
from ops.cpu.library import ACTIVATIONS, TYPES, Library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Gate and up are computed in pairs of whole panels.
_PANEL = 16

Pair = tuple[Any, Any]  # gate_up and down, packed


@dataclass(frozen=True)
class NativeExperts:
    """Experts' weights as the kernel takes them, kept alive.

    Args:
        pairs: of each expert; all of one shape and kind, inputs in their order, see `fits`.
    """

    pairs: Sequence[Pair]

    def check(self, library: Library) -> None:
        """Raises: ValueError: they do not `fits`."""
        if not fits(self.pairs):
            raise ValueError("experts: layers of different shapes or kinds")

    @cached_property
    def _array(self) -> Any:
        layers = [structs.Expert(gate_up.struct(), down.struct()) for gate_up, down in self.pairs]
        return (structs.Expert * len(layers))(*layers)

    def struct(self, activation: str) -> structs.Experts:
        """Points into this object, which must outlive it."""
        return structs.Experts(self._array, len(self.pairs), ACTIVATIONS[activation], 0)


def fits(pairs: Sequence[Pair]) -> bool:
    """Whether the kernel covers these experts; if not, they run one by one."""
    if not pairs or not all(isinstance(layer, NativeLinear) for pair in pairs for layer in pair):
        return False
    if any(layer.order is not None for pair in pairs for layer in pair):
        return False
    gate_up, down = pairs[0]
    alike = all(_shape(pair) == _shape(pairs[0]) for pair in pairs)
    return alike and down.k % _PANEL == 0 and (gate_up.n, gate_up.k) == (2 * down.k, down.n)


def _shape(pair: Pair) -> list[tuple[Any, ...]]:
    return [(layer.n, layer.k, layer.kinds) for layer in pair]


def run(
    library: Library,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: NativeExperts,
    activation: str,
) -> Tensor:
    """See `OpSet.run_experts`; between the layers everything is float32.

    Raises: ValueError, TypeError, IndexError: an argument is not as there.
    """
    hidden = experts.pairs[0][0].k
    check("x", x, (None, hidden), *FLOATS, strided=True)
    check("ids", ids, (x.shape[0], None), torch.int64)
    check("weights", weights, tuple(ids.shape), torch.float32)
    if ids.shape[1] < 1:
        raise ValueError("ids: 0 columns, expected at least one expert of each token")
    out = torch.empty((x.shape[0], hidden), dtype=x.dtype)
    rows = structs.ExpertRows(
        *(x.data_ptr(), x.shape[0], x.stride(0), ids.data_ptr(), weights.data_ptr()),
        *(ids.shape[1], out.data_ptr(), TYPES[x.dtype], 0),
    )
    library.call("loom_experts", experts.struct(activation), rows)
    return out
