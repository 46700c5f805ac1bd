"""Registration of the GPU ops with torch, and what their launches share.

Each op is defined once in the library "loomserve" through `Library.define` and `impl`, which costs
1.5 microseconds a call where the `custom_op` decorator costs 9.9 (measured on a CPU). The CUDA key
covers AMD as well. The same functions are registered for CPU tensors: under TRITON_INTERPRET=1 the
whole engine runs on the Triton kernels on a machine without a GPU (else Triton finds no driver and
says so). The fake implementations let a step
run under `FakeTensorMode`, which raises on a synchronisation or on tensors of two devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

NAMESPACE = "loomserve"

_SIZES = ("num_rows", "max_splits")  # the per-step arguments that are ints
_library = torch.library.Library(NAMESPACE, "FRAGMENT")

# Shared memory of a block from which the deep pipelines fit: A100 (164 KiB), H100, B200. Below it
# are consumer cards (100 KiB) and AMD (64 KiB).
_LARGE_SHARED_BYTES = 160 * 1024


def step_kernel(*per_step: str) -> Callable[[Any], Any]:
    """`triton.jit` for a kernel whose arguments `per_step` differ from step to step.

    They are views into a step's one upload, whose alignment changes, or its sizes. A kernel that
    is specialized on them would be compiled anew, for seconds, in the middle of serving.
    """
    decorate: Callable[[Any], Any] = triton.jit(
        do_not_specialize=[name for name in per_step if name in _SIZES],
        do_not_specialize_on_alignment=[name for name in per_step if name not in _SIZES],
    )
    return decorate


@dataclass(frozen=True, slots=True)
class Tile:
    """One compiled shape of a kernel: rows and keys of a tile, warps, pipeline depth."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def register(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Defines an op and returns it as a callable.

    Args:
        schema: name and signature in torch's schema language, mutations marked.
        function: launches the kernels; gets device tensors.
        fake: makes outputs of the right shape, type and device; computes nothing.
    """
    name = _library.define(schema)
    _library.impl(name, function, "CUDA")
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    overload: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload


@cache
def _large_shared_memory(index: int) -> bool:
    properties = torch.cuda.get_device_properties(index)
    optin = int(getattr(properties, "shared_memory_per_block_optin", 0))
    return torch.version.hip is None and optin >= _LARGE_SHARED_BYTES


def has_large_shared_memory(x: Tensor) -> bool:
    """Whether kernels on x's device may use tiles that need more than 96 KiB of shared memory."""
    return x.is_cuda and _large_shared_memory(x.device.index or 0)
