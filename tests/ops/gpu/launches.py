"""Which kernels are launched: noted, none is run."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from triton.runtime.interpreter import InterpretedFunction

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a launch would have had compiled: the kernel, its constants, and the kinds of its
    arguments."""

    name: str
    constants: tuple[tuple[str, Any], ...]
    kinds: tuple[str, ...]


def _kind(argument: Any) -> str:
    return str(argument.dtype) if isinstance(argument, torch.Tensor) else type(argument).__name__


@contextmanager
def recorded_launches() -> Iterator[list[Kernel]]:
    """In the block no kernel is run: what one would write is 0 if it is called `out`, else it stays
    as it is."""
    launched: list[Kernel] = []

    def run(
        kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **constants: Any
    ) -> None:
        launched.append(
            Kernel(
                kernel.__name__,
                tuple(sorted(constants.items())),
                tuple(map(_kind, args)),
            )
        )
        for name, argument in zip(kernel.arg_names, args, strict=False):
            if name == "out":
                argument.zero_()

    with patch.object(InterpretedFunction, "run", run):
        yield launched
