"""The sampler's arguments for its kernel, checked (csrc/sampling.cpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ops.cpu import structs
from ops.cpu.library import check

if TYPE_CHECKING:
    from torch import Tensor

    from ops.op_set import Penalties, SamplingTensors


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
