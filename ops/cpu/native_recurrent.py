"""The short convolution and the gated delta rule as one native call each (csrc/recurrent.cpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ops.cpu import structs
from ops.cpu.arguments import FLOATS, check
from ops.cpu.library import TYPES, Library
from ops.reference import read_sources

if TYPE_CHECKING:
    from torch import Tensor

    from ops.op_set import RecurrentBatch


def causal_conv(
    library: Library, x: Tensor, weight: Tensor, states: Tensor, batch: RecurrentBatch
) -> Tensor:
    """See `OpSet.causal_conv`.

    Raises: ValueError, TypeError, IndexError: an argument is not as there.
    """
    if x.dtype == torch.float16:
        x = x.float()
    check("x", x, (None, None), *FLOATS, strided=True)
    tokens, channels = x.shape
    check("weight", weight, (None, channels), torch.float32)
    check("states", states, (None, weight.shape[0] - 1, channels), torch.float32)
    out = torch.empty((tokens, channels))
    conv = structs.Conv(
        *(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.stride(0), channels),
        *(weight.shape[0], TYPES[x.dtype], 0),
    )
    before, sources = read_sources(states, batch)
    rows = _struct(before, sources, states, batch, tokens)
    library.call("loom_causal_conv", conv, rows)
    return out


def gated_delta(
    library: Library,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    states: Tensor,
    batch: RecurrentBatch,
) -> Tensor:
    """See `OpSet.gated_delta`.

    Raises: ValueError, TypeError, IndexError: an argument is not as there.
    """
    q, k, v, decay, rate = q.float(), k.float(), v.float(), decay.contiguous(), rate.contiguous()
    check("v", v, (None, None, None), torch.float32, strided=True)
    tokens, heads, width = v.shape
    check("q", q, (tokens, None, None), torch.float32, strided=True)
    key_heads, depth = q.shape[1:]
    check("k", k, tuple(q.shape), torch.float32, strided=True)
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"v: {heads} heads, expected a multiple of the heads of q, {key_heads}")
    check("decay", decay, (tokens, heads), torch.float32)
    check("rate", rate, (tokens, heads), torch.float32)
    check("states", states, (None, heads, depth, width), torch.float32)
    out = torch.empty((tokens, heads, width))
    delta = structs.Delta(
        *(x.data_ptr() for x in (q, k, v, decay, rate, out)),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        *(key_heads, heads, depth, width),
    )
    before, sources = read_sources(states, batch)
    rows = _struct(before, sources, states, batch, tokens)
    library.call("loom_gated_delta", delta, rows)
    return out


def _struct(
    before: Tensor, sources: Tensor, states: Tensor, batch: RecurrentBatch, tokens: int
) -> structs.Recurrent:
    """Points into the tensors, which must outlive it."""
    count, stops = sources.shape[0], batch.stop_tokens.shape[0]
    check("sources", sources, (count,), torch.int64)
    check("starts", batch.starts, (count + 1,), torch.int64)
    check("stops", batch.stops, (count + 1,), torch.int64)
    check("stop_tokens", batch.stop_tokens, (stops,), torch.int64)
    check("stop_slots", batch.stop_slots, (stops,), torch.int64)
    parts = sources, batch.starts, batch.stops, batch.stop_tokens, batch.stop_slots
    return structs.Recurrent(
        *(part.data_ptr() for part in parts),
        *(count, tokens, stops, before.data_ptr(), states.data_ptr()),
        *(before.shape[0], states.shape[0]),
    )
