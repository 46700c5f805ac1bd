"""Keys and values in one byte each: codes, with a scale for each token and head.

A head's vector x [D] becomes codes c and one float32 scale s = max |x| / M, where c is x / s in the
type that the pool has: rounded to the nearest of -127 .. 127 (int8, M = 127), or to the nearest
value of e4m3 without infinities (fp8, M = 448; OCP 8-bit Floating Point Specification 1.0). What
is read back is c * s. A vector that holds a NaN or an infinity gets the scale NaN, so that it is
not mistaken for a number. A token's codes depend on its own key or value alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [..., D] of a type of `CODE_DTYPES`, and scales [...] float32, for x [..., D]."""
    wide = x.float()
    largest = LARGEST[dtype]
    peak = wide.abs().amax(-1)
    scales = torch.where(peak.isfinite(), peak / largest, torch.nan)
    divisor = torch.where(scales > 0, scales, 1.0)[..., None]
    scaled = (wide / divisor).nan_to_num(0.0).clamp(-largest, largest)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """[..., D] float32 for codes [..., D] and scales [...]."""
    return codes.float() * scales[..., None]


def scale_shapes(shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The shapes of the scales beside pools of these shapes behind [S], in the same order."""
    return tuple(shape[:-1] for shape in shapes)


def gather(pool: Tensor, scales: Tensor | None, slots: Tensor) -> Tensor:
    """Keys or values [N, HK, D] at slots [N]: as they are, or decoded to float32."""
    if scales is None:
        return pool.index_select(0, slots)
    # torch has no index_select of float8.
    codes = pool.view(torch.uint8).index_select(0, slots).view(pool.dtype)
    return decode(codes, scales.index_select(0, slots))


def scatter(x: Tensor, pool: Tensor, scales: Tensor | None, slots: Tensor) -> None:
    """In place pool[slots] = x [N, HK, D] in the pool's type, with scales where it has them."""
    if scales is None:
        pool.index_put_((slots,), x.to(pool.dtype))
        return
    codes, of_heads = encode(x, pool.dtype)
    pool.view(torch.uint8).index_put_((slots,), codes.view(torch.uint8))
    scales.index_put_((slots,), of_heads)
