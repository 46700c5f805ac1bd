#include "linear.h"

#include <algorithm>
#include <array>
#include <utility>

#include "quantized_tiles.h"
#include "tiles.h"

namespace loom {

namespace {

// Function r - 1 computes a tile of r rows.
template <int N>
using TileTable = std::array<TileFunction, N>;

template <int panels, size_t... R>
constexpr TileTable<sizeof...(R)> float_table(std::index_sequence<R...>) {
  return {tile_f32<R + 1, panels>...};
}

template <int panels, size_t... R>
constexpr TileTable<sizeof...(R)> bf16_table(std::index_sequence<R...>) {
#if defined(__AVX512BF16__)
  return {tile_bf16_by_dot<R + 1, panels>...};
#else
  return {tile_bf16_by_fma<R + 1>...};
#endif
}

template <int kind, size_t... R>
constexpr TileTable<sizeof...(R)> quantized_table(std::index_sequence<R...>) {
  return {tile_quantized<kind, R + 1>...};
}

constexpr auto kFloatTiles = float_table<2>(std::make_index_sequence<kRowTile>());
constexpr auto kFloatWideTiles = float_table<4>(std::make_index_sequence<kWideRowTile>());
constexpr auto kBf16Tiles = bf16_table<2>(std::make_index_sequence<kRowTile>());
constexpr auto kInt8Tiles =
    quantized_table<LOOM_KIND_INT8>(std::make_index_sequence<kQuantizedRowTile>());
constexpr auto kInt4Tiles =
    quantized_table<LOOM_KIND_INT4>(std::make_index_sequence<kQuantizedRowTile>());

struct Tiles {
  const TileFunction* by_rows;
  int max_rows;
};

Tiles tiles_of(int kind) {
  switch (kind) {
    case LOOM_KIND_BF16: return {kBf16Tiles.data(), kRowTile};
    case LOOM_KIND_INT8: return {kInt8Tiles.data(), kQuantizedRowTile};
    case LOOM_KIND_INT4: return {kInt4Tiles.data(), kQuantizedRowTile};
    default: return {kFloatTiles.data(), kRowTile};
  }
}

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

bool is_quantized(int kind) { return kind == LOOM_KIND_INT8 || kind == LOOM_KIND_INT4; }

int64_t lines_of(int kind, int64_t k) {
  constexpr int k_per_line[] = {1, 2, 4, 8};
  return padded_k(kind, k) / k_per_line[kind];
}

}  // namespace

void tile_float(int rows, const Tile& tile) { kFloatTiles[size_t(rows - 1)](tile); }
void tile_float_wide(int rows, const Tile& tile) { kFloatWideTiles[size_t(rows - 1)](tile); }

#if defined(__AVX512BF16__)
constexpr auto kBf16WideTiles = bf16_table<4>(std::make_index_sequence<kWideRowTile>());

void tile_bf16(int rows, const Tile& tile) { kBf16Tiles[size_t(rows - 1)](tile); }
void tile_bf16_wide(int rows, const Tile& tile) { kBf16WideTiles[size_t(rows - 1)](tile); }
#endif

Format input_format([[maybe_unused]] int kind) {
#if defined(__AVX512BF16__)
  if (kind == LOOM_KIND_BF16) return Format::kBf16;
#endif
#if defined(__AVX512VNNI__)
  if (is_quantized(kind)) return Format::kInt8;
#endif
  return Format::kFloat;
}

int64_t padded_k(int kind, int64_t k) {
  if (is_quantized(kind)) return round_up(k, kGroup);
  return kind == LOOM_KIND_BF16 ? round_up(k, 2) : k;
}

int64_t panel_bytes(int kind, int64_t k) {
  int64_t bytes = 64 * lines_of(kind, k);
  if (!is_quantized(kind)) return bytes;
  int64_t scale_bytes = kind == LOOM_KIND_INT8 ? 32 : 64;
  return round_up(bytes + padded_k(kind, k) / kGroup * scale_bytes, 64);
}

int64_t row_bytes(int kind, int64_t k) {
  int64_t wide = padded_k(kind, k);
  switch (input_format(kind)) {
    case Format::kBf16: return round_up(2 * wide, 64);
    case Format::kInt8:
      return round_up(wide + wide / kGroup * int64_t(sizeof(GroupOfRow)), 64);
    default: return round_up(4 * wide, 64);
  }
}

namespace {

#if defined(__AVX512VNNI__)
// Symmetric: the largest magnitude of a group becomes 127. A NaN or an infinity, whose bits are
// larger than any number's, makes the group's scale NaN, so that it does not turn into a number.
void quantize_row(const float* x, int64_t k, char* out) {
  int64_t groups = (k + kGroup - 1) / kGroup;
  auto* of_row = (GroupOfRow*)(out + groups * kGroup);
  for (int64_t g = 0; g < groups; g++) {
    int n = int(std::min<int64_t>(kGroup, k - g * kGroup));
    F16 low = load_n(x + g * kGroup, n), high = load_n(x + g * kGroup + kLanes, n - kLanes);
    __m512i magnitude = _mm512_max_epu32(_mm512_castps_si512(abs(low).v),
                                         _mm512_castps_si512(abs(high).v));
    uint32_t bits = _mm512_reduce_max_epu32(magnitude);
    float peak;
    memcpy(&peak, &bits, 4);
    bool finite = bits < 0x7f800000;
    float scale = finite ? peak / 127.0f : NAN;
    F16 inverse = splat(peak > 0 ? 127.0f / peak : 0.0f);
    __m512i a = _mm512_cvtps_epi32((low * inverse).v), b = _mm512_cvtps_epi32((high * inverse).v);
    auto* to = (__m128i*)(out + g * kGroup);
    _mm_storeu_si128(to, _mm512_cvtsepi32_epi8(a));
    _mm_storeu_si128(to + 1, _mm512_cvtsepi32_epi8(b));
    // What the conversion made of a value that is no number may not fit the sum.
    int32_t total = finite ? _mm512_reduce_add_epi32(_mm512_add_epi32(a, b)) : 0;
    of_row[g] = {scale, scale * float(total), -128 * total, 0};
  }
}
#endif

template <class T>
void convert_row(const float* x, int64_t k, int64_t wide, T* out) {
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) store(out + i, load(x + i));
  if (i < k) store_n(out + i, load_n(x + i, int(k - i)), int(k - i));
  std::fill(out + k, out + wide, T(0));
}

}  // namespace

void encode_row(int kind, const float* x, int64_t k, char* out) {
  switch (input_format(kind)) {
    case Format::kBf16: return convert_row(x, k, padded_k(kind, k), (bf16*)out);
#if defined(__AVX512VNNI__)
    case Format::kInt8: return quantize_row(x, k, out);
#endif
    default: return convert_row(x, k, padded_k(kind, k), (float*)out);
  }
}

F16 act_and_mul(int activation, F16 gate, F16 up) {
  if (activation == LOOM_SILU) return gate * sigmoid(gate) * up;
  if (activation == LOOM_GELU_TANH) {
    F16 inner = gate * fma(splat(0.044715f) * gate, gate, splat(1.0f)) * splat(0.7978845608f);
    return splat(0.5f) * gate * (splat(1.0f) + tanh(inner)) * up;
  }
  float x[kLanes];
  store(x, gate);
  for (float& v : x) v = 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
  return load(x) * up;
}

namespace {

// Adds bias and scale to a tile's row and writes `n` outputs from column `column` on.
void emit_columns(const LoomLinear& layer, const Epilogue& e, int64_t row, int64_t column,
                  const float* sums) {
  for (int64_t c = 0; c < kPair && column + c < layer.n; c += kPanel) {
    int n = int(std::min<int64_t>(kPanel, layer.n - column - c));
    F16 y = load(sums + c);
    if (layer.bias) y = y + load_n(layer.bias + column + c, n);
    y = y * splat(e.scale);
    if (e.soft_cap > 0) y = splat(e.soft_cap) * tanh(y / splat(e.soft_cap));
    int64_t at = row * e.stride + column + c;
    if (e.mode == Epilogue::kAdd) {
      float* out = (float*)e.out + at;
      store_n(out, load_n(out, n) + y, n);
    } else if (e.out_type == LOOM_BF16) {
      store_n((bf16*)e.out + at, y, n);
    } else {
      store_n((float*)e.out + at, y, n);
    }
  }
}

// sums: 16 gates, then their 16 ups.
void emit_product(const LoomLinear& layer, const Epilogue& e, int64_t row, int64_t column,
                  const float* sums) {
  F16 gate = load(sums), up = load(sums + kPanel);
  if (layer.bias) {
    gate = gate + load(layer.bias + column);
    up = up + load(layer.bias + layer.n / 2 + column);
  }
  F16 y = act_and_mul(e.activation, gate, up);
  int64_t at = row * e.stride + column;
  if (e.out_type == LOOM_BF16) {
    store((bf16*)e.out + at, y);
  } else {
    store((float*)e.out + at, y);
  }
}

// The two panels that are computed together.
struct PanelPair {
  const char* panel0;
  const char* panel1;
};

PanelPair panel_pair(const LoomLinear& layer, bool gated, int64_t pair) {
  int64_t panels = (layer.n + kPanel - 1) / kPanel, bytes = panel_bytes(layer.kind, layer.k);
  int64_t first = gated ? pair : 2 * pair;
  // An odd last panel is computed twice and written once.
  int64_t second = gated ? pair + panels / 2 : std::min(first + 1, panels - 1);
  auto* start = (const char*)layer.panels;
  return {start + first * bytes, start + second * bytes};
}

int64_t pairs_of(const LoomLinear& layer) { return (layer.n + kPair - 1) / kPair; }

}  // namespace

void linear(Worker& worker, const LoomLinear& layer, Rows x, int64_t rows, const Epilogue& epilogue,
            Coming coming) {
  Tiles tiles = tiles_of(layer.kind);
  bool gated = epilogue.mode == Epilogue::kActAndMul;
  int64_t pairs = pairs_of(layer), lines = lines_of(layer.kind, layer.k);
  // More threads than pairs of panels: the rows are cut as well, in whole tiles.
  int64_t row_tiles = (rows + tiles.max_rows - 1) / tiles.max_rows;
  int64_t cuts = std::clamp<int64_t>(4 * worker.size() / std::max<int64_t>(pairs, 1), 1,
                                     std::max<int64_t>(row_tiles, 1));
  int64_t tasks = rows > 0 ? pairs * cuts : 0;
  alignas(64) float sums[kRowTile * kPair];
  int64_t task = worker.id();
  while (task < tasks) {
    int64_t following = worker.claim();
    PanelPair now = panel_pair(layer, gated, task / cuts), ahead = {nullptr, nullptr};
    if (following < tasks) {
      ahead = panel_pair(layer, gated, following / cuts);
    } else if (coming.layer && worker.id() < pairs_of(*coming.layer)) {
      ahead = panel_pair(*coming.layer, coming.gated, worker.id());
    }
    // Tiles of equal height: 16 rows are 8 + 8, not 12 + 4.
    int64_t lo = row_tiles * (task % cuts) / cuts, hi = row_tiles * (task % cuts + 1) / cuts;
    for (int64_t i = lo; i < hi; i++) {
      int64_t begin = rows * i / row_tiles, end = rows * (i + 1) / row_tiles;
      Tile tile = {x.data + begin * x.stride, x.stride, now.panel0, now.panel1, lines, sums, kPair,
                   false, nullptr, nullptr};
      // With several row tiles, the first fetches the first panel to come, the second the other.
      if (i == lo) tile.prefetch0 = ahead.panel0;
      if (i == lo + 1 || hi - lo == 1) tile.prefetch1 = ahead.panel1;
      tiles.by_rows[end - begin - 1](tile);
      for (int64_t row = begin; row < end; row++) {
        const float* of_row = sums + (row - begin) * kPair;
        if (gated) {
          emit_product(layer, epilogue, row, task / cuts * kPanel, of_row);
        } else {
          emit_columns(layer, epilogue, row, task / cuts * kPair, of_row);
        }
      }
    }
    task = following;
  }
  worker.finish();
}

}  // namespace loom
