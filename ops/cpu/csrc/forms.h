// What the quantized kinds of weights are made of. A weight is
//
//   factor * scale * (code - offset) + minimum factor * minimum
//
// where scale and minimum are small integers, or left out, and the factors half floats. The kinds
// from LOOM_KIND_Q2_K on hold the numbers of the blocks of GGUF files as they are, the ZERO kinds
// those of groups with integer zeros: their minimum is the zero (of INT8_ZERO less 128, as its
// codes) and their minimum factor -factor.
//
// A panel has, for each 32 k of its 16 outputs, the codes in planes of 4, 2 and 1 bits (5 bits are
// a plane of 4 and one of 1): a plane's line of 64 bytes is 16 words, one for each output, and the
// four codes of a quad stand in the four bytes of a word, quad after quad from the lowest bits on.
// Behind all codes follow the scales, as `Scaling` says.
#pragma once

#include <algorithm>
#include <cstdint>

#include "api.h"

namespace loom {

enum class Scaling {
  kHalf,               // per 32 k: 16 half factors
  kHalfAndMinimum,     // per 32 k: 16 half factors, 16 half minima
  kHalfAndZero,        // per 32 k: 16 half factors, 16 int8 zeros
  kIntegers,           // per 256 k: 16 half factors; then per stretch 16 int8 scales
  kIntegersAndMinima,  // per 256 k: 16 half factors, 16 half minimum factors; then per stretch 16
                       // int8 scales, 16 int8 minima
};

// What the codes of the IQ4 kinds stand for (ggml's kvalues_iq4nl).
inline constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                    1,    13,   25,  38,  53,  69,  89,  113};
// Twice the numbers of MXFP4's codes, so that all are integers; half a block's power of two is its
// factor.
inline constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// What codes stand for, where not for themselves.
enum class Table { kNone, kIq4, kTwiceE2m1 };

constexpr const int8_t* numbers_of(Table table) {
  return table == Table::kIq4 ? kIq4 : kTwiceE2m1;
}

struct CodeForm {
  int bits;
  int stretch;  // k that share a scale
  Scaling scaling;
  int offset = 0;
  Table table = Table::kNone;

  constexpr bool of_table() const { return table != Table::kNone; }
  constexpr bool in_bytes() const { return bits == 8; }
  constexpr bool is_signed() const { return in_bytes() || of_table(); }
  // The largest magnitude of what products are made with, of codes that are no bytes.
  constexpr int largest() const {
    if (!of_table()) return (1 << bits) - 1;
    int most = 0;
    for (int i = 0; i < 1 << bits; i++) {
      int number = numbers_of(table)[i];
      most = std::max(most, number < 0 ? -number : number);
    }
    return most;
  }
  constexpr bool has_minimum() const { return has_zero() || has_minimum_factor(); }
  constexpr bool has_minimum_factor() const {
    return scaling == Scaling::kHalfAndMinimum || scaling == Scaling::kIntegersAndMinima;
  }
  constexpr bool has_zero() const { return scaling == Scaling::kHalfAndZero; }
  constexpr bool has_scales() const {
    return scaling == Scaling::kIntegers || scaling == Scaling::kIntegersAndMinima;
  }
  constexpr bool has_minima() const { return has_zero() || scaling == Scaling::kIntegersAndMinima; }
  // k that share a factor, and the bytes of their scales.
  constexpr int span() const { return has_scales() ? 256 : 32; }
  constexpr int factor_bytes() const { return has_minimum_factor() ? 64 : 32; }
  constexpr int minima_at() const { return has_scales() ? 16 : 0; }  // behind a stretch's scales
  constexpr int integer_bytes() const { return minima_at() + (has_minima() ? 16 : 0); }
  constexpr int span_bytes() const {
    return factor_bytes() + span() / stretch * integer_bytes();
  }
  constexpr int group_scale_bytes() const { return span_bytes() / (span() / 32); }  // on average
  constexpr int lines() const { return bits; }  // per 32 k
};

constexpr CodeForm form_of(int kind) {
  switch (kind) {
    case LOOM_KIND_INT8: return {8, 32, Scaling::kHalf};
    case LOOM_KIND_INT4: return {4, 32, Scaling::kHalfAndMinimum};
    case LOOM_KIND_Q5_1: return {5, 32, Scaling::kHalfAndMinimum};
    case LOOM_KIND_Q2_K: return {2, 16, Scaling::kIntegersAndMinima};
    case LOOM_KIND_Q3_K: return {3, 16, Scaling::kIntegers, 4};
    case LOOM_KIND_Q4_K: return {4, 32, Scaling::kIntegersAndMinima};
    case LOOM_KIND_Q5_K: return {5, 32, Scaling::kIntegersAndMinima};
    case LOOM_KIND_Q6_K: return {6, 16, Scaling::kIntegers, 32};
    case LOOM_KIND_IQ4_NL: return {4, 32, Scaling::kHalf, 0, Table::kIq4};
    case LOOM_KIND_IQ4_XS: return {4, 32, Scaling::kIntegers, 0, Table::kIq4};
    case LOOM_KIND_MXFP4: return {4, 32, Scaling::kHalf, 0, Table::kTwiceE2m1};
    case LOOM_KIND_INT4_ZERO: return {4, 32, Scaling::kHalfAndZero};
    case LOOM_KIND_INT8_ZERO: return {8, 32, Scaling::kHalfAndZero};
    default: return {};
  }
}

constexpr bool is_quantized(int kind) { return kind >= LOOM_KIND_INT8 && kind < LOOM_KIND_FP8; }

// Codes of floats; see coded_floats.h.
struct FloatCodes {
  int bits;
  int span;  // k that share a scale

  constexpr int line_k() const { return 32 / bits; }
  constexpr int lines() const { return span / line_k(); }  // of a span
};

constexpr FloatCodes float_codes_of(int kind) {
  return kind == LOOM_KIND_FP8 ? FloatCodes{8, 128} : FloatCodes{4, 64};
}

constexpr bool is_of_floats(int kind) { return kind >= LOOM_KIND_FP8; }

}  // namespace loom
