"""Packed weights taken apart into tensors and plain values, for a file, and put together again.

Whoever adds a kind of panels lists its class in `PACKED_TYPES`: a dataclass of tensors, numbers,
words, None, tuples, and others that are listed, with a method `check(library)` that refuses parts
which do not fit each other, since kernels trust what they are given. Where the tensors lie (in
memory, or mapped from a file) is nothing that it need know.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from ops.cpu.arguments import NativeLinear
from ops.cpu.native_experts import NativeExperts
from ops.op_set import PackedEmbedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ops.cpu.native import NativeOps

PACKED_TYPES: dict[str, Any] = {
    "linear": NativeLinear,
    "experts": NativeExperts,
    "embedding": PackedEmbedding,
}
_NAMES = {kind: name for name, kind in PACKED_TYPES.items()}


class NoParts(Exception):
    """A value that is of no listed type: another op set's layout, for example."""


class PackedParts:
    """Takes apart and puts together what these operations have packed.

    Args:
        library: the file of the kernels, whose name says all that the bytes of a panel depend on
            beside the weight: instruction path, sources and compiler.
    """

    def __init__(self, ops: NativeOps) -> None:
        self.library = ops.library.path
        self._ops = ops

    def take_apart(self, value: Any) -> tuple[Any, list[Tensor]]:
        """A description, which JSON can hold, and the tensors that it counts.

        Raises: NoParts.
        """
        tensors: list[Tensor] = []
        return _describe(value, tensors), tensors

    def put_together(self, description: Any, tensors: Sequence[Tensor]) -> Any:
        """What was taken apart, of these tensors.

        Raises: ValueError, TypeError, KeyError, IndexError: they are not what it was made of.
        """
        if not isinstance(description, dict):
            return description
        if "tensor" in description:
            return tensors[description["tensor"]]
        if "tuple" in description:
            return tuple(self.put_together(part, tensors) for part in description["tuple"])
        parts = {k: self.put_together(v, tensors) for k, v in description["parts"].items()}
        value = PACKED_TYPES[description["type"]](**parts)
        value.check(self._ops.library)
        return value

    def checksum(self, tensor: Tensor) -> int:
        """The checksum of the bytes of a contiguous tensor."""
        return self._ops.library.checksum(tensor)

    def memory(self, count: int) -> Tensor:
        """[count] uint8 of undefined content, aligned, on large pages where there are such."""
        return self._ops.memory.take(count)


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple | list):
        return {"tuple": [_describe(part, tensors) for part in value]}
    name = _NAMES.get(type(value))
    if name is None:
        raise NoParts(type(value).__name__)
    parts = {f.name: _describe(getattr(value, f.name), tensors) for f in fields(value) if f.init}
    return {"type": name, "parts": parts}
