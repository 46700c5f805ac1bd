// Many rows by panels of integers with AMX, to the bits of quantized_tiles.h.
//
// `tdpbssd` multiplies sixteen rows by sixteen outputs over what shares a scale, 16 or 32 k, and its
// int32 sums are as exact as everywhere. They leave the tiles by way of memory, where they are scaled
// and added to the float sums, in the same order and by the same operations. Codes, less their
// offset, and scales are unpacked once for all rows, a block of K at a time that the first cache
// holds.
#pragma once

#include "amx.h"
#include "quantized_tiles.h"

namespace loom {

constexpr int64_t kAmxBlockK = 512;
constexpr int64_t kAmxBlockRows = 128;  // whose float sums wait between blocks of K
// Fewer rows are no slower in vector registers, where a stretch's sums are scaled as they come.
constexpr int64_t kAmxFewestRows = 24;

// A block of a panel: codes as bytes, and by stretch the scales and minima of sixteen outputs.
struct AmxBlock {
  alignas(64) char codes[kAmxBlockK * kPanel];
  F16 scales[kAmxBlockK / 16], minima[kAmxBlockK / 16];
};

// Groups first .. first + count - 1 of `panel`, whose groups are `groups` in all; `ahead` null or a
// panel to fetch meanwhile.
template <int kind>
void unpack_block(const char* panel, const char* ahead, int64_t groups, int64_t first,
                  int64_t count, AmxBlock& out) {
  constexpr CodeForm form = form_of(kind);
  constexpr int lines = form.lines(), parts = kGroup / form.stretch;
  for (int64_t i = 0; i < count; i++) {
    int64_t g = first + i;
    if (ahead) {
      prefetch(ahead + 64 * lines * groups + g * form.group_scale_bytes());
      for (int line = 0; line < lines; line++) prefetch(ahead + 64 * (g * lines + line));
    }
    unrolled<kGroup / 4>([&](auto quad) __attribute__((always_inline)) {
      __m512i codes = codes_of<kind, decltype(quad)::value>(panel + 64 * g * lines).v;
      codes = _mm512_sub_epi8(codes, _mm512_set1_epi8(char(stored_offset<kind>)));
      _mm512_store_si512(out.codes + kPanel * (i * kGroup + 4 * quad), codes);
    });
    for (int part = 0; part < parts; part++) {
      Scales<kind> scales(panel + 64 * lines * groups, g, part);
      out.scales[i * parts + part] = scales.scale;
      if constexpr (form.has_minimum()) out.minima[i * parts + part] = scales.minimum;
    }
  }
}

// Up to 16 rows by a block of a panel.
struct AmxTile {
  const char* x;           // the rows' first byte of the block
  const GroupOfRow* of_x;  // the first row's first group of the block
  int64_t stride;          // bytes, of both
  const AmxBlock* block;
  int64_t groups;
  float* sums;
  int64_t sums_stride;  // elements
  bool accumulate;
};

// The int32 sums of a stretch, row by row.
using AmxSums = int32_t[kAmxRows][kPanel];

// The products over a stretch; of two that follow each other each has its own tiles.
inline void multiply_stretch(bool odd, const char* x, int64_t stride, const char* codes,
                             AmxSums& out) {
  if (odd) {
    _tile_zero(2);
    _tile_loadd(5, x, stride);
    _tile_loadd(7, codes, 64);
    _tile_dpbssd(2, 5, 7);
    _tile_stored(2, out, 64);
  } else {
    _tile_zero(0);
    _tile_loadd(4, x, stride);
    _tile_loadd(6, codes, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(0, out, 64);
  }
}

template <int kind>
void tile_integers_by_amx(int rows, const AmxTile& t) {
  constexpr CodeForm form = form_of(kind);
  constexpr int parts = kGroup / form.stretch;
  constexpr bool whole = form.stretch == kGroup;
  constexpr int lag = 2;  // stretches that are multiplied before the first of them is scaled
  use_amx_tiles(rows, rows, form.stretch / 4);
  asm volatile("" : : : "memory");  // GCC does not know that loading a tile reads
  // Together no more than 4 KiB: a load does not wait for a store whose address ends alike.
  alignas(4096) AmxSums products[2 * lag];
  if (rows < kAmxRows) memset(products, 0, sizeof(products));
  auto multiply = [&](int64_t i) __attribute__((always_inline)) {
    multiply_stretch(i % 2, t.x + i * form.stretch, t.stride,
                     t.block->codes + kPanel * i * form.stretch, products[i % (2 * lag)]);
  };
  F16 sums[kAmxRows];
  // Rows that are not there are scaled as the last one and not written.
  const char* of_rows[kAmxRows];
  for (int r = 0; r < kAmxRows; r++) {
    of_rows[r] = (const char*)t.of_x + std::min(r, rows - 1) * t.stride;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kAmxRows; r++) {
    sums[r] = t.accumulate && r < rows ? load(t.sums + r * t.sums_stride) : splat(0.0f);
  }
  int64_t stretches = t.groups * parts;
  for (int64_t i = 0; i < std::min<int64_t>(lag, stretches); i++) multiply(i);
  for (int64_t i = 0; i < stretches; i++) {
    if (i + lag < stretches) multiply(i + lag);
    const AmxSums& of = products[i % (2 * lag)];
    F16 scales = t.block->scales[i], minima;
    if constexpr (form.has_minimum()) minima = t.block->minima[i];
    int64_t group = i / parts * int64_t(sizeof(GroupOfRow));
#pragma GCC unroll 16
    for (int r = 0; r < kAmxRows; r++) {
      auto& of_row = *(const GroupOfRow*)(of_rows[r] + group);
      F16 sum = {_mm512_cvtepi32_ps(_mm512_load_si512(of[r]))};
      sums[r] = fma(sum, scales * splat(of_row.scale), sums[r]);
      if constexpr (form.has_minimum()) {
        float row_sum = whole ? of_row.scaled_sum : of_row.scale * float(of_row.sums[i % parts]);
        sums[r] = fma(minima, splat(row_sum), sums[r]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kAmxRows; r++) {
    if (r < rows) store(t.sums + r * t.sums_stride, sums[r]);
  }
}

}  // namespace loom
