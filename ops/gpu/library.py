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

_SIZES = ("num_rows", "num_tokens", "max_splits", "stage")  # the per-step arguments that are ints
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True, slots=True)
class Chip:
    """What tiles are chosen by.

    Args:
        large_shared: a block may have 160 KiB of shared memory, so that deep pipelines fit (A100,
            H100, B200). Consumer cards have 100 KiB, AMD 64.
        warpgroups: products are computed by groups of four warps from shared memory (H100, B200);
            elsewhere their operands stand in registers, and a tile of 128 x 64 spills.
        amd: 64 KiB are all.
    """

    large_shared: bool = False
    warpgroups: bool = False
    amd: bool = False


_LARGE_SHARED_BYTES = 160 * 1024
_WARPGROUP_CAPABILITIES = (9, 10)  # 12, consumer cards with a B200's name, have none


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
def _chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Chip(amd=True)
    optin = int(getattr(properties, "shared_memory_per_block_optin", 0))
    return Chip(
        large_shared=optin >= _LARGE_SHARED_BYTES,
        warpgroups=properties.major in _WARPGROUP_CAPABILITIES,
    )


def chip_of(x: Tensor) -> Chip:
    """The chip that kernels on x run on."""
    return _chip(x.device.index or 0) if x.is_cuda else Chip()
