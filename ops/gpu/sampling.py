"""One token per row, drawn on the device; the order of operations is `ops.reference.sample`'s.

Decisions:

- Nothing is sorted. top-k and top-p keep a prefix of the order (logit descending, id ascending), so
  each is a threshold: the largest sort key whose upper tail holds k tokens, or the wanted
  probability. The key is found two bits at a time from the top, sixteen passes over a row, with
  three candidates compared in each. A row of 152k float32 logits is 600 KB: a few rows stay in L2
  between passes, a full batch of 256 (156 MB) does not, and each pass then reads device memory.
  Tokens equal to the threshold are kept in the order of their ids until the number is reached.
- One program does a whole row, so a row's result depends on that row alone, and no pass needs
  another launch.
- Philox numbers come in fours, one block for the tokens 4g .. 4g + 3. A tile therefore holds
  groups, and its four members are read in turn. Tiles without a token that is left draw none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.gpu.library import register, step_kernel

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
def _sort_key(x):
    """float32 to uint32 in the same order; -0.0 and 0.0 are one key."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    # Not ~bits: before Triton 3.9 the interpreter cannot invert an unsigned number.
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _scaled(row_logits, token, live, temperature, BLOCK: tl.constexpr):
    """logit / temperature, correctly rounded, since the quotients' order decides."""
    x = tl.load(row_logits + token, mask=live, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, temperature + tl.zeros([BLOCK], tl.float32))


@triton.jit
def _tail_key(
    row_logits, vocab_size, temperature, top, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key such that the tokens at or above it weigh at least `wanted`, and the weight
    strictly above it. A token weighs exp(x - top) if BY_MASS, else 1."""
    key = tl.zeros([], tl.uint32)
    above = 0.0
    for digit in range(16):
        shift = 30 - 2 * digit
        step = tl.full([], 1, tl.uint32) << shift
        one = key + step
        two = one + step
        three = two + step
        tail_1 = tl.zeros([BLOCK], tl.float32)
        tail_2 = tl.zeros([BLOCK], tl.float32)
        tail_3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            live = token < vocab_size
            x = _scaled(row_logits, token, live, temperature, BLOCK)
            weight = tl.exp(x - top) if BY_MASS else live.to(tl.float32)
            keys = _sort_key(x)
            tail_1 += tl.where(keys >= one, weight, 0.0)
            tail_2 += tl.where(keys >= two, weight, 0.0)
            tail_3 += tl.where(keys >= three, weight, 0.0)
        sum_1 = tl.sum(tail_1, 0)
        sum_2 = tl.sum(tail_2, 0)
        sum_3 = tl.sum(tail_3, 0)
        # The digit is the last candidate whose tail is heavy enough; the next one's tail is what
        # lies above the digit's interval.
        if sum_3 >= wanted:
            key = three
        elif sum_2 >= wanted:
            key = two
            above = sum_3
        elif sum_1 >= wanted:
            key = one
            above = sum_2
        else:
            above = sum_1
    return key, above


@triton.jit
def _mass(row_logits, vocab_size, temperature, top, BLOCK: tl.constexpr):
    """Sum of exp(x - top) over the row."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = _scaled(row_logits, token, token < vocab_size, temperature, BLOCK)
        total += tl.exp(x - top)
    return tl.sum(total, 0)


@triton.jit
def _key_value(key):
    """The float32 of a sort key."""
    bits = tl.where(key >> 31 != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _threshold(row_logits, vocab_size, temperature, top, top_k, top_p, BLOCK: tl.constexpr):
    """What top-k and top-p keep: all tokens above a key, and the first `ties` of those equal."""
    key = tl.zeros([], tl.uint32)
    ties = vocab_size
    limited = (top_k > 0) & (top_k < vocab_size)
    if limited:
        key, above = _tail_key(
            row_logits, vocab_size, temperature, top, top_k.to(tl.float32), False, BLOCK
        )
        ties = top_k - above.to(tl.int32)
    if top_p < 1.0:
        if limited:
            # Mass of what top-k left: the tail above its key, and the ties it keeps.
            total = ties.to(tl.float32) * tl.exp(_key_value(key) - top)
            for start in range(0, vocab_size, BLOCK):
                token = start + tl.arange(0, BLOCK)
                x = _scaled(row_logits, token, token < vocab_size, temperature, BLOCK)
                total += tl.sum(tl.where(_sort_key(x) > key, tl.exp(x - top), 0.0), 0)
        else:
            total = _mass(row_logits, vocab_size, temperature, top, BLOCK)
        # At least the first token is kept, also at top_p 0.
        wanted = tl.maximum(top_p * total, 1e-30)
        p_key, p_above = _tail_key(row_logits, vocab_size, temperature, top, wanted, True, BLOCK)
        if p_key >= key:
            # Tie j (from 0) is kept while the mass before it is less than what is wanted.
            each = tl.maximum(tl.exp(_key_value(p_key) - top), 1e-37)
            # A quotient past int32 means all of them.
            count = tl.minimum(tl.ceil((wanted - p_above) / each), 1e9)
            p_ties = tl.maximum(count.to(tl.int32), 1)
            ties = tl.where(p_key > key, p_ties, tl.minimum(ties, p_ties))
            key = p_key
    return key, ties


@triton.jit
def _gumbel(bits):
    """-log(-log(u)) for u = (b + 0.5) / 2**23, b the upper 23 bits of a random word."""
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


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
def _kept_of_tile(
    row_logits, vocab_size, temperature, key, ties, seen_ties, start, BLOCK: tl.constexpr
):
    """Whether the tile holds a token at or above the key, the id before which its ties are kept,
    and the number of ties up to the tile's end."""
    token = start + tl.arange(0, BLOCK)
    keys = _sort_key(_scaled(row_logits, token, token < vocab_size, temperature, BLOCK))
    equal = ((keys == key) & (token < vocab_size)).to(tl.int32)
    end_ties = seen_ties + tl.sum(equal, 0)
    tie_end = vocab_size
    if end_ties > ties:
        tie_end = start + tl.sum((seen_ties + tl.cumsum(equal, 0) <= ties).to(tl.int32), 0)
    return tl.max((keys >= key).to(tl.int32), 0) > 0, tie_end, end_ties


@triton.jit
def _draw(
    row_logits, vocab_size, temperature, top, min_p, key, ties, seed, position, fallback,
    FILTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Token of the largest x + Gumbel noise among those kept by key, ties and min_p."""
    GROUPS: tl.constexpr = BLOCK // 4
    best = tl.full([GROUPS], float("-inf"), tl.float32)
    best_token = tl.full([GROUPS], 0x7FFFFFFF, tl.int32)
    zero = tl.zeros([GROUPS], tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32) + zero
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero
    any_left = vocab_size > 0
    tie_end = vocab_size
    seen_ties = 0
    for start in range(0, vocab_size, BLOCK):
        if FILTER:
            any_left, tie_end, seen_ties = _kept_of_tile(
                row_logits, vocab_size, temperature, key, ties, seen_ties, start, BLOCK
            )
        if any_left:
            group = start // 4 + tl.arange(0, GROUPS)
            words = tl.philox(seed, group.to(tl.uint32), low, high, zero, 10)
            for member in tl.static_range(4):
                token = group * 4 + member
                live = token < vocab_size
                x = _scaled(row_logits, token, live, temperature, GROUPS)
                if FILTER:
                    keys = _sort_key(x)
                    live &= (keys > key) | ((keys == key) & (token < tie_end))
                    live &= tl.exp(x - top) >= min_p
                noisy = tl.where(live, x + _gumbel(words[member]), float("-inf"))
                best, best_token = _better(best, best_token, noisy, token)
    largest, chosen = _best_of(best, best_token)
    # Nothing is left only where a logit is +inf, whose probability is no number.
    return tl.where(largest == float("-inf"), fallback, chosen)


@step_kernel("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions", "state_rows")
def _sample_kernel(
    logits, out, temperatures, top_ks, top_ps, min_ps, seeds, positions,
    state_rows, output_counts, vocab_size, stride, count_stride,
    GREEDY: tl.constexpr, FILTER: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row from adjusted logits to its token, or -1. Grid (B,)."""
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
            top = tl.div_rn(top, temperature)
            key = tl.zeros([], tl.uint32)
            ties = vocab_size
            min_p = 0.0
            if FILTER:
                min_p = tl.load(min_ps + row)
                key, ties = _threshold(
                    row_logits, vocab_size, temperature, top,
                    tl.load(top_ks + row), tl.load(top_ps + row), BLOCK,
                )  # fmt: skip
            chosen = _draw(
                row_logits, vocab_size, temperature, top, min_p, key, ties,
                tl.load(seeds + row), tl.load(positions + row), chosen, FILTER, BLOCK,
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
    if rows:
        _sample_kernel[(rows,)](
            logits, out, temperature, top_k, top_p, min_p, seed, position,
            state_rows, output_counts, vocab_size, logits.stride(0),
            output_counts.stride(0) if output_counts is not None else 0,
            GREEDY=greedy, FILTER=filtered, COUNT=output_counts is not None,
            BLOCK=_block(vocab_size),
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

    Never waits for the device. Grid: (B,) for the draw, (B, cdiv(V, 4096)) for penalties and masks.
    Numerics: fp32; masses of top-p are fp32 sums. Reference: ops.reference.sample.
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
        s.all_greedy, s.any_filter,
    )  # fmt: skip
    return out
