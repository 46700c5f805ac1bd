"""Arguments of the native kernels: tensors as checked structs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ops.cpu import structs
from ops.cpu.library import KINDS, check

if TYPE_CHECKING:
    from torch import Tensor

    from ops.op_set import AttentionBatch, AttentionSpec

FLOATS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A weight [n, k] in panels (csrc/linear.h), with its bias [n] in float32."""

    panels: Tensor
    bias: Tensor | None
    n: int
    k: int
    kind: str

    def struct(self) -> structs.Linear:
        """Points into this object, which must outlive it."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return structs.Linear(self.panels.data_ptr(), bias, self.n, self.k, KINDS[self.kind], 0)


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


def attention_struct(spec: AttentionSpec, sinks: Tensor | None, heads: int) -> structs.Attention:
    """The attention's parameters for a kernel; `sinks` must outlive it."""
    pointer = None
    if sinks is not None:
        check("sinks", sinks, (heads,), torch.float32)
        pointer = ctypes.c_void_p(sinks.data_ptr())
    return structs.Attention(spec.scale, spec.soft_cap, spec.window, pointer)
