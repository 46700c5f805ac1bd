// Weights whose codes stand for floats: number(code) * scale, rounded once to float32, is what the
// reference computes, so a layer's sums have the bits of one with float32 weights.
//
// A panel lists its K in order; a line of 64 bytes is
//   fp8   4 k: sixteen bytes (e4m3) of each k
//   nf4   8 k: sixteen words, one for each output, of eight codes from the lowest bits on
// Behind all lines follow 16 float scales per span of k, and for nf4 the numbers of its 16 codes.
#pragma once

#include "forms.h"
#include "tiles.h"

namespace loom {

// The numbers of one panel, sixteen at a time.
template <int kind>
class CodedFloats {
 public:
  static constexpr FloatCodes form = float_codes_of(kind);

  CodedFloats(const char* panel, int64_t lines)
      : panel_(panel), scales_((const float*)(panel + 64 * lines)) {
    int64_t spans = (lines + form.lines() - 1) / form.lines();
    if constexpr (kind == LOOM_KIND_NF4) table_ = load_table(scales_ + kPanel * spans);
  }

  void begin_span(int64_t span) {
    scale_ = load(scales_ + kPanel * span);
    // A power of two more for what load_e4m3 leaves out: exact.
    if constexpr (kind == LOOM_KIND_FP8) scale_ = scale_ * splat(256.0f);
  }

  // Those of k i of a line, which lies in the span that was begun.
  template <int i>
  F16 weights(int64_t line) const {
    const char* at = panel_ + 64 * line;
    if constexpr (kind == LOOM_KIND_FP8) return load_e4m3(at + kPanel * i) * scale_;
    return look_up<i>(table_, at) * scale_;
  }

 private:
  const char* panel_;
  const float* scales_;
  F16 scale_ = splat(0.0f);
  FloatTable table_ = {};
};

// x float, panels of coded floats.
template <int kind, int R, int P>
void tile_coded_floats(const Tile& t) {
  constexpr FloatCodes form = float_codes_of(kind);
  const char* next[2] = {t.prefetch0 ? t.prefetch0 : t.panel0,
                         t.prefetch1 ? t.prefetch1 : t.panel1};
  CodedFloats<kind> panels[2] = {{t.panel0, t.steps}, {t.panel1, t.steps}};
  Accumulators<R, P> acc;
  acc.start(t);
  for (int64_t first = 0; first < t.steps; first += form.lines()) {
    int64_t span = first / form.lines(), last = std::min(first + form.lines(), t.steps);
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) {
      prefetch(next[p] + 64 * (t.steps + span));
      panels[p].begin_span(span);
    }
    for (int64_t s = first; s < last; s++) {
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) prefetch(next[p] + 64 * s);
      unrolled<form.line_k()>([&](auto i) __attribute__((always_inline)) {
        constexpr int k = decltype(i)::value;
        F16 w[P];
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) w[p] = panels[p].template weights<k>(s);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          F16 x = splat(((const float*)(t.x + r * t.x_stride))[form.line_k() * s + k]);
#pragma GCC unroll 2
          for (int p = 0; p < P; p++) acc.a[r][p] = fma(x, w[p], acc.a[r][p]);
        }
      });
    }
  }
  acc.finish(t);
}

// Lines first .. last - 1 of a panel of so many, as float32 ones; `ahead` null or a panel to fetch
// meanwhile.
template <int kind>
void widen_coded_floats(const char* panel, const char* ahead, int64_t lines, int64_t first,
                        int64_t last, float* out) {
  constexpr FloatCodes form = float_codes_of(kind);
  CodedFloats<kind> numbers(panel, lines);
  for (int64_t s = first; s < last; s++) {
    if (s == first || s % form.lines() == 0) numbers.begin_span(s / form.lines());
    if (ahead) prefetch(ahead + 64 * s);
    unrolled<form.line_k()>([&](auto i) __attribute__((always_inline)) {
      store(out, numbers.template weights<decltype(i)::value>(s));
      out += kPanel;
    });
  }
}

}  // namespace loom
