"""Logits in their order, and the noise that makes the largest of them a draw: what the kernels that
choose a token share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sort_key(x):
    """float32 to uint32 in the same order; -0.0 and 0.0 are one key."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    # Not ~bits: before Triton 3.9 the interpreter cannot invert an unsigned number.
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def key_value(key):
    """The float32 of a sort key."""
    bits = tl.where(key >> 31 != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scaled(row_logits, token, live, temperature, BLOCK: tl.constexpr):
    """logit / temperature, correctly rounded, since the quotients' order decides."""
    x = tl.load(row_logits + token, mask=live, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, temperature + tl.zeros([BLOCK], tl.float32))


@triton.jit
def random_words(seed, position, group):
    """Four words for the tokens 4 * group .. 4 * group + 3 (`ops.reference.philox_uniform`)."""
    zero = tl.zeros_like(group).to(tl.uint32)
    low = (position & 0xFFFFFFFF).to(tl.uint32) + zero
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero
    return tl.philox(seed, group.to(tl.uint32), low, high, zero, 10)


@triton.jit
def gumbel(bits):
    """-log(-log(u)) for u = (b + 0.5) / 2**23, b the upper 23 bits of a random word."""
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))
