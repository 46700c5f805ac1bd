"""Opens a device. The one place that tells devices apart; other code asks for a capability."""

from __future__ import annotations

import math
import mmap
import os
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

import ops
from ops.cpu.build import KernelBuildError
from ops.cpu.load import CpuOptions
from ops.cpu.native import NativeOps
from ops.cpu.packed_parts import PackedParts
from ops.kv_codes import CODE_DTYPES
from runtime.config import gpu_chunk_tokens
from runtime.errors import ConfigError
from runtime.execution.machine import torch_has_bfloat16
from runtime.execution.weight_form import choose_form, group_form

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from torch import Tensor

    from ops.decoder import Backend
    from runtime.config import RunnerConfig
    from runtime.execution.weight_form import StoredWeights

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

_LARGE_BYTES = 1 << 20


class Fence(Protocol):
    """A mark in the device's queue of work."""

    def record(self) -> None:
        """Sets the mark behind all work queued so far by this thread."""

    def synchronize(self) -> None:
        """Blocks until the device has reached the mark, without holding the GIL."""

    def seconds_since(self, earlier: Any) -> float:
        """Device time between two marks that have been reached, of the same device."""


class _ImmediateFence:
    """Where work is done when the call returns, every mark has been reached."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        return

    def seconds_since(self, earlier: _ImmediateFence) -> float:
        return self._at - earlier._at


class _CudaFence:
    def __init__(self) -> None:
        # Without `blocking` the thread that waits for it keeps a core busy.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)

    def record(self) -> None:
        self._event.record()

    def synchronize(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: _CudaFence) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


@dataclass(frozen=True, slots=True)
class Device:
    """Where steps run, and what can be done there.

    Args:
        dtype: of activations, and of weights that are kept in no type of their own.
        queued: kernels are queued: a call returns before the device has done the work.
        pinned: host memory can be page-locked, so that copies run beside the host.
        graphs: steps can be captured and replayed.
        memory_budget_bytes: for weights and KV together; None: not limited by the device.
        quantization: of the linear layers' weights; None: they are of `dtype`.
        keeps_codes: but for those that are integers in the checkpoint, which stay so in "blocks" or
            in "groups" (`ops.coded_weight`); None: they are expanded.
        keeps_floats: matrices that are float16 in the checkpoint stay so, and vectors keep their
            values, whatever `dtype` is.
        weight_dtype: that most matrices have; None: `dtype`.
        weights: the form of the weights with its reason, in words, where there was a choice.
        chunk_tokens: prefill tokens of a step by default; None: as many as a time allows.
        kv_codes: the type of the codes that keys and values are kept as (`ops.kv_codes`); None:
            they are kept in `dtype`.
        parts: takes packed weights apart, for a file; None: they are kept in none.
        compiled_kernels: tells how many kernels this process has compiled, or loaded, so far.
    """

    torch_device: torch.device
    dtype: torch.dtype
    ops: Backend
    queued: bool
    pinned: bool
    graphs: bool
    memory_budget_bytes: int | None
    description: str
    quantization: str | None = None
    keeps_codes: str | None = None
    keeps_floats: bool = False
    weight_dtype: torch.dtype | None = None
    weights: str = ""
    chunk_tokens: int | None = None
    kv_codes: torch.dtype | None = None
    parts: PackedParts | None = None
    compiled_kernels: Callable[[], int] = lambda: 0

    @property
    def form(self) -> str:
        """The form of the linear layers' weights, apart from those that are kept as integers: on a
        CPU a key of `ops.cpu.forms.FORMS`."""
        return self.quantization or str(self.weight_dtype or self.dtype).removeprefix("torch.")

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of the KV pool."""
        return self.kv_codes or self.dtype

    def fence(self) -> Fence:
        return _CudaFence() if self.queued else _ImmediateFence()

    def stream(self) -> torch.cuda.Stream | None:
        """A queue of its own for a runner's steps; None where work is not queued."""
        if not self.queued:
            return None
        stream = torch.cuda.Stream(self.torch_device)
        # What was set up so far (weights, the pool's zeros) was queued on the current one.
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        return stream

    def on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        """The context in which work goes to `stream`."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def upload(self, values: np.ndarray) -> Tensor:
        """The values on the device, by a copy that the host does not wait for: one from pageable
        memory would block it until the step in flight is done."""
        host = torch.from_numpy(values)
        if self.pinned and values.size:
            host = host.pin_memory()
        return host.to(self.torch_device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """The tensor's values in host memory, there once a fence recorded after it is reached."""
        if not self.queued:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pinned)
        return host.copy_(tensor, non_blocking=True)

    def memory_bytes(self) -> int:
        """All the memory there is."""
        if not self.queued:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def probe(self) -> None:
        """Blocks until the device has done what is queued, and a small computation after it.

        Raises: RuntimeError: it cannot; after an error that sticks (an illegal address), every
            later call raises.
        """
        ones = torch.ones(8, device=self.torch_device)
        if float(ones.sum()) != 8.0:
            raise RuntimeError("the device computes wrong sums")
        if self.queued:
            torch.cuda.synchronize(self.torch_device)

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Device memory that `work` takes beyond what is held when it begins; 0 where work is not
        queued, and `work` is not done."""
        if not self.queued:
            return 0
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        work()
        torch.cuda.synchronize(self.torch_device)
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def used_bytes(self) -> int:
        """Device memory that is taken, measured: by this process, by its context, by others."""
        if not self.queued:
            return 0
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free


def zeros(shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros. Where the host is the device, each page of its memory is taken when it is
    first touched: torch would write all of it."""
    count = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not count:
        return torch.zeros(shape, device=device, dtype=dtype)
    pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def empty(shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of undefined content, for a while. A large one in the host's memory goes back to the
    system when it is gone: on the heap it would stay taken as long as something small lies behind
    it, which is half the size of a model after its layers have come and gone."""
    large = math.prod(shape) * dtype.itemsize >= _LARGE_BYTES
    make = zeros if large and device.type == "cpu" else torch.empty
    return make(shape, device=device, dtype=dtype)


def open_device(
    config: RunnerConfig,
    stored: StoredWeights,
    progress: Callable[[str], None] = lambda message: None,
) -> Device:
    """The device that the options ask for, set up.

    Args:
        stored: what the choice of the weights' form starts from.
        progress: told what is being compiled, where something is.
    Raises:
        ConfigError: the device is not there, or does not have what the options ask for.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        return _open_cuda(config, stored)
    return _open_cpu(config, stored, progress)


def _open_cpu(
    config: RunnerConfig, stored: StoredWeights, progress: Callable[[str], None]
) -> Device:
    options = CpuOptions(
        config.cache_folder,
        kernels=config.cpu_kernels,
        threads=config.cpu_threads,
        pinning=config.cpu_pinning,
    )
    try:
        op_set, kernels = ops.load_cpu(options, progress)
    except KernelBuildError as error:
        raise ConfigError(f"cpu_kernels 'native': {error}") from error
    native = isinstance(op_set, NativeOps)
    if native:
        # The kernels have their own threads; torch's would take the cores from them.
        torch.set_num_threads(1)
    else:
        if _quantization(config) is not None:
            raise ConfigError(
                f"quantization {config.quantization!r}: needs native CPU kernels; here: {kernels}"
            )
        if config.cpu_threads > 0:
            torch.set_num_threads(config.cpu_threads)
        kernels += f", {torch.get_num_threads()} threads"
    # The native kernels read bfloat16 weights with any instructions.
    dtype = _dtype(config.dtype, stored.dtype, bfloat16=native or torch_has_bfloat16())
    if _quantization(config) is not None and dtype is torch.float16:
        raise ConfigError(
            f"quantization {config.quantization!r} with dtype 'float16': the CPU's quantized layers"
            " take bfloat16 or float32"
        )
    library = op_set.library.path if isinstance(op_set, NativeOps) else None
    form = choose_form(config, stored, str(dtype).removeprefix("torch."), library)
    return Device(
        torch_device=torch.device("cpu"),
        dtype=dtype,
        ops=op_set,
        queued=False,
        pinned=False,
        graphs=False,
        memory_budget_bytes=None,
        description=f"cpu, kernels: {kernels}",
        weights=form.words,
        quantization=form.quantization,
        keeps_codes="blocks" if form.keeps_codes else None,
        keeps_floats=form.keeps_floats,
        weight_dtype=stored.dtype if form.keeps_floats and stored.dtype is torch.float16 else None,
        kv_codes=CODE_DTYPES.get(config.kv_cache_dtype),
        parts=PackedParts(op_set) if isinstance(op_set, NativeOps) else None,
    )


def _open_cuda(config: RunnerConfig, stored: StoredWeights) -> Device:
    if not torch.cuda.is_available():
        raise ConfigError("device 'cuda': torch finds no CUDA device; 'cpu' runs without one")
    if _quantization(config) is not None:
        raise ConfigError(
            f"quantization {config.quantization!r}: the GPU has none; without it weights are"
            " bfloat16 or float16"
        )
    os.environ.setdefault("TRITON_CACHE_DIR", str(config.cache_folder / "triton"))
    device = torch.device("cuda", torch.cuda.current_device())
    bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    total = torch.cuda.get_device_properties(device).total_memory
    form = group_form(config, stored)
    return Device(
        torch_device=device,
        dtype=_dtype(config.dtype, stored.dtype, bfloat16=bfloat16),
        ops=ops.load("gpu"),
        compiled_kernels=ops.gpu_kernel_counter(),
        queued=True,
        pinned=True,
        graphs=not config.disable_cuda_graph,
        memory_budget_bytes=int(total * config.mem_fraction_static),
        description=torch.cuda.get_device_name(device),
        weights=form.words,
        keeps_codes="groups" if form.keeps_codes else None,
        chunk_tokens=gpu_chunk_tokens(total),
        kv_codes=CODE_DTYPES.get(config.kv_cache_dtype),
    )


def _quantization(config: RunnerConfig) -> str | None:
    """The quantization that the options ask for; None: none."""
    return None if config.quantization == "none" else config.quantization


def _dtype(option: str, checkpoint: torch.dtype, *, bfloat16: bool) -> torch.dtype:
    """float16 is never chosen by itself: activations beyond its 65504 turn into NaN.
    Weights may be kept in it all the same (`Device.keeps_floats`)."""
    if option != "auto":
        return DTYPES[option]
    if checkpoint in (torch.bfloat16, torch.float16) and bfloat16:
        return torch.bfloat16
    return torch.float32
