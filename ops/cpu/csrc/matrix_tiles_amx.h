// Tiles by AMX (Intel's servers since Sapphire Rapids): sixteen rows by sixteen outputs by 32 k of
// bfloat16 in one instruction.
//
// Sixteen lines of a bfloat16 panel are a tile of weights as they lie in memory, and sixteen encoded
// rows one of inputs. Eight tile registers hold the sums of up to 32 rows by a pair of panels, and
// what they are made of. Fewer rows are shorter tiles, and the order of a row's sums is the same in
// them: `tdpbf16ps` adds up the even and the odd k of a step apart, both of them to the sum.
// It takes subnormal numbers for zeros, and gives zeros instead of them.
#pragma once

#include "amx.h"
#include "tiles.h"

namespace loom {

constexpr int kAmxRowTile = 2 * kAmxRows;
constexpr int kAmxLines = 16;  // of a panel, in a step

// Lines s .. s + 15 of two panels; the tiles as `use_amx_tiles` has them.
template <bool below>
inline void multiply_amx(const Tile& t, int64_t s) {
  const char* x = t.x + 4 * s;
  _tile_loadd(4, x, t.x_stride);
  _tile_loadd(6, t.panel0 + 64 * s, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, t.panel1 + 64 * s, 64);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (below) {
    _tile_loadd(5, x + kAmxRows * t.x_stride, t.x_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <int rows>
void tile_bf16_by_amx(const Tile& t) {
  constexpr bool below = rows > kAmxRows;
  use_amx_tiles(below ? kAmxRows : rows, below ? rows - kAmxRows : 0, kAmxLines);
  int64_t stride = t.out_stride * int64_t(sizeof(float));
  float* lower = t.out + kAmxRows * t.out_stride;
  asm volatile("" : : : "memory");  // GCC does not know that loading a tile reads
  if (t.accumulate) {
    _tile_loadd(0, t.out, stride);
    _tile_loadd(1, t.out + kPanel, stride);
    if constexpr (below) {
      _tile_loadd(2, lower, stride);
      _tile_loadd(3, lower + kPanel, stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (below) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t s = 0; s < t.steps; s += kAmxLines) {
    for (int i = 0; i < kAmxLines; i++) {
      if (t.prefetch0) prefetch(t.prefetch0 + 64 * (s + i));
      if (t.prefetch1) prefetch(t.prefetch1 + 64 * (s + i));
    }
    multiply_amx<below>(t, s);
  }
  _tile_stored(0, t.out, stride);
  _tile_stored(1, t.out + kPanel, stride);
  if constexpr (below) {
    _tile_stored(2, lower, stride);
    _tile_stored(3, lower + kPanel, stride);
  }
}

}  // namespace loom
