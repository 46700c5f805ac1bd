// Register tiles of the int8 and int4 kinds.
//
// The input rows are int8 with one float scale per group: a group's products add up exactly in
// int32 (integers.h), then join the float sum with both scales. The weight's offset needs no work
// per element: sum((w + 128) x) - 128 sum(x), and sum(scale q x + minimum x) = scale sum(q x) +
// minimum sum(x), where sum(x) belongs to the row. Every machine computes the same bits.
#pragma once

#include "integers.h"
#include "tiles.h"

namespace loom {

// An encoded int8 row: K bytes, then one GroupOfRow per group.
struct GroupOfRow {
  float scale;
  float scaled_sum;  // scale * sum of the group's bytes
  int32_t offset;    // -128 * that sum: what the weights' offset of 128 adds too much
  int32_t reserved;
};

template <int kind>
struct Group {
  static constexpr int k_per_line = kind == LOOM_KIND_INT8 ? 4 : 8;
  static constexpr int quads = k_per_line / 4;
  static constexpr int lines = kGroup / k_per_line;
  static constexpr int scale_bytes = kind == LOOM_KIND_INT8 ? 32 : 64;
};

// sum += (int32 sum of a group) scaled; `scales` is the group's entry of the panel.
template <int kind>
inline F16 add_group(F16 sum, F16 group, const char* scales, float row_scale, float row_sum) {
  F16 scale = load_half((const half*)scales);
  sum = fma(group, scale * splat(row_scale), sum);
  if (kind == LOOM_KIND_INT4) {
    sum = fma(load_half((const half*)scales + kPanel), splat(row_sum), sum);
  }
  return sum;
}

// Rows whose integer sums fit the registers, beside float sums where there are 32 registers.
#if defined(LOOM_ZMM) && defined(__AVX512VNNI__)
constexpr int kQuantizedRowTile = 6;
#else
constexpr int kQuantizedRowTile = 4;
#endif

template <int kind, int R, int P>
void tile_quantized_panels(const Tile& t) {
  using G = Group<kind>;
  int64_t groups = t.steps / G::lines;
  const char* next[2] = {t.prefetch0 ? t.prefetch0 : t.panel0,
                         t.prefetch1 ? t.prefetch1 : t.panel1};
  Accumulators<R, P> acc;
  acc.start(t);
  for (int64_t g = 0; g < groups; g++) {
    const GroupOfRow* of_row[R];
    GroupSum<kind> sums[R][P];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      of_row[r] = (const GroupOfRow*)(t.x + r * t.x_stride + groups * kGroup) + g;
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) sums[r][p].start(of_row[r]->offset);
    }
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) prefetch(next[p] + 64 * t.steps + g * G::scale_bytes);
    // Unrolled: in a loop GCC copies every sum twice around its product.
#pragma GCC unroll 8
    for (int i = 0; i < G::lines; i++) {
      int64_t s = g * G::lines + i;
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) prefetch(next[p] + 64 * s);
#pragma GCC unroll 2
      for (int q = 0; q < G::quads; q++) {
        Bytes w[P];
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) w[p] = weights_of<kind>(panel_of<P>(t, p) + 64 * s, q);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          Quad x(t.x + r * t.x_stride + s * G::k_per_line + 4 * q);
#pragma GCC unroll 2
          for (int p = 0; p < P; p++) sums[r][p].add(w[p], x);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      float scale = of_row[r]->scale, row_sum = of_row[r]->scaled_sum;
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        const char* scales = panel_of<P>(t, p) + 64 * t.steps + g * G::scale_bytes;
        acc.a[r][p] = add_group<kind>(acc.a[r][p], sums[r][p].value(), scales, scale, row_sum);
      }
    }
  }
  acc.finish(t);
}

template <int kind, int R>
void tile_quantized(const Tile& t) {
#if defined(LOOM_ZMM) && defined(__AVX512VNNI__)
  tile_quantized_panels<kind, R, 2>(t);
#else
  if constexpr (R <= 2) {
    tile_quantized_panels<kind, R, 2>(t);
  } else {
    one_by_one(t, tile_quantized_panels<kind, R, 1>);
  }
#endif
}

}  // namespace loom
