"""Arguments of the native kernels: tensors as checked structs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ops.coded_weight import CODE_SHAPES, CODED_ROWS
from ops.cpu import structs
from ops.cpu.library import KINDS
from ops.kv_codes import CODE_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from ops.cpu.library import Library
    from ops.op_set import AttentionBatch, AttentionSpec, KvScales, Penalties, SamplingTensors

FLOATS = (torch.float32, torch.bfloat16)
CODES = tuple(CODE_DTYPES.values())
POOLS = FLOATS + CODES
_MOST_SIZE = 2**31  # of a weight's rows or columns


def check(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
    strided: bool = False,
) -> None:
    """Raises unless a tensor may be handed to a kernel: a kernel trusts its pointers.

    Args:
        shape: the expected sizes, None where any will do.
        dtypes: the allowed types.
        strided: strides other than the last may be anything; otherwise contiguous.
    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed.
    """
    given = tensor.shape
    matched = given == shape or _matches(given, shape)
    # Some twenty checks a step: little work where nothing is wrong.
    if tensor.dtype in dtypes and tensor.is_cpu and matched:
        if tensor.is_contiguous() or (strided and (tensor.stride(-1) == 1 or given[-1] <= 1)):
            return
        wanted = "a contiguous last dimension" if strided else "a contiguous tensor"
        raise ValueError(f"{name}: strides {list(tensor.stride())}, expected {wanted}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: type {tensor.dtype}, expected {allowed}")
    if not matched:
        raise ValueError(f"{name}: shape {list(given)}, expected {list(shape)}")
    raise ValueError(f"{name}: on {tensor.device}, expected the cpu")


def _matches(given: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    if len(given) != len(shape):
        return False
    # A plain loop: a generator costs more than the comparisons.
    for have, want in zip(given, shape, strict=True):
        if want is not None and have != want:
            return False
    return True


@dataclass(frozen=True)
class NativeLinear:
    """A weight [n, k] in panels (csrc/linear.h), with its bias [n] in float32.

    Args:
        panels: may hold more rows; None where there are parts.
        parts: layers of quantized kinds without biases, one below the other, which make up this
            one; whole panels in all but the last. `kind` is the first one's.
        order: [k] int32, of quantized kinds: the input that each k of the panels takes.
    """

    panels: Tensor | None
    bias: Tensor | None
    n: int
    k: int
    kind: str
    parts: tuple[NativeLinear, ...] = ()
    order: Tensor | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(part.kind for part in self.parts) or (self.kind,)

    @cached_property
    def _table(self) -> Any:
        return (structs.Linear * len(self.parts))(*(part.struct() for part in self.parts))

    def check(self, library: Library) -> None:
        """For parts that come from a file.

        Raises: ValueError, TypeError: panels or bias are not what kind and shape ask for.
        """
        if self.kind not in KINDS or not all(type(size) is int for size in (self.n, self.k)):
            raise ValueError(f"linear layer: kind {self.kind!r} of [{self.n!r}, {self.k!r}]")
        if not (0 < self.n < _MOST_SIZE and 0 < self.k < _MOST_SIZE):
            raise ValueError(f"linear layer: shape {[self.n, self.k]}")
        if self.order is not None:
            check("order", self.order, (self.k,), torch.int32)
            if not torch.equal(self.order.sort()[0], torch.arange(self.k, dtype=torch.int32)):
                raise ValueError("linear layer: an order that lacks inputs")
            if self.kind not in CODE_SHAPES or CODE_SHAPES[self.kind].of_floats:
                raise ValueError(f"linear layer: an order of {self.kind}")
        if self.parts:
            self._check_parts(library)
            return
        expected = library.packed_bytes(KINDS[self.kind], self.n, self.k)
        parts = [("panels", self.panels, expected, torch.uint8)]
        if self.bias is not None:
            parts.append(("bias", self.bias, self.n, torch.float32))
        for name, tensor, size, dtype in parts:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"linear layer: {name} {tensor!r}, expected a tensor")
            check(name, tensor, (size,), dtype)

    def _check_parts(self, library: Library) -> None:
        for part in self.parts:
            part.check(library)
            whole = part is self.parts[-1] or part.n % CODED_ROWS == 0
            plain = part.bias is None and part.order is None and not part.parts
            plain = plain and part.kind in CODE_SHAPES
            plain = plain and CODE_SHAPES[part.kind].of_floats == CODE_SHAPES[self.kind].of_floats
            if part.k != self.k or not whole or not plain:
                raise ValueError(f"linear layer: a part [{part.n}, {part.k}] of {part.kind}")
        if sum(part.n for part in self.parts) != self.n or self.parts[0].kind != self.kind:
            raise ValueError(f"linear layer: parts that do not make [{self.n}, {self.k}]")
        if self.panels is not None:
            raise ValueError("linear layer: panels beside parts")
        if self.bias is not None:
            check("bias", self.bias, (self.n,), torch.float32)

    def struct(self) -> structs.Linear:
        """Points into this object, which must outlive it."""
        bias = None if self.bias is None else self.bias.data_ptr()
        panels = self.panels
        where = ctypes.addressof(self._table) if panels is None else panels.data_ptr()
        order = None if self.order is None else self.order.data_ptr()
        return structs.Linear(where, bias, self.n, self.k, KINDS[self.kind], len(self.parts), order)


def head_dim_fits(dim: int) -> bool:
    """Whether the attention kernel takes heads of this size; plain torch takes the others."""
    return dim % 8 == 0 and 8 <= dim <= 256


def batch_struct(batch: AttentionBatch, tokens: int) -> structs.Batch:
    """The batch for a kernel, checked. Points into the batch's tensors."""
    table, rows = batch.block_table, batch.rows
    count = rows.shape[0]
    check("block_table", table, (None, None), torch.int32, strided=True)
    check("rows", rows, (None,), torch.int32)
    check("qo_indptr", batch.qo_indptr, (count + 1,), torch.int32)
    check("kv_lens", batch.kv_lens, (count,), torch.int32)
    if batch.page_size < 1:
        raise ValueError(f"page_size {batch.page_size}: expected at least 1")
    return structs.Batch(
        *(table.data_ptr(), table.shape[0], table.stride(0), table.shape[1]),
        *(rows.data_ptr(), batch.qo_indptr.data_ptr(), batch.kv_lens.data_ptr()),
        *(count, tokens, batch.page_size),
    )


def pools_struct(k_pool: Tensor, v_pool: Tensor, scales: KvScales | None) -> structs.Pools:
    """Pools [S, HK, D] for a kernel, their scales checked. Points into the tensors.

    Raises: ValueError, TypeError: codes without scales of their shape, or scales without codes.
    """
    if scales is None:
        if k_pool.dtype in CODES or v_pool.dtype in CODES:
            raise ValueError(f"scales: None, expected those of the pools, of {k_pool.dtype}")
        return structs.Pools(k_pool.data_ptr(), v_pool.data_ptr(), None, None)
    for name, pool, of_codes in (("k", k_pool, scales.k), ("v", v_pool, scales.v)):
        check(f"{name}_pool", pool, (None, None, None), *CODES)
        check(f"{name} scales", of_codes, tuple(pool.shape[:2]), torch.float32)
    pointers = (tensor.data_ptr() for tensor in (k_pool, v_pool, *scales))
    return structs.Pools(*pointers)


def attention_struct(spec: AttentionSpec, sinks: Tensor | None, heads: int) -> structs.Attention:
    """The attention's parameters for a kernel; `sinks` must outlive it."""
    pointer = None
    if sinks is not None:
        check("sinks", sinks, (heads,), torch.float32)
        pointer = ctypes.c_void_p(sinks.data_ptr())
    return structs.Attention(spec.scale, spec.soft_cap, spec.window, pointer)


def sampling_struct(logits: Tensor, s: SamplingTensors, out: Tensor) -> structs.Sampling:
    """Points into the arguments, which must outlive it."""
    check("logits", logits, (None, None), torch.float32, strided=True)
    rows, vocab = logits.shape
    for name in ("temperature", "top_p", "min_p"):
        check(name, getattr(s, name), (rows,), torch.float32)
    check("top_k", s.top_k, (rows,), torch.int32)
    check("seed", s.seed, (rows,), torch.int64)
    check("position", s.position, (rows,), torch.int64)
    struct = structs.Sampling(
        logits=logits.data_ptr(),
        batch=rows,
        vocab=vocab,
        stride=logits.stride(0),
        temperature=s.temperature.data_ptr(),
        top_p=s.top_p.data_ptr(),
        min_p=s.min_p.data_ptr(),
        top_k=s.top_k.data_ptr(),
        seed=s.seed.data_ptr(),
        position=s.position.data_ptr(),
        out=out.data_ptr(),
    )
    if s.bias is not None:
        _add_entries(struct, "bias", s.bias[0], s.bias[1])
        check("bias value", s.bias[2], (s.bias[0].shape[0],), torch.float32)
        struct.bias_value, struct.biases = s.bias[2].data_ptr(), s.bias[0].shape[0]
    if s.banned is not None:
        _add_entries(struct, "banned", *s.banned)
        struct.banned = s.banned[0].shape[0]
    if s.penalties is not None:
        _add_penalties(struct, s.penalties, rows, vocab)
    if s.mask_rows is not None and s.mask_bits is not None:
        words = (vocab + 31) // 32
        check("mask_rows", s.mask_rows, (None,), torch.int64)
        check("mask_bits", s.mask_bits, (s.mask_rows.shape[0], words), torch.int32)
        struct.mask_rows, struct.mask_bits = s.mask_rows.data_ptr(), s.mask_bits.data_ptr()
        struct.masks, struct.mask_words = s.mask_rows.shape[0], words
    return struct


def _add_entries(struct: structs.Sampling, name: str, row: Tensor, token: Tensor) -> None:
    check(f"{name} row", row, (None,), torch.int64)
    check(f"{name} token", token, (row.shape[0],), torch.int64)
    setattr(struct, f"{name}_row", row.data_ptr())
    setattr(struct, f"{name}_token", token.data_ptr())


def _add_penalties(struct: structs.Sampling, p: Penalties, rows: int, vocab: int) -> None:
    check("state_rows", p.state_rows, (rows,), torch.int32)
    struct.state_rows = p.state_rows.data_ptr()
    for name in ("repetition", "presence", "frequency"):
        check(name, getattr(p, name), (rows,), torch.float32)
        setattr(struct, name, getattr(p, name).data_ptr())
    check("prompt_mask", p.prompt_mask, (None, vocab), torch.bool)
    check("output_counts", p.output_counts, (p.prompt_mask.shape[0], vocab), torch.int32)
    struct.prompt_mask, struct.output_counts = p.prompt_mask.data_ptr(), p.output_counts.data_ptr()
    struct.states = p.prompt_mask.shape[0]
