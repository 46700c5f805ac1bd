// Writing weights [n, k] into panels; see linear.h for the layout.
//
// Sixteen rows are read side by side, 32 k of each at a time: what a group of the quantized kinds
// has, and a cache line of bfloat16. From each row's 32 come words of 32 bits, which go where the
// panel has the row's lane.
#include <algorithm>

#include "integers.h"
#include "linear.h"

namespace loom {

namespace {

// 32 numbers of a row, zeros beyond its end.
struct Stretch {
  F16 low, high;

  template <class T>
  Stretch(const T* row, int64_t at, int64_t k)
      : low(load_n(row + at, int(std::min<int64_t>(k - at, kLanes)))),
        high(load_n(row + std::min(at + kLanes, k), int(std::min<int64_t>(k - at, kGroup) - kLanes))) {}

  F16 peak() const { return max(abs(low), abs(high)); }
};

inline void put(uint32_t word, char* line, int lane) { memcpy(line + 4 * lane, &word, 4); }

// Rounded to whole numbers from lo to hi; what is no number becomes lo.
inline Stretch whole(Stretch x, float lo, float hi) {
  x.low = min(max(round(x.low), splat(lo)), splat(hi));  // in this order a NaN becomes lo
  x.high = min(max(round(x.high), splat(lo)), splat(hi));
  return x;
}

void pack_float(const Stretch& x, int count, int lane, char* lines) {
  float values[kGroup];
  store(values, x.low);
  store(values + kLanes, x.high);
  for (int i = 0; i < count; i++) memcpy(lines + 64 * i + 4 * lane, values + i, 4);
}

void pack_bf16(const Stretch& x, int count, int lane, char* lines) {
  bf16 values[kGroup];
  store(values, x.low);
  store(values + kLanes, x.high);
  uint32_t words[kGroup / 2];
  memcpy(words, values, sizeof(words));
  constexpr int side_by_side = kBf16Block / 2;
  for (int i = 0; i < (count + 1) / 2; i++) {
    int block = i / side_by_side * side_by_side;
    put(words[i], lines + 64 * block, side_by_side * lane + i % side_by_side);
  }
}

void pack_int8(const Stretch& x, int lane, char* lines, char* scales) {
  half stored = to_half(hmax(x.peak()) / 127.0f);
  float scale = to_float_half(stored);
  F16 inverse = splat(scale > 0 ? 1.0f / scale : 0.0f);
  Stretch scaled = x;
  scaled.low = x.low * inverse;
  scaled.high = x.high * inverse;
  scaled = whole(scaled, -127.0f, 127.0f);
  memcpy(scales + 2 * lane, &stored, 2);
  char bytes[kGroup];
  to_bytes(scaled.low, scaled.high, bytes);
  for (int i = 0; i < kGroup / 4; i++) {
    uint32_t word;
    memcpy(&word, bytes + 4 * i, 4);
    put(word ^ 0x80808080u, lines + 64 * i, lane);  // w + 128
  }
}

void pack_int4(const Stretch& x, int lane, char* lines, char* scales) {
  F16 zero = splat(0.0f);
  float high = hmax(max(x.low, x.high)), low = 0.0f - hmax(zero - min(x.low, x.high));
  half stored = to_half((high - low) / 15.0f), base = to_half(low);
  float scale = to_float_half(stored);
  F16 inverse = splat(scale > 0 ? 1.0f / scale : 0.0f), least = splat(to_float_half(base));
  Stretch scaled = x;
  scaled.low = (x.low - least) * inverse;
  scaled.high = (x.high - least) * inverse;
  scaled = whole(scaled, 0.0f, 15.0f);
  memcpy(scales + 2 * lane, &stored, 2);
  memcpy(scales + 2 * (kPanel + lane), &base, 2);
  char bytes[kGroup];
  to_bytes(scaled.low, scaled.high, bytes);
  for (int i = 0; i < kGroup / 8; i++) {
    uint32_t first, second;
    memcpy(&first, bytes + 8 * i, 4);
    memcpy(&second, bytes + 8 * i + 4, 4);
    put(first | second << 4, lines + 64 * i, lane);
  }
}

template <class T>
void pack_panel(int kind, const T* weight, int64_t n, int64_t k, int64_t stride, int64_t first,
                char* panel) {
  int64_t wide = padded_k(kind, k), lines = kind == LOOM_KIND_INT8 ? wide / 4 : wide / 8;
  char* scales = panel + 64 * lines;
  for (int64_t at = 0; at < wide; at += kGroup) {
    int count = int(std::min<int64_t>(wide - at, kGroup));
    for (int lane = 0; lane < kPanel; lane++) {
      // Outputs beyond the last are zeros.
      int64_t known = first + lane < n ? k : 0;
      Stretch x(weight + (known ? (first + lane) * stride : 0), std::min(at, known), known);
      int64_t group = at / kGroup;
      switch (kind) {
        case LOOM_KIND_F32: pack_float(x, count, lane, panel + 64 * at); break;
        case LOOM_KIND_BF16: pack_bf16(x, count, lane, panel + 32 * at); break;
        case LOOM_KIND_INT8: pack_int8(x, lane, panel + 16 * at, scales + 32 * group); break;
        default: pack_int4(x, lane, panel + 8 * at, scales + 64 * group);
      }
    }
  }
}

// Halves as they are: sixteen of one k, then of the next.
void pack_halves(const half* weight, int64_t n, int64_t k, int64_t stride, int64_t first,
                 half* panel) {
  int64_t lanes = std::min<int64_t>(kPanel, n - first), wide = padded_k(LOOM_KIND_F16, k);
  if (lanes < kPanel || k < wide) std::fill(panel, panel + kPanel * wide, half(0));
  for (int64_t at = 0; at < k; at += kGroup) {
    int64_t end = std::min<int64_t>(at + kGroup, k);
    for (int64_t lane = 0; lane < lanes; lane++) {
      const half* row = weight + (first + lane) * stride;
      for (int64_t i = at; i < end; i++) panel[kPanel * i + lane] = row[i];
    }
  }
}

}  // namespace

void pack_panels(int kind, const void* weight, int type, int64_t n, int64_t k, int64_t stride,
                 int64_t first, int64_t last, char* out) {
  int64_t bytes = panel_bytes(kind, k);
  for (int64_t p = first; p < last; p++) {
    if (kind == LOOM_KIND_F16) {
      pack_halves((const half*)weight, n, k, stride, p * kPanel, (half*)(out + p * bytes));
    } else if (type == LOOM_BF16) {
      pack_panel(kind, (const bf16*)weight, n, k, stride, p * kPanel, out + p * bytes);
    } else {
      pack_panel(kind, (const float*)weight, n, k, stride, p * kPanel, out + p * bytes);
    }
  }
}

}  // namespace loom
