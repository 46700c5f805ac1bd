// Keys and values in a byte each: codes with a scale for each token and head; see ops/kv_codes.py.
//
// Both kinds of codes are exact in bfloat16 (at most 8 significant bits), so attention takes the
// codes for keys and values and the scales into scores and softmax weights.
#pragma once

#include <algorithm>
#include <type_traits>

#include "api.h"
#include "rows.h"
#include "simd.h"

namespace loom {

struct fp8 {
  uint8_t bits;  // e4m3 without infinities: sign, 4 bits of exponent (bias 7), 3 of mantissa
};

template <class T>
constexpr bool is_code = std::is_same_v<T, int8_t> || std::is_same_v<T, fp8>;

template <class Code>
constexpr float kLargestCode = std::is_same_v<Code, int8_t> ? 127.0f : 448.0f;

// Sixteen codes as floats.
inline F16 load(const int8_t* p) { return load_int8(p); }

inline F16 load(const fp8* p) { return load_e4m3(p) * splat(256.0f); }

// The nearest code to x, which lies within the codes.
inline void to_code(float x, int8_t* out) { *out = int8_t(std::nearbyint(x)); }
inline void to_code(float x, fp8* out) {
  uint32_t bits, of_sum;
  memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 24 & 0x80;
  bits &= 0x7fffffff;
  uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  // Below 2^-6 the codes are multiples of 2^-9, which is the step of floats at 2^14.
  float sum = std::fabs(x) + 16384.0f;
  memcpy(&of_sum, &sum, 4);
  uint32_t subnormal = of_sum - 0x46800000;
  out->bits = uint8_t(sign | (bits < 0x3c800000 ? subnormal : normal));
}

// x [dim] as codes and their scale; a NaN or an infinity in x makes the scale NaN.
template <class T, class Code>
void encode(const T* x, int64_t dim, Code* out, float* scale) {
  F16 peak = splat(0.0f), spoilt = splat(0.0f);
  for (int64_t d = 0; d < dim; d += kLanes) {
    F16 a = load_n(x + d, int(std::min<int64_t>(kLanes, dim - d)));
    peak = max(peak, abs(a));
    spoilt = fma(a, splat(0.0f), spoilt);
  }
  constexpr float largest = kLargestCode<Code>;
  *scale = hmax(peak) / largest + sum(spoilt);
  F16 divisor = splat(*scale > 0.0f ? *scale : 1.0f);
  for (int64_t d = 0; d < dim; d += kLanes) {
    int n = int(std::min<int64_t>(kLanes, dim - d));
    float scaled[kLanes];
    // In this order a NaN becomes a number.
    store(scaled, max(splat(-largest), min(load_n(x + d, n) / divisor, splat(largest))));
    for (int i = 0; i < n; i++) to_code(scaled[i], out + d + i);
  }
}

// Codes [dim] as floats or bfloat16, exactly.
template <class Code, class X>
void widen_codes(const Code* codes, int64_t dim, X* out) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(out + d, load(codes + d));
  if (d == dim) return;
  Code rest[kLanes] = {};
  memcpy(rest, codes + d, size_t(dim - d));
  store_n(out + d, load(rest), int(dim - d));
}

// Calls body with a null pointer of what a pool of this LoomType holds.
template <class Body>
void with_pool_type(int64_t type, Body&& body) {
  switch (type) {
    case LOOM_F32: return body((float*)nullptr);
    case LOOM_BF16: return body((bf16*)nullptr);
    case LOOM_INT8: return body((int8_t*)nullptr);
    default: body((fp8*)nullptr);
  }
}

// A token's heads [heads, dim] to their slot of a pool [slots, heads, dim]; scales [slots, heads]
// where the pool holds codes.
template <class T>
void store_token(const T* x, int64_t head_stride, int64_t heads, int64_t dim, int64_t pool_type,
                 void* pool, float* scales, int64_t slot) {
  with_pool_type(pool_type, [&](auto* p) {
    using S = std::remove_pointer_t<decltype(p)>;
    for (int64_t h = 0; h < heads; h++) {
      int64_t at = slot * heads + h;
      if constexpr (is_code<S>) {
        encode(x + h * head_stride, dim, (S*)pool + at * dim, scales + at);
      } else {
        copy_row(x + h * head_stride, dim, (S*)pool + at * dim);
      }
    }
  });
}

}  // namespace loom
