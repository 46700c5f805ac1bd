"""The compiled kernel library, loaded: its functions with their types, its threads, its errors."""

from __future__ import annotations

import ctypes
import os
import weakref
from ctypes import POINTER, c_float, c_int, c_int64, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

import torch

from ops.cpu import structs

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
TYPES |= {torch.float16: 4}
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4, "q2_k": 5, "q3_k": 6}
KINDS |= {"q4_k": 7, "q5_k": 8, "q6_k": 9, "q5_1": 10, "iq4_nl": 11, "iq4_xs": 12}
KINDS |= {"int4_zero": 13, "int8_zero": 14, "mxfp4": 15, "fp8": 16, "nf4": 17}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "clamped_silu": 3}

_STATUS = {
    1: "a token id is outside the vocabulary (or a row outside the batch)",
    2: "a position is outside the rotary table",
    3: "a slot is outside the KV pool",
    4: "a page of the block table is outside the KV pool, or a row has more pages than the table",
    5: "rows, qo_indptr and kv_lens do not fit together or the block table",
    6: "a logit token is outside the step",
    7: "an expert's id is outside the experts",
    8: "a row goes on from a slot outside the states, or its tokens and stops do not fit together",
}

_L, _B, _A, _P = (
    POINTER(s) for s in (structs.Linear, structs.Batch, structs.Attention, structs.Pools)
)
_R = POINTER(structs.Recurrent)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "loom_struct_bytes": (c_int64, (c_int,)),
    "loom_open": (c_void_p, (c_int, c_int)),
    "loom_close": (None, (c_void_p,)),
    "loom_packed_bytes": (c_int64, (c_int, c_int64, c_int64)),
    "loom_pack": (None, (c_void_p, c_int, c_void_p, c_int, *[c_int64] * 3, c_void_p)),
    "loom_checksum": (c_uint64, (c_void_p, c_void_p, c_int64)),
    "loom_pack_codes": (
        None,
        (c_void_p, c_int, POINTER(structs.Codes), c_int64, c_int64, c_void_p),
    ),
    "loom_unpack_rows": (c_int, (c_void_p, _L, c_void_p, c_int64, c_int, c_void_p)),
    "loom_use_large_pages": (None, (c_void_p, c_int64)),
    "loom_linear": (None, (c_void_p, _L, c_void_p, c_int, c_int64, c_int64, c_void_p)),
    "loom_rms_norm": (
        None,
        (*[c_void_p] * 3, c_int, c_int, *[c_int64] * 3, c_float, c_void_p),
    ),
    "loom_add_rms_norm": (
        None,
        (*[c_void_p] * 4, c_int, c_int, c_int64, c_int64, c_float, c_void_p),
    ),
    "loom_act_and_mul": (None, (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int, c_void_p)),
    "loom_rotary": (
        c_int,
        (
            *(c_void_p, c_void_p, c_int, *[c_int64] * 4),
            *(c_void_p, c_void_p, c_int64, c_int64, c_int),
        ),
    ),
    "loom_store_kv": (
        c_int,
        (
            *(c_void_p, c_void_p, c_int, *[c_int64] * 5),
            *(c_void_p, c_void_p, c_int, c_int64, c_void_p),
        ),
    ),
    "loom_attention": (
        c_int,
        (c_void_p, c_void_p, c_int, *[c_int64] * 5, _P, c_int, c_int64, _B, _A, c_void_p),
    ),
    "loom_decode_step": (c_int, (c_void_p, POINTER(structs.Decoder), POINTER(structs.Step))),
    "loom_sample": (c_int, (c_void_p, POINTER(structs.Sampling))),
    "loom_experts": (
        c_int,
        (c_void_p, POINTER(structs.Experts), POINTER(structs.ExpertRows)),
    ),
    "loom_causal_conv": (c_int, (c_void_p, POINTER(structs.Conv), _R)),
    "loom_gated_delta": (c_int, (c_void_p, POINTER(structs.Delta), _R)),
}


class Library:
    """A loaded library with a team of threads. One call at a time; each lets go of the GIL.

    Args:
        path: what `build.build_library` returned.
        threads: threads of a call, the calling one included; 0: one per core that may be used.
        pinning: bind thread i to the i-th of these cores.
    """

    def __init__(self, path: Path, threads: int = 0, pinning: bool = False) -> None:
        self.path = path
        self.threads = threads or _cores()
        self._functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._functions, name)
            function.restype, function.argtypes = result, arguments
        for which, struct in enumerate(structs.IN_ORDER):
            # A field that one side lacks would shift all that follow.
            assert self._functions.loom_struct_bytes(which) == ctypes.sizeof(struct), struct
        self._context = c_void_p(self._functions.loom_open(self.threads, pinning))
        self._closer = weakref.finalize(self, self._functions.loom_close, self._context)

    def close(self) -> None:
        """Ends the threads; nothing may be called afterwards. Idempotent."""
        self._closer()

    def call(self, name: str, *arguments: Any) -> None:
        """Runs a kernel.

        Raises:
            IndexError: an id, position, slot, page or row in the data is out of its range.
        """
        status = getattr(self._functions, name)(self._context, *arguments)
        if status:
            raise IndexError(f"{name}: {_STATUS[status]}")

    def packed_bytes(self, kind: int, n: int, k: int) -> int:
        return int(self._functions.loom_packed_bytes(kind, n, k))

    def checksum(self, data: Tensor) -> int:
        """The checksum of the bytes of a contiguous tensor."""
        arguments = self._context, data.data_ptr(), data.nbytes
        return int(self._functions.loom_checksum(*arguments))

    def use_large_pages(self, buffer: Tensor) -> None:
        self._functions.loom_use_large_pages(buffer.data_ptr(), buffer.nbytes)


def _cores() -> int:
    """Those that this process may run on, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
