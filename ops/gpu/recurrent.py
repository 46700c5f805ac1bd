"""Recurrent states: a short convolution along a row's tokens, and the gated delta rule.

Decisions:

- A program has a row and some columns that never meet others (channels; columns of a head's
  matrix), and goes through the row's tokens in their order. So a result is one sum in one order,
  whatever pieces the tokens come in, and a grid depends on the number of rows alone: a decode step
  can be captured. The price is that a long prompt takes as many turns as it has tokens.
- A program of the delta rule is one warp, whose matrix stays in registers: sums over keys need no
  shared memory. Heads times columns fill a GPU with programs from one row on.
- The convolution has no such chain: a program takes tokens by tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.gpu.library import register, step_kernel
from ops.reference import read_sources

if TYPE_CHECKING:
    from ops.op_set import RecurrentBatch

_ROWS = ("sources", "starts", "stops", "stop_tokens", "stop_slots")
_BLOCK_T, _BLOCK_C = 16, 128
_MATRIX = 1024  # elements of a warp: 32 registers of a thread


@step_kernel(*_ROWS)
def _causal_conv_kernel(
    x, weight, before, states, out, sources, starts, stops, stop_tokens, stop_slots,
    x_stride, channels, KEPT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_C channels of one row. Grid (B, cdiv(C, BLOCK_C))."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = channel < channels
    source = tl.load(sources + row)
    first = tl.load(starts + row)
    length = tl.load(starts + row + 1) - first
    x_at = x + first * x_stride + channel
    # Token t < 0 stands in the state at KEPT + t; where the row begins, nothing does.
    old_at = before + (source + 1) * KEPT * channels + channel
    held = channel < tl.where(source >= 0, channels, 0)
    for begin in tl.range(0, length, BLOCK_T):
        token = begin + tl.arange(0, BLOCK_T)
        there = (token < length)[:, None] & live[None, :]
        acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for j in tl.static_range(KEPT + 1):
            at = (token - KEPT + j)[:, None]
            new = tl.load(x_at[None, :] + at * x_stride, mask=there & (at >= 0), other=0.0)
            is_old = (token < length)[:, None] & (at < 0) & held[None, :]
            old = tl.load(old_at[None, :] + at * channels, mask=is_old, other=0.0)
            tap = tl.load(weight + j * channels + channel, mask=live, other=0.0)
            acc += (new.to(tl.float32) + old) * tap[None, :]
        tl.store(out + (first + token)[:, None] * channels + channel[None, :], acc, mask=there)
    # What is written below may be the state that other threads have read above.
    tl.debug_barrier()
    for stop in tl.range(tl.load(stops + row), tl.load(stops + row + 1)):
        slot = tl.load(stop_slots + stop)
        tokens = tl.load(stop_tokens + stop)
        if slot >= 0:
            for j in tl.static_range(KEPT):
                at = tokens - KEPT + j
                to = states + (slot * KEPT + j) * channels + channel
                if at >= 0:
                    new = tl.load(x_at + at * x_stride, mask=live)
                    tl.store(to, new.to(tl.float32), mask=live)
                else:
                    tl.store(to, tl.load(old_at + at * channels, mask=held, other=0.0), mask=live)


@step_kernel(*_ROWS)
def _gated_delta_kernel(
    q, k, v, decay, rate, before, states, out, sources, starts, stops, stop_tokens, stop_slots,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of the matrix of one row and head. Grid (B, HV, cdiv(E, BLOCK_V))."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    depth = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inner = depth < KEY_DIM
    live = column < VALUE_DIM
    tile = inner[:, None] & live[None, :]
    # [BLOCK_K, BLOCK_V] of a slot's [HV, D, E]
    place = (head * KEY_DIM + depth)[:, None] * VALUE_DIM + column[None, :]
    size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
    source = tl.load(sources + row)
    held = inner[:, None] & (column < tl.where(source >= 0, VALUE_DIM, 0))[None, :]
    state = tl.load(before + source * size + place, mask=held, other=0.0)
    first = tl.load(starts + row)
    q_at = q + head // SHARED * q_stride_h + depth
    k_at = k + head // SHARED * k_stride_h + depth
    v_at = v + head * v_stride_h + column
    done = first
    for stop in tl.range(tl.load(stops + row), tl.load(stops + row + 1)):
        end = first + tl.load(stop_tokens + stop)
        for t in tl.range(done, end):
            query = tl.load(q_at + t * q_stride_t, mask=inner, other=0.0).to(tl.float32)
            key = tl.load(k_at + t * k_stride_t, mask=inner, other=0.0).to(tl.float32)
            value = tl.load(v_at + t * v_stride_t, mask=live, other=0.0).to(tl.float32)
            query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * scale
            key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
            state *= tl.exp(tl.load(decay + t * HEADS + head))
            error = value - tl.sum(state * key[:, None], 0)
            state += key[:, None] * (error * tl.load(rate + t * HEADS + head))[None, :]
            result = tl.sum(state * query[:, None], 0)
            tl.store(out + (t * HEADS + head) * VALUE_DIM + column, result, mask=live)
        done = end
        slot = tl.load(stop_slots + stop)
        if slot >= 0:
            tl.store(states + slot * size + place, state, mask=tile)


def _causal_conv(
    x: Tensor, weight: Tensor, before: Tensor, states: Tensor, sources: Tensor, starts: Tensor,
    stops: Tensor, stop_tokens: Tensor, stop_slots: Tensor,
) -> Tensor:  # fmt: skip
    channels = x.shape[1]
    out = torch.empty(x.shape, device=x.device)
    _causal_conv_kernel[(sources.shape[0], triton.cdiv(channels, _BLOCK_C))](
        x, weight, before, states, out, sources, starts, stops, stop_tokens, stop_slots,
        x.stride(0), channels, KEPT=weight.shape[0] - 1, BLOCK_T=_BLOCK_T, BLOCK_C=_BLOCK_C,
    )  # fmt: skip
    return out


def _gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, before: Tensor, states: Tensor,
    sources: Tensor, starts: Tensor, stops: Tensor, stop_tokens: Tensor, stop_slots: Tensor,
) -> Tensor:  # fmt: skip
    heads, value_dim = v.shape[1:]
    key_heads, key_dim = k.shape[1:]
    out = torch.empty(v.shape, device=v.device)
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(max(1, _MATRIX // block_k), triton.next_power_of_2(value_dim))
    _gated_delta_kernel[(sources.shape[0], heads, triton.cdiv(value_dim, block_v))](
        q, k, v, decay, rate, before, states, out,
        sources, starts, stops, stop_tokens, stop_slots,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        key_dim**-0.5, HEADS=heads, SHARED=heads // key_heads, KEY_DIM=key_dim,
        VALUE_DIM=value_dim, BLOCK_K=block_k, BLOCK_V=block_v, num_warps=1,
    )  # fmt: skip
    return out


_SCHEMA = (
    "Tensor before, Tensor(a!) states, Tensor sources, Tensor starts, Tensor stops, "
    "Tensor stop_tokens, Tensor stop_slots) -> Tensor"
)
_causal_conv_op = register(
    f"causal_conv(Tensor x, Tensor weight, {_SCHEMA}",
    _causal_conv,
    lambda x, *_: x.new_empty(x.shape, dtype=torch.float32),
)
_gated_delta_op = register(
    f"gated_delta(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor rate, {_SCHEMA}",
    _gated_delta,
    lambda q, k, v, *_: v.new_empty(v.shape, dtype=torch.float32),
)


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, batch: RecurrentBatch) -> Tensor:
    """See `OpSet.causal_conv`.

    Shapes: x [T, C] strided; weight [K, C]; states [N, K - 1, C]; returns [T, C] float32.
    Grid: (B, cdiv(C, 128)). Numerics: fp32, taps in their order. Reference:
    ops.reference.causal_conv.
    """
    before, sources = read_sources(states, batch)
    rows = batch.starts, batch.stops, batch.stop_tokens, batch.stop_slots
    out: Tensor = _causal_conv_op(x, weight, before, states, sources, *rows)
    return out


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    states: Tensor,
    batch: RecurrentBatch,
) -> Tensor:
    """See `OpSet.gated_delta`.

    Shapes: q, k [T, HK, D], v [T, HV, E] strided; decay, rate [T, HV]; states [N, HV, D, E];
    returns [T, HV, E] float32. Grid: (B, HV, cdiv(E, columns of a warp)).
    Numerics: fp32, sums over D by halves. Reference: ops.reference.gated_delta.
    """
    before, sources = read_sources(states, batch)
    rows = batch.starts, batch.stops, batch.stop_tokens, batch.stop_slots
    factors = decay.contiguous(), rate.contiguous()
    out: Tensor = _gated_delta_op(q, k, v, *factors, before, states, sources, *rows)
    return out
