// Register tiles of the quantized kinds.
//
// The input rows are int8 with one float scale per group of 32: the products of a stretch that
// shares a scale add up exactly in int32 (integers.h), then join the float sum with both scales. An
// offset of the codes needs no work per element: sum((w + offset) x) - offset sum(x), and
// sum(scale q x + minimum x) = scale sum(q x) + minimum sum(x), where sum(x) belongs to the row.
// Every machine computes the same bits.
#pragma once

#include "integers.h"
#include "tiles.h"

namespace loom {

// An encoded int8 row: K bytes, then one GroupOfRow per group.
struct GroupOfRow {
  float scale;
  float scaled_sum;  // scale * sum of the group's bytes
  int32_t start;     // -kSignedOffset * that sum
  int16_t sums[2];   // of the bytes of each half
};

// Scale and minimum of sixteen outputs for one stretch of k: factors times integers, which is exact
// in float32.
template <int kind>
struct Scales {
  static constexpr CodeForm form = form_of(kind);
  F16 scale, minimum;

  // Stretch `part` of group `g` in the scales of a panel.
  Scales(const char* scales, int64_t g, int part) {
    constexpr int groups = form.span() / kGroup, parts = kGroup / form.stretch;
    const char* span = scales + g / groups * form.span_bytes();
    scale = load_half((const half*)span);
    if constexpr (form.has_minimum_factor()) minimum = load_half((const half*)span + kPanel);
    if constexpr (form.has_zero()) minimum = splat(0.0f) - scale;
    int64_t at = (g % groups * parts + part) * form.integer_bytes();
    auto* integers = (const int8_t*)span + form.factor_bytes() + at;
    if constexpr (form.has_scales()) scale = scale * load_int8(integers);
    if constexpr (form.has_minima()) minimum = minimum * load_int8(integers + form.minima_at());
  }
};

// sum += the integer sum of stretch `part` of a group, scaled.
template <int kind>
inline F16 add_stretch(F16 sum, F16 stretch, const Scales<kind>& of_panel, const GroupOfRow& of_row,
                       int part) {
  constexpr CodeForm form = form_of(kind);
  sum = fma(stretch, of_panel.scale * splat(of_row.scale), sum);
  if constexpr (form.has_minimum()) {
    bool whole = form.stretch == kGroup;
    float row_sum = whole ? of_row.scaled_sum : of_row.scale * float(of_row.sums[part]);
    sum = fma(of_panel.minimum, splat(row_sum), sum);
  }
  return sum;
}

// What the integer sum of a stretch starts from.
template <int kind>
inline int32_t start_of(const GroupOfRow& of_row, int part) {
  constexpr CodeForm form = form_of(kind);
  static_assert(form.stretch < kGroup || form.offset == 0);
  if (form.stretch < kGroup) return -stored_offset<kind> * of_row.sums[part];
  return form.is_signed() ? of_row.start : 0;
}

// Rows whose integer sums fit the registers, beside float sums where there are 32 registers.
#if defined(LOOM_ZMM) && defined(__AVX512VNNI__)
constexpr int kQuantizedRowTile = 6;
#else
constexpr int kQuantizedRowTile = 4;
#endif

template <int kind, int R, int P>
void tile_quantized_panels(const Tile& t) {
  constexpr CodeForm form = form_of(kind);
  constexpr int lines = form.lines(), parts = kGroup / form.stretch, quads = form.stretch / 4;
  constexpr int scale_bytes = form.group_scale_bytes();
  int64_t groups = t.steps / lines;
  const char* next[2] = {t.prefetch0 ? t.prefetch0 : t.panel0,
                         t.prefetch1 ? t.prefetch1 : t.panel1};
  Accumulators<R, P> acc;
  acc.start(t);
  for (int64_t g = 0; g < groups; g++) {
    const GroupOfRow* of_row[R];
    const char* x[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      x[r] = t.x + r * t.x_stride + g * kGroup;
      of_row[r] = (const GroupOfRow*)(t.x + r * t.x_stride + groups * kGroup) + g;
    }
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) prefetch(next[p] + 64 * t.steps + g * scale_bytes);
    unrolled<parts>([&](auto part) __attribute__((always_inline)) {
      GroupSum<kind> sums[R][P];
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        int32_t start = start_of<kind>(*of_row[r], part);
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) sums[r][p].start(start);
      }
      // Unrolled: in a loop GCC copies every sum twice around its product.
      unrolled<quads>([&](auto i) __attribute__((always_inline)) {
        constexpr int quad = decltype(part)::value * quads + decltype(i)::value;
        Bytes w[P];
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) {
          if constexpr (quad < lines) prefetch(next[p] + 64 * (g * lines + quad));
          w[p] = codes_of<kind, quad>(panel_of<P>(t, p) + 64 * g * lines);
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          Quad of_x(x[r] + 4 * quad);
#pragma GCC unroll 2
          for (int p = 0; p < P; p++) sums[r][p].add(w[p], of_x);
        }
      });
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        Scales<kind> of_panel(panel_of<P>(t, p) + 64 * t.steps, g, part);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
          acc.a[r][p] = add_stretch<kind>(acc.a[r][p], sums[r][p].value(), of_panel, *of_row[r], part);
        }
      }
    });
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
