"""Where a model's weights stand in a checkpoint.

A family describes a model by the same records that a loaded model is made of (`ops.blocks`), with
a `Source` wherever those hold a weight. Loading replaces each source by what its `load` returns.
Names are those below the layer ("self_attn.o_proj"), so layers that are alike share a description.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from ops.coded_weight import CodedWeight
    from ops.op_set import GroupedWeight, OpSet
    from runtime.rope_layout import RopeLayout


class WeightReader(Protocol):
    """The checkpoint as a source sees it, at one layer.

    Args:
        ops: packs weights. quantization: what `OpSet.pack_linear` takes, None for none.
        rope_layout: the rows of rotary tables.
    """

    ops: OpSet
    quantization: str | None
    rope_layout: RopeLayout

    def take(
        self, name: str, shape: tuple[int, ...], *, wide: bool = False, exact: bool = False
    ) -> Tensor:
        """A tensor of the layer, on the device in the model's type, or in float32 if `wide`.

        Args:
            exact: whoever takes it can do with other types, too: where the device keeps floats as
                they are, matrices of float16 stay so, and vectors come in float32.
        Raises: ModelError: there is none, or it has another shape or no float type.
        """
        ...

    def stacked(
        self,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: tuple[int, ...],
        *,
        wide: bool = False,
        exact: bool = False,
    ) -> Tensor:
        """Tensors of so many rows, one below the other. See `take`."""
        ...

    def coded(
        self, names: tuple[str, ...], outputs: tuple[int, ...], inputs: int
    ) -> CodedWeight | GroupedWeight | None:
        """The matrices of these names one below the other, as the integers that they are in the
        checkpoint; None where they are none, or are not kept so."""
        ...

    def shared(self, source: Source, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gave for this source at the layer that came first, on the device."""
        ...


class Source(ABC):
    """Something to read from a checkpoint.

    What it loads follows from its fields, the checkpoint, and the type and quantization of the
    weights; where it follows from other options too, `kept` is false: it is in no file of packed
    weights (`runtime.execution.packed_weights`).
    """

    __slots__ = ()
    kept: ClassVar[bool] = True

    @abstractmethod
    def load(self, reader: WeightReader) -> Any:
        """What stands in the loaded model. Raises: ModelError: see `WeightReader.take`."""


@dataclass(frozen=True, slots=True)
class Vector(Source):
    """A norm's weight [size].

    Args:
        offset: added to what is stored; the sum stays float32, as Gemma's code has it.
    """

    name: str
    size: int
    offset: float = 0.0

    def load(self, reader: WeightReader) -> Tensor:
        weight = reader.take(f"{self.name}.weight", (self.size,), exact=True)
        return weight.to(torch.float32) + self.offset if self.offset else weight


@dataclass(frozen=True, slots=True)
class Wide(Source):
    """A tensor [size] that is float32 whatever the model's type, under its whole name."""

    name: str
    size: int

    def load(self, reader: WeightReader) -> Tensor:
        return reader.take(self.name, (self.size,), wide=True)


@dataclass(frozen=True, slots=True)
class Linear(Source):
    """A linear layer, packed by the op set.

    Args:
        names: tensors that are stacked one below the other; one name takes the whole stack.
        outputs: rows of each part.
        wide: in float32 whatever the model's type, and never quantized.
    """

    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    bias: bool = False
    wide: bool = False

    def load(self, reader: WeightReader) -> Any:
        weight = self.weight(reader)
        bias = self.read(reader, ".bias") if self.bias else None
        quantization = None if self.wide else reader.quantization
        return reader.ops.pack_linear(weight, bias, quantization=quantization)

    def weight(self, reader: WeightReader) -> Any:
        """The stack of weights, as `OpSet.pack_linear` takes it."""
        if not self.wide:
            outputs = self.outputs if len(self.names) > 1 else (sum(self.outputs),)
            names = tuple(f"{name}.weight" for name in self.names)
            coded = reader.coded(names, outputs, self.inputs)
            if coded is not None:
                return coded
        return self.read(reader, ".weight", self.inputs)

    def read(self, reader: WeightReader, suffix: str, *columns: int) -> Tensor:
        """The stack [sum of outputs, *columns], not packed."""
        names = tuple(name + suffix for name in self.names)
        if len(names) == 1:
            shape = (sum(self.outputs), *columns)
            return reader.take(names[0], shape, wide=self.wide, exact=True)
        return reader.stacked(names, self.outputs, columns, wide=self.wide, exact=True)


def loaded(described: Any, reader: WeightReader) -> Any:
    """The description with every source in it replaced by what it loads."""
    return replaced(described, lambda source: source.load(reader))


def replaced(described: Any, value_of: Callable[[Source], Any]) -> Any:
    """The description with every source in it replaced by its value."""
    if isinstance(described, Source):
        return value_of(described)
    if isinstance(described, tuple):
        return tuple(replaced(part, value_of) for part in described)
    if is_dataclass(described) and not isinstance(described, type):
        parts = {field.name: getattr(described, field.name) for field in fields(described)}
        return replace(
            described, **{name: replaced(part, value_of) for name, part in parts.items()}
        )
    return described


def sources_in(described: Any) -> Iterator[Source]:
    """Every source in a description, in the order in which `replaced` comes to them."""
    if isinstance(described, Source):
        yield described
    elif isinstance(described, tuple):
        for part in described:
            yield from sources_in(part)
    elif is_dataclass(described) and not isinstance(described, type):
        for field in fields(described):
            yield from sources_in(getattr(described, field.name))
