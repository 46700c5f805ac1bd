// Operations on one row: norms, rotary positions, and copies between storage types.
#pragma once

#include <algorithm>

#include "simd.h"

namespace loom {

// Factor that brings the root mean square of x [dim] to 1.
template <class T>
float inverse_rms(const T* x, int64_t dim, float eps) {
  F16 squares = splat(0.0f);
  for (int64_t d = 0; d < dim; d += kLanes) {
    F16 a = load_n(x + d, int(std::min<int64_t>(kLanes, dim - d)));
    squares = fma(a, a, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / float(dim) + eps);
}

// out = x / rms(x) * weight; the normalised value is rounded to the weight's type before the
// product, as the published code of Llama (weights of x's type) and of Gemma (float) does.
template <class T, class W>
void rms_norm_row(const T* x, const W* weight, int64_t dim, float eps, T* out) {
  F16 factor = splat(inverse_rms(x, dim, eps));
  for (int64_t d = 0; d < dim; d += kLanes) {
    int n = int(std::min<int64_t>(kLanes, dim - d));
    W rounded[kLanes];
    store(rounded, load_n(x + d, n) * factor);
    store_n(out + d, load(rounded) * load_n(weight + d, n), n);
  }
}

// y += x, rounded to T.
template <class T>
void add_row(const T* x, int64_t dim, T* y) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    int n = int(std::min<int64_t>(kLanes, dim - d));
    store_n(y + d, load_n(y + d, n) + load_n(x + d, n), n);
  }
}

// y = x between storage types.
template <class From, class To>
void copy_row(const From* x, int64_t dim, To* y) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    int n = int(std::min<int64_t>(kLanes, dim - d));
    store_n(y + d, load_n(x + d, n), n);
  }
}

// Turns the first `rotary_dim` dimensions of a head by the angles of one position; `rope` holds
// rotary_dim / 2 cosines, then as many sines. Pairs are (i, i + rotary_dim / 2), or (2 i, 2 i + 1)
// when interleaved.
template <class T>
void rotate_head(T* x, const float* rope, int64_t rotary_dim, bool interleaved) {
  int64_t half_dim = rotary_dim / 2;
  if (interleaved) {
    for (int64_t i = 0; i < half_dim; i++) {
      float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
      float c = rope[i], s = rope[half_dim + i];
      narrow(a * c - b * s, x + 2 * i);
      narrow(b * c + a * s, x + 2 * i + 1);
    }
    return;
  }
  for (int64_t i = 0; i < half_dim; i += kLanes) {
    int n = int(std::min<int64_t>(kLanes, half_dim - i));
    F16 a = load_n(x + i, n), b = load_n(x + half_dim + i, n);
    F16 c = load_n(rope + i, n), s = load_n(rope + half_dim + i, n);
    store_n(x + i, a * c - b * s, n);
    store_n(x + half_dim + i, b * c + a * s, n);
  }
}

}  // namespace loom
