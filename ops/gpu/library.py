"""Registration of the GPU ops with torch, and what their launches share.

Each op is defined once in the library "loomserve" through `Library.define` and `impl`, which costs
1.5 microseconds a call where the `custom_op` decorator costs 9.9 (measured on a CPU). The CUDA key
covers AMD as well. Under TRITON_INTERPRET=1 the same functions serve CPU tensors, so that the whole
engine runs on the Triton kernels on a machine without a GPU. The fake implementations let a step
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
INTERPRETED: bool = triton.knobs.runtime.interpret

_library = torch.library.Library(NAMESPACE, "FRAGMENT")

# Shared memory of a block from which the deep pipelines fit: A100 (164 KiB), H100, B200. Below it
# are consumer cards (100 KiB) and AMD (64 KiB).
_LARGE_SHARED_BYTES = 160 * 1024


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
    if INTERPRETED:
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
