"""Attention of a step with prompts and decode rows, each by the kernel for its kind.

A decode row among prompts is attended to in split-KV pieces, as in a step of decode rows alone: it
gets the same result to the bit, and a long context is walked by many programs instead of one for
each KV head.

The kernels run one after the other and write to one output. So the number of decode rows may be a
bound, as in a captured step: the first programs of the second kernel overwrite what rows of padding
left at the prompts' tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ops.gpu.decode_attention import launch_decode
from ops.gpu.extend_attention import launch_extend
from ops.gpu.kv_codes import split_scales
from ops.gpu.library import register

if TYPE_CHECKING:
    from ops.op_set import AttentionBatch, AttentionSpec, KvScales


def _mixed(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, decode_rows: Tensor,
    decode_kv_lens: Tensor, rows: Tensor, qo_indptr: Tensor, kv_lens: Tensor,
    sinks: Tensor | None, page_size: int, max_q_len: int, max_kv_len: int, scale: float,
    window: int, soft_cap: float, k_scales: Tensor | None, v_scales: Tensor | None,
) -> Tensor:  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decoding = decode_rows.shape[0]
    launch_decode(
        out[:decoding], q[:decoding], k_pool, v_pool, block_table, decode_rows, decode_kv_lens,
        sinks, page_size, max_kv_len, scale, window, soft_cap, k_scales, v_scales,
    )  # fmt: skip
    launch_extend(
        out, q, k_pool, v_pool, block_table, rows, qo_indptr, kv_lens,
        sinks, page_size, max_q_len, scale, window, soft_cap, k_scales, v_scales,
    )  # fmt: skip
    return out


_mixed_op = register(
    "mixed_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_table, "
    "Tensor decode_rows, Tensor decode_kv_lens, Tensor rows, Tensor qo_indptr, Tensor kv_lens, "
    "Tensor? sinks, int page_size, int max_q_len, int max_kv_len, float scale, int window, "
    "float soft_cap, Tensor? k_scales, Tensor? v_scales) -> Tensor",
    _mixed,
    lambda q, *_: q.new_empty(q.shape),
)


def mixed_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, spec: AttentionSpec,
    scales: KvScales | None = None,
) -> Tensor:  # fmt: skip
    """`decode_attention` of the rows of batch.decode, `extend_attention` of the others.

    Shapes: q [T, HQ, D] strided; k_pool, v_pool [S, HK, D]; the result [T, HQ, D] contiguous.
    Numerics and grids: those of the two. Reference: ops.reference.mixed_attention.
    """
    assert batch.decode is not None
    out: Tensor = _mixed_op(
        q, k_pool, v_pool, batch.block_table, batch.decode.rows, batch.decode.kv_lens, batch.rows,
        batch.qo_indptr, batch.kv_lens, spec.sinks, batch.page_size, batch.max_q_len,
        batch.decode.max_kv_len, spec.scale, spec.window, spec.soft_cap,
        *split_scales(scales),
    )  # fmt: skip
    return out
