// Writing weights [n, k] into panels; see linear.h for the layout.
#include <algorithm>
#include <vector>

#include "linear.h"

namespace loom {

namespace {

// One output's weights as floats, padded with zeros.
struct Column {
  std::vector<float> w;
  explicit Column(int64_t k) : w(size_t(k), 0.0f) {}

  void read(const void* weight, int type, int64_t k, int64_t offset) {
    for (int64_t i = 0; i < k; i++) {
      w[size_t(i)] = type == LOOM_BF16 ? to_float(((const bf16*)weight)[offset + i])
                                       : ((const float*)weight)[offset + i];
    }
  }
};

half to_half(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
float from_half(half h) { return _cvtsh_ss(h); }

int nearest(float x, int lo, int hi) {
  return int(std::lrint(std::clamp(x, float(lo), float(hi))));
}

void pack_int8(const float* w, int64_t k, int lane, char* panel) {
  auto* scales = (half*)(panel + k * kPanel);
  for (int64_t g = 0; g < k / kGroup; g++) {
    const float* from = w + g * kGroup;
    float peak = 0.0f;
    for (int i = 0; i < kGroup; i++) peak = std::max(peak, std::fabs(from[i]));
    half stored = to_half(peak / 127.0f);
    float scale = from_half(stored), inverse = scale > 0 ? 1.0f / scale : 0.0f;
    scales[g * kPanel + lane] = stored;
    for (int i = 0; i < kGroup; i++) {
      int64_t at = g * kGroup + i;
      panel[at / 4 * 64 + lane * 4 + at % 4] = char(128 + nearest(from[i] * inverse, -127, 127));
    }
  }
}

void pack_int4(const float* w, int64_t k, int lane, char* panel) {
  auto* scales = (half*)(panel + k / 2 * kPanel);
  for (int64_t g = 0; g < k / kGroup; g++) {
    const float* from = w + g * kGroup;
    auto [low, high] = std::minmax_element(from, from + kGroup);
    half stored = to_half((*high - *low) / 15.0f), base = to_half(*low);
    float scale = from_half(stored), inverse = scale > 0 ? 1.0f / scale : 0.0f;
    scales[2 * g * kPanel + lane] = stored;
    scales[(2 * g + 1) * kPanel + lane] = base;
    for (int i = 0; i < kGroup; i++) {
      int64_t at = g * kGroup + i;
      int q = nearest((from[i] - from_half(base)) * inverse, 0, 15);
      char& byte = panel[at / 8 * 64 + lane * 4 + at % 4];
      byte = at % 8 < 4 ? char(q) : char((byte & 15) | (q << 4));
    }
  }
}

}  // namespace

void pack_panels(int kind, const void* weight, int type, int64_t n, int64_t k, int64_t stride,
                 int64_t first, int64_t last, char* out) {
  int64_t wide = padded_k(kind, k), bytes = panel_bytes(kind, k);
  Column column(wide);
  for (int64_t p = first; p < last; p++) {
    char* panel = out + p * bytes;
    for (int lane = 0; lane < kPanel; lane++) {
      int64_t output = p * kPanel + lane;
      if (output < n) {
        column.read(weight, type, k, output * stride);
      } else {
        std::fill(column.w.begin(), column.w.end(), 0.0f);
      }
      const float* w = column.w.data();
      switch (kind) {
        case LOOM_KIND_F32:
          for (int64_t i = 0; i < wide; i++) ((float*)panel)[i * kPanel + lane] = w[i];
          break;
        case LOOM_KIND_BF16:
          for (int64_t i = 0; i < wide; i++) {
            ((bf16*)panel)[i / 2 * 2 * kPanel + 2 * lane + i % 2] = to_bf16(w[i]);
          }
          break;
        case LOOM_KIND_INT8: pack_int8(w, wide, lane, panel); break;
        default: pack_int4(w, wide, lane, panel);
      }
    }
  }
}

}  // namespace loom
