"""One token per row, drawn on the device; the order of operations is `ops.reference.sample`'s.

Decisions:

- Rows that filter nothing are drawn by one program each: two passes over a row, one of them where
  all are greedy. Where some row filters, all go the way of `filtered_draw`, which gives any row
  the same token.
- Philox numbers come in fours, one block for the tokens 4g .. 4g + 3. A tile therefore holds
  groups, and its four members are read in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.gpu.filtered_draw import filtered_draw
from ops.gpu.library import register, step_kernel
from ops.gpu.logit_order import gumbel, random_words, scaled

if TYPE_CHECKING:
    from ops.op_set import SamplingTensors

_MAX_BLOCK = 4096  # tokens of a tile
_WARPS = 16


def _block(vocab_size: int) -> int:
    """Tokens of a tile: a small vocabulary needs no more than its own size."""
    return min(_MAX_BLOCK, max(64, 1 << (vocab_size - 1).bit_length()))


@step_kernel("rows", "tokens", "values")
def _add_bias_kernel(logits, rows, tokens, values, stride):
    """Adds one (row, token, value); equal pairs add up. Grid (N,)."""
    i = tl.program_id(0)
    at = logits + tl.load(rows + i) * stride + tl.load(tokens + i)
    tl.atomic_add(at, tl.load(values + i))


@step_kernel("rows", "tokens")
def _ban_kernel(logits, rows, tokens, stride):
    """Sets one (row, token) to -inf. Grid (N,)."""
    i = tl.program_id(0)
    tl.store(logits + tl.load(rows + i) * stride + tl.load(tokens + i), float("-inf"))


@step_kernel("state_rows", "repetition", "presence", "frequency")
def _penalty_kernel(
    logits, state_rows, repetition, presence, frequency, prompt_mask, output_counts,
    vocab_size, stride, prompt_stride, count_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Repetition, then frequency and presence penalties. Grid (B, cdiv(V, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(state_rows + row).to(tl.int64)
    if state < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab_size
    at = logits + row * stride + token
    x = tl.load(at, mask=live, other=0.0)
    count = tl.load(output_counts + state * count_stride + token, mask=live, other=0)
    prompt = tl.load(prompt_mask + state * prompt_stride + token, mask=live, other=0)
    factor = tl.load(repetition + row) + tl.zeros([BLOCK], tl.float32)
    repeated = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    x = tl.where((count > 0) | (prompt != 0), repeated, x)
    penalty = tl.load(frequency + row) * count.to(tl.float32)
    penalty += tl.load(presence + row) * (count > 0).to(tl.float32)
    tl.store(at, x - penalty, mask=live)


@step_kernel("mask_rows", "mask_bits")
def _mask_kernel(logits, mask_rows, mask_bits, vocab_size, stride, BLOCK: tl.constexpr):
    """-inf where the grammar's bit is 0; mask_bits [M, cdiv(V, 32)]. Grid (M, cdiv(V, BLOCK))."""
    i = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab_size
    word = tl.load(mask_bits + i * tl.cdiv(vocab_size, 32) + token // 32, mask=live, other=-1)
    banned = ((word >> (token % 32)) & 1) == 0
    at = logits + tl.load(mask_rows + i) * stride + token
    tl.store(at, tl.full([BLOCK], float("-inf"), tl.float32), mask=live & banned)


@triton.jit
def _better(best, best_token, value, token):
    """The larger value of each lane. A lane's tokens ascend, so among equals the lowest stays."""
    wins = value > best
    return tl.where(wins, value, best), tl.where(wins, token, best_token)


@triton.jit
def _best_of(best, best_token):
    """The largest value of all lanes and its lowest token."""
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, best_token, 0x7FFFFFFF), 0)


@triton.jit
def _draw(row_logits, vocab_size, temperature, seed, position, fallback, BLOCK: tl.constexpr):
    """Token of the largest x + Gumbel noise."""
    GROUPS: tl.constexpr = BLOCK // 4
    best = tl.full([GROUPS], float("-inf"), tl.float32)
    best_token = tl.full([GROUPS], 0x7FFFFFFF, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        group = start // 4 + tl.arange(0, GROUPS)
        words = random_words(seed, position, group)
        for member in tl.static_range(4):
            token = group * 4 + member
            live = token < vocab_size
            x = scaled(row_logits, token, live, temperature, GROUPS)
            noisy = tl.where(live, x + gumbel(words[member]), float("-inf"))
            best, best_token = _better(best, best_token, noisy, token)
    largest, chosen = _best_of(best, best_token)
    return tl.where(largest == float("-inf"), fallback, chosen)


@step_kernel("temperatures", "seeds", "positions", "state_rows")
def _sample_kernel(
    logits, out, temperatures, seeds, positions, state_rows, output_counts,
    vocab_size, stride, count_stride,
    GREEDY: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row that filters nothing, from adjusted logits to its token, or -1. Grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_logits + token, mask=token < vocab_size, other=float("-inf"))
        x = x.to(tl.float32)
        broken |= (x != x).to(tl.int32)
        best, best_token = _better(best, best_token, x, token)
    top, chosen = _best_of(best, best_token)
    bad = (tl.max(broken, 0) > 0) | (top == float("-inf"))
    if not GREEDY:
        temperature = tl.load(temperatures + row)
        if (temperature > 0.0) & (bad == 0):
            chosen = _draw(
                row_logits, vocab_size, temperature, tl.load(seeds + row),
                tl.load(positions + row), chosen, BLOCK,
            )  # fmt: skip
    if COUNT:
        state = tl.load(state_rows + row).to(tl.int64)
        if (state >= 0) & (bad == 0):
            tl.atomic_add(output_counts + state * count_stride + chosen, 1)
    tl.store(out + row, tl.where(bad, -1, chosen).to(tl.int64))


def _add_bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    if len(rows):
        _add_bias_kernel[(len(rows),)](logits, rows, tokens, values, logits.stride(0), num_warps=1)


def _ban(logits: Tensor, rows: Tensor, tokens: Tensor) -> None:
    if len(rows):
        _ban_kernel[(len(rows),)](logits, rows, tokens, logits.stride(0), num_warps=1)


def _penalize(
    logits: Tensor, state_rows: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor,
    prompt_mask: Tensor, output_counts: Tensor,
) -> None:  # fmt: skip
    rows, vocab_size = logits.shape
    block = _block(vocab_size)
    _penalty_kernel[(rows, triton.cdiv(vocab_size, block))](
        logits, state_rows, repetition, presence, frequency, prompt_mask, output_counts,
        vocab_size, logits.stride(0), prompt_mask.stride(0), output_counts.stride(0),
        BLOCK=block, num_warps=8,
    )  # fmt: skip


def _mask(logits: Tensor, mask_rows: Tensor, mask_bits: Tensor) -> None:
    vocab_size = logits.shape[1]
    block = _block(vocab_size)
    if len(mask_rows):
        _mask_kernel[(len(mask_rows), triton.cdiv(vocab_size, block))](
            logits, mask_rows, mask_bits, vocab_size, logits.stride(0), BLOCK=block, num_warps=8
        )


def _choose(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seed: Tensor, position: Tensor, state_rows: Tensor | None, output_counts: Tensor | None,
    greedy: bool, filtered: bool,
) -> Tensor:  # fmt: skip
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows and filtered:
        filtered_draw(
            out, logits, temperature, top_k, top_p, min_p, seed, position, state_rows,
            output_counts,
        )  # fmt: skip
    elif rows:
        _sample_kernel[(rows,)](
            logits, out, temperature, seed, position, state_rows, output_counts,
            vocab_size, logits.stride(0),
            output_counts.stride(0) if output_counts is not None else 0,
            GREEDY=greedy, COUNT=output_counts is not None, BLOCK=_block(vocab_size),
            num_warps=_WARPS,
        )  # fmt: skip
    return out


def _nothing(*_: object) -> None:
    """The fake of an op that only writes in place."""


_bias_op = register(
    "add_bias(Tensor(a!) logits, Tensor rows, Tensor tokens, Tensor values) -> ()",
    _add_bias,
    _nothing,
)
_ban_op = register("ban(Tensor(a!) logits, Tensor rows, Tensor tokens) -> ()", _ban, _nothing)
_penalize_op = register(
    "penalize(Tensor(a!) logits, Tensor state_rows, Tensor repetition, Tensor presence, "
    "Tensor frequency, Tensor prompt_mask, Tensor output_counts) -> ()",
    _penalize,
    _nothing,
)
_mask_op = register(
    "mask_logits(Tensor(a!) logits, Tensor mask_rows, Tensor mask_bits) -> ()", _mask, _nothing
)
_choose_op = register(
    "choose(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seed, Tensor position, Tensor? state_rows, Tensor(a!)? output_counts, bool greedy, "
    "bool filtered) -> Tensor",
    _choose,
    lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int64),
)


def sample(logits: Tensor, s: SamplingTensors) -> Tensor:
    """Token ids [B] int64 for logits [B, V], which are overwritten if they are float32; -1 for a
    row that holds a NaN or in which no token is left. Counts the choice in
    s.penalties.output_counts. Narrow logits are read as they are, or copied to float32 once where
    something is added to them.

    Never waits for the device. Grid: (B,) for the draw without filters, (B, cdiv(V, 4096)) for
    penalties and masks. Numerics: fp32; masses of top-p are exact sums of whole numbers
    (`filtered_draw`). Reference: ops.reference.sample.
    """
    changes = (s.bias, s.penalties, s.banned, s.mask_bits)
    if any(change is not None for change in changes):
        logits = logits.float()
    if s.bias is not None:
        _bias_op(logits, *s.bias)
    p = s.penalties
    if p is not None:
        _penalize_op(
            logits, p.state_rows, p.repetition, p.presence, p.frequency, p.prompt_mask,
            p.output_counts,
        )  # fmt: skip
    if s.banned is not None:
        _ban_op(logits, *s.banned)
    if s.mask_rows is not None and s.mask_bits is not None:
        _mask_op(logits, s.mask_rows, s.mask_bits)
    out: Tensor = _choose_op(
        logits, s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.position,
        p.state_rows if p is not None else None, p.output_counts if p is not None else None,
        s.all_greedy, s.any_filter and not s.all_greedy,
    )  # fmt: skip
    return out
