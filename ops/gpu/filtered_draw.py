"""A draw from what top-k, top-p and min-p leave, by several programs for each row.

Decisions:

- Nothing is sorted. top-k and top-p keep a prefix of the order (logit descending, id ascending),
  so each is a threshold: the largest sort key whose upper tail holds k tokens, or the wanted
  probability. It is found eight bits at a time from the top, by a histogram of the tokens that
  have the bits found so far: four passes over a row, and for a row with both seven, since the
  first histogram serves both. One program for a row and two bits a pass took sixteen for each.
- A row is cut in slices of so many tokens, one program each. A token weighs a whole number,
  exp(x - top) in units of 2**-35. Sums of whole numbers are exact in any order: slices add theirs
  up by atomics, and a row's token depends neither on its neighbours nor on which program was first.
- A histogram is a product: 16 x 16 bins are one-hot rows times one-hot columns, these multiplied
  by the count, or by seven bits of the weight at a time, in int8. No two tokens wait for one bin.
- Tokens equal to the threshold are kept in the order of their ids until the number is reached: one
  more pass counts them by slice.
- The launches are the same whatever the rows ask for. A program whose row has nothing to do in a
  pass returns at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ops.gpu.library import step_kernel
from ops.gpu.logit_order import gumbel, key_value, random_words, scaled, sort_key

if TYPE_CHECKING:
    from torch import Tensor

SLICE = 2048  # tokens of a program
BLOCK = 256  # tokens that a program counts at a time
_STAGES = 7  # histograms: four of the first threshold, three more of top-p behind top-k
_WARPS = 4

# A row's working memory, in int64 words: the largest logit and the largest noisy one (`_packed`),
# what the first threshold keeps and the mass that top-p wants of it, what is kept in the end; then
# (key, tokens above, mass above) before each stage, then the histograms: 256 counts and 256 masses.
_TOP, _BEST = tl.constexpr(0), tl.constexpr(1)
_FIRST_KEY, _FIRST_TIES, _WANTED = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
_KEY, _TIES = tl.constexpr(5), tl.constexpr(6)
_BEFORE = tl.constexpr(8)
_HISTOGRAM = tl.constexpr(32)
_WORDS = 32 + _STAGES * 512

_BROKEN = tl.constexpr(1 << 60)  # of a row with a NaN
_LOWEST = tl.constexpr(0x007FFFFF)  # the sort key of -inf


@triton.jit
def _packed(x, token):
    """Order of (x descending, id ascending) as one number above 0; ids have 24 bits."""
    return (sort_key(x).to(tl.int64) << 24) | (0xFFFFFF - token).to(tl.int64)


@triton.jit
def _weight(x, top):
    """exp(x - top) in units of 2**-35, int64; 0 where it is no number."""
    mass = tl.exp(x - top)
    mass = tl.where(mass == mass, mass, 0.0)
    return tl.minimum((mass * 34359738368.0 + 0.5).to(tl.int64), 34359738367)


@triton.jit
def _wanted_mass(total, top_p):
    """At least 1, so that the first token is kept also at top_p 0."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _draws(row_words, temperature):
    """Whether the row is drawn at all: no NaN, some token left, not greedy."""
    top = tl.load(row_words + _TOP)
    return (temperature > 0.0) & (top < _BROKEN) & ((top >> 24) > _LOWEST)


@triton.jit
def _scaled_top(row_words, temperature):
    top = key_value((tl.load(row_words + _TOP) >> 24).to(tl.uint32))
    return tl.div_rn(top, temperature)


@triton.jit
def _descend(row_words, stage, key, count, mass, wanted, by_mass, shift):
    """The key with eight bits more, and the tokens and the mass above it.

    The digit is the last whose tail weighs at least what is wanted."""
    bins = tl.arange(0, 256)
    at = row_words + _HISTOGRAM + stage * 512 + bins
    counts = tl.load(at)
    masses = tl.load(at + 256)
    weights = tl.where(by_mass, masses, counts)
    before = tl.where(by_mass, mass, count)
    tails = before + tl.sum(weights, 0) - tl.cumsum(weights, 0) + weights
    digit = tl.maximum(tl.sum((tails >= wanted).to(tl.int32), 0) - 1, 0)
    above = bins > digit
    count += tl.sum(tl.where(above, counts, 0), 0)
    mass += tl.sum(tl.where(above, masses, 0), 0)
    return key | (digit.to(tl.int64) << shift), count, mass


@triton.jit
def _first_descent(row_words, stage, top_k, top_p, limited):
    """`_descend` of the first threshold by the histogram of a stage of 0 .. 3."""
    before = row_words + _BEFORE + 3 * stage
    total = tl.sum(tl.load(row_words + _HISTOGRAM + 256 + tl.arange(0, 256)), 0)
    wanted = tl.where(limited, top_k.to(tl.int64), _wanted_mass(total, top_p))
    key, count, mass = _descend(
        row_words, stage, tl.load(before), tl.load(before + 1), tl.load(before + 2), wanted,
        limited == 0, 24 - 8 * stage,
    )  # fmt: skip
    return key, count, mass, wanted


@triton.jit
def _kept_ties(key, mass, wanted, top):
    """Tie j (from 0) is kept while the mass before it is less than what is wanted."""
    each = tl.maximum(_weight(key_value(key.to(tl.uint32)), top), 1)
    return tl.maximum((wanted - mass + each - 1) // each, 1)


@triton.jit
def _top_kernel(logits, words, vocab_size, stride, words_stride, SLICE: tl.constexpr):
    """The largest logit, the lowest id among equals. Grid (B, slices), as all but the last."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    live = token < vocab_size
    x = tl.load(logits + row * stride + token, mask=live, other=0.0).to(tl.float32)
    packed = tl.where(x == x, _packed(x, token), 1 << 60)
    tl.atomic_max(words + row * words_stride + _TOP, tl.max(tl.where(live, packed, 0), 0))


@step_kernel("temperatures", "top_ks", "top_ps", "stage")
def _histogram_kernel(
    logits, words, temperatures, top_ks, top_ps, stage, vocab_size, stride, words_stride,
    SLICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds a slice to the histogram of a stage: by the digit `stage` (from the top) of the first
    threshold's keys, or `stage - 3` of top-p's behind top-k."""
    row = tl.program_id(0).to(tl.int64)
    row_words = words + row * words_stride
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    limited = (top_k > 0) & (top_k < vocab_size)
    behind = limited & (top_p < 1.0)
    asked = (limited | (top_p < 1.0)) if stage < 4 else behind
    if (_draws(row_words, temperature) & asked) == 0:
        return
    top = _scaled_top(row_words, temperature)
    key = tl.zeros([], tl.int64)
    count = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.int64)
    leads = tl.program_id(1) == 0
    if stage == 4:
        first, count, mass, _ = _first_descent(row_words, 3, top_k, top_p, limited)
        ties = top_k.to(tl.int64) - count
        kept = mass + ties * _weight(key_value(first.to(tl.uint32)), top)
        wanted = _wanted_mass(kept, top_p)
        key, count, mass = _descend(row_words, 0, key, key, key, wanted, True, 24)
        if leads:
            tl.store(row_words + _FIRST_KEY, first)
            tl.store(row_words + _FIRST_TIES, ties)
            tl.store(row_words + _WANTED, wanted)
    elif stage > 4:
        before = row_words + _BEFORE + 3 * (stage - 1)
        key, count, mass = _descend(
            row_words, stage - 1, tl.load(before), tl.load(before + 1), tl.load(before + 2),
            tl.load(row_words + _WANTED), True, 24 - 8 * (stage - 4),
        )  # fmt: skip
    elif stage > 0:
        key, count, mass, _ = _first_descent(row_words, stage - 1, top_k, top_p, limited)
    if leads:
        before = row_words + _BEFORE + 3 * stage
        tl.store(before, key)
        tl.store(before + 1, count)
        tl.store(before + 2, mass)

    shift = 24 - 8 * (stage if stage < 4 else stage - 3)
    weighs = top_p < 1.0
    digits = tl.arange(0, 16)
    counts = tl.zeros([16, 16], tl.int32)
    mass_0 = tl.zeros([16, 16], tl.int32)
    mass_1 = tl.zeros([16, 16], tl.int32)
    mass_2 = tl.zeros([16, 16], tl.int32)
    mass_3 = tl.zeros([16, 16], tl.int32)
    mass_4 = tl.zeros([16, 16], tl.int32)
    begin = tl.program_id(1) * SLICE
    for start in tl.range(begin, tl.minimum(begin + SLICE, vocab_size), BLOCK):
        token = start + tl.arange(0, BLOCK)
        live = token < vocab_size
        x = scaled(logits + row * stride, token, live, temperature, BLOCK)
        keys = sort_key(x).to(tl.int64)
        live &= (keys >> (shift + 8)) == (key >> (shift + 8))
        if tl.max(live.to(tl.int32), 0) > 0:
            digit = ((keys >> shift) & 255).to(tl.int32)
            row_hot = live[None, :] & ((digit >> 4)[None, :] == digits[:, None])
            rows = row_hot.to(tl.int8)  # [16, BLOCK]
            column_hot = (digit & 15)[:, None] == digits[None, :]  # [BLOCK, 16]
            counts = tl.dot(
                rows, column_hot.to(tl.int8), counts, out_dtype=tl.int32, input_precision="ieee"
            )
            if weighs:
                weight = _weight(x, top)
                mass_0 = _add_bits(mass_0, rows, column_hot, weight)
                mass_1 = _add_bits(mass_1, rows, column_hot, weight >> 7)
                mass_2 = _add_bits(mass_2, rows, column_hot, weight >> 14)
                mass_3 = _add_bits(mass_3, rows, column_hot, weight >> 21)
                mass_4 = _add_bits(mass_4, rows, column_hot, weight >> 28)
    masses = mass_0.to(tl.int64) + (mass_1.to(tl.int64) << 7) + (mass_2.to(tl.int64) << 14)
    masses += (mass_3.to(tl.int64) << 21) + (mass_4.to(tl.int64) << 28)
    at = row_words + _HISTOGRAM + stage * 512 + digits[:, None] * 16 + digits[None, :]
    tl.atomic_add(at, counts.to(tl.int64), mask=counts > 0)
    tl.atomic_add(at + 256, masses, mask=masses > 0)


@triton.jit
def _add_bits(total, rows, column_hot, weight):
    """Adds the lowest seven bits of each weight to its bin."""
    bits = (weight & 127).to(tl.int8)
    columns = tl.where(column_hot, bits[:, None], 0).to(tl.int8)
    return tl.dot(rows, columns, total, out_dtype=tl.int32, input_precision="ieee")


@step_kernel("temperatures", "top_ks", "top_ps")
def _ties_kernel(
    logits, words, slice_ties, temperatures, top_ks, top_ps, vocab_size, stride, words_stride,
    SLICE: tl.constexpr,
):  # fmt: skip
    """What is kept: all tokens above a key, and the first `ties` of those equal, which are counted
    by slice [B, slices]."""
    row = tl.program_id(0).to(tl.int64)
    row_words = words + row * words_stride
    temperature = tl.load(temperatures + row)
    if _draws(row_words, temperature) == 0:
        return
    top = _scaled_top(row_words, temperature)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    limited = (top_k > 0) & (top_k < vocab_size)
    key = tl.zeros([], tl.int64)
    ties = key + vocab_size
    if limited & (top_p < 1.0):
        before = row_words + _BEFORE + 3 * 6
        wanted = tl.load(row_words + _WANTED)
        key, _, mass = _descend(
            row_words, 6, tl.load(before), tl.load(before + 1), tl.load(before + 2), wanted,
            True, 0,
        )  # fmt: skip
        ties = _kept_ties(key, mass, wanted, top)
        if key == tl.load(row_words + _FIRST_KEY):
            ties = tl.minimum(ties, tl.load(row_words + _FIRST_TIES))
    elif limited | (top_p < 1.0):
        key, count, mass, wanted = _first_descent(row_words, 3, top_k, top_p, limited)
        ties = tl.where(limited, wanted - count, _kept_ties(key, mass, wanted, top))
    if tl.program_id(1) == 0:
        tl.store(row_words + _KEY, key)
        tl.store(row_words + _TIES, ties)
    token = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    live = token < vocab_size
    keys = sort_key(scaled(logits + row * stride, token, live, temperature, SLICE)).to(tl.int64)
    equal = tl.sum(((keys == key) & live).to(tl.int32), 0)
    tl.store(slice_ties + row * tl.num_programs(1) + tl.program_id(1), equal)


@step_kernel("temperatures", "min_ps", "seeds", "positions")
def _draw_kernel(
    logits, words, slice_ties, temperatures, min_ps, seeds, positions,
    vocab_size, stride, words_stride, SLICE: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """The token of the largest x + Gumbel noise among those kept. SLICES: a power of two."""
    row = tl.program_id(0).to(tl.int64)
    row_words = words + row * words_stride
    temperature = tl.load(temperatures + row)
    if _draws(row_words, temperature) == 0:
        return
    key = tl.load(row_words + _KEY)
    row_logits = logits + row * stride
    start = tl.program_id(1) * SLICE
    token = start + tl.arange(0, SLICE)
    live = token < vocab_size
    keys = sort_key(scaled(row_logits, token, live, temperature, SLICE)).to(tl.int64)
    if tl.max(((keys >= key) & live).to(tl.int32), 0) == 0:
        return
    # Of the tokens equal to the key those before `tie_end` are kept.
    others = tl.arange(0, SLICES)
    earlier = others < tl.program_id(1)
    ties_at = slice_ties + row * tl.num_programs(1) + others
    left = tl.load(row_words + _TIES) - tl.sum(tl.load(ties_at, mask=earlier, other=0), 0)
    equal = ((keys == key) & live).to(tl.int32)
    tie_end = start + tl.sum((tl.cumsum(equal, 0) <= left).to(tl.int32), 0)
    top = _scaled_top(row_words, temperature)
    min_p = tl.load(min_ps + row)
    group = start // 4 + tl.arange(0, SLICE // 4)
    words_of_group = random_words(tl.load(seeds + row), tl.load(positions + row), group)
    best = tl.zeros([SLICE // 4], tl.int64)
    for member in tl.static_range(4):
        token = group * 4 + member
        live = token < vocab_size
        x = scaled(row_logits, token, live, temperature, SLICE // 4)
        keys = sort_key(x).to(tl.int64)
        live &= (keys > key) | ((keys == key) & (token < tie_end))
        live &= tl.exp(x - top) >= min_p
        noisy = x + gumbel(words_of_group[member])
        live &= noisy > float("-inf")
        best = tl.maximum(best, tl.where(live, _packed(noisy, token), 0))
    tl.atomic_max(row_words + _BEST, tl.max(best, 0))


@step_kernel("state_rows")
def _finish_kernel(
    words, out, state_rows, output_counts, words_stride, count_stride, COUNT: tl.constexpr
):
    """The token of a row, or -1; counts it. Grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(words + row * words_stride + _TOP)
    best = tl.load(words + row * words_stride + _BEST)
    bad = (top >= _BROKEN) | ((top >> 24) <= _LOWEST)
    # Nothing is left only where a logit is +inf, whose probability is no number.
    chosen = 0xFFFFFF - (tl.where(best > 0, best, top) & 0xFFFFFF)
    if COUNT:
        state = tl.load(state_rows + row).to(tl.int64)
        if (state >= 0) & (bad == 0):
            tl.atomic_add(output_counts + state * count_stride + chosen, 1)
    tl.store(out + row, tl.where(bad, -1, chosen))


def filtered_draw(
    out: Tensor, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seed: Tensor, position: Tensor, state_rows: Tensor | None, output_counts: Tensor | None,
) -> None:  # fmt: skip
    """Writes each row's token to out [B] int64, for adjusted logits [B, V] strided.

    Grids: (B, cdiv(V, SLICE)), then (B,). Reference: steps 5 to 9 of ops.reference.sample.
    """
    rows, vocab_size = logits.shape
    slices = triton.cdiv(vocab_size, SLICE)
    grid = (rows, slices)
    words = torch.zeros((rows, _WORDS), dtype=torch.int64, device=logits.device)
    slice_ties = torch.empty((rows, slices), dtype=torch.int32, device=logits.device)
    sizes = (vocab_size, logits.stride(0), _WORDS)
    _top_kernel[grid](logits, words, *sizes, SLICE=SLICE, num_warps=_WARPS)
    for stage in range(_STAGES):
        _histogram_kernel[grid](
            logits, words, temperature, top_k, top_p, stage, *sizes,
            SLICE=SLICE, BLOCK=BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    _ties_kernel[grid](
        logits, words, slice_ties, temperature, top_k, top_p, *sizes, SLICE=SLICE, num_warps=_WARPS
    )
    _draw_kernel[grid](
        logits, words, slice_ties, temperature, min_p, seed, position, *sizes,
        SLICE=SLICE, SLICES=triton.next_power_of_2(slices), num_warps=_WARPS,
    )  # fmt: skip
    _finish_kernel[(rows,)](
        words, out, state_rows, output_counts, _WORDS,
        0 if output_counts is None else output_counts.stride(0),
        COUNT=output_counts is not None, num_warps=1,
    )  # fmt: skip
