#include "linear.h"

#include <algorithm>
#include <array>
#include <utility>

#include "coded_floats.h"
#include "quantized_tiles.h"
#include "tiles.h"
#if defined(__aarch64__)
#include "matrix_tiles_neon.h"
#elif defined(LOOM_AMX)
#include "integers_amx.h"
#include "matrix_tiles_amx.h"
#elif defined(LOOM_INT8_WORDS)
#include "int8_words.h"
#endif

namespace loom {

namespace {

// Function r - 1 computes a tile of r rows.
template <int N>
using TileTable = std::array<TileFunction, N>;

// Whether the sums of R rows by a pair of panels, with what they are made of, fit the registers.
#if defined(LOOM_ZMM)
constexpr bool pair_fits(int) { return true; }
#else
constexpr bool pair_fits(int rows) { return rows <= 2; }
#endif

template <int R, int P>
void float_tile(const Tile& t) {
  if constexpr (P != 2 || pair_fits(R)) {
    tile_f32<R, P>(t);
  } else {
    one_by_one(t, tile_f32<R, 1>);
  }
}

template <int kind, int R, int P>
void narrow_tile(const Tile& t) {
  if constexpr (pair_fits(R)) {
    tile_narrow_by_fma<kind, R, P>(t);
  } else {
    one_by_one(t, tile_narrow_by_fma<kind, R, 1>);
  }
}

template <int R, int P>
void bf16_tile(const Tile& t) {
#if defined(__AVX512BF16__)
  tile_bf16_by_dot<R, P>(t);
#elif defined(LOOM_BFMMLA)
  one_by_one(t, tile_bf16_by_matrix<R>);
#else
  narrow_tile<LOOM_KIND_BF16, R, P>(t);
#endif
}

template <int panels, size_t... R>
constexpr TileTable<sizeof...(R)> float_table(std::index_sequence<R...>) {
  return {float_tile<R + 1, panels>...};
}

template <int panels, size_t... R>
constexpr TileTable<sizeof...(R)> bf16_table(std::index_sequence<R...>) {
  return {bf16_tile<R + 1, panels>...};
}

#if defined(LOOM_AMX)
template <size_t... R>
constexpr TileTable<sizeof...(R)> amx_table(std::index_sequence<R...>) {
  return {tile_bf16_by_amx<R + 1>...};
}
#endif

template <size_t... R>
constexpr TileTable<sizeof...(R)> half_table(std::index_sequence<R...>) {
  return {narrow_tile<LOOM_KIND_F16, R + 1, 2>...};
}

template <int kind, int R>
void coded_float_tile(const Tile& t) {
  if constexpr (pair_fits(R)) {
    tile_coded_floats<kind, R, 2>(t);
  } else {
    one_by_one(t, tile_coded_floats<kind, R, 1>);
  }
}

template <int kind, size_t... R>
constexpr TileTable<sizeof...(R)> coded_float_table(std::index_sequence<R...>) {
  return {coded_float_tile<kind, R + 1>...};
}

template <int kind, int R>
void quantized_tile(const Tile& t) {
#if defined(LOOM_SMMLA)
  one_by_one(t, tile_quantized_by_matrix<kind, R>);
#else
  tile_quantized<kind, R>(t);
#endif
}

template <int kind, size_t... R>
constexpr TileTable<sizeof...(R)> quantized_table(std::index_sequence<R...>) {
  return {quantized_tile<kind, R + 1>...};
}

constexpr auto kFloatTiles = float_table<2>(std::make_index_sequence<kRowTile>());
constexpr auto kFloatWideTiles = float_table<4>(std::make_index_sequence<kWideRowTile>());
constexpr auto kBf16Tiles = bf16_table<2>(std::make_index_sequence<kRowTile>());
#if defined(LOOM_AMX)
constexpr auto kBf16LinearTiles = amx_table(std::make_index_sequence<kAmxRowTile>());
#else
constexpr auto& kBf16LinearTiles = kBf16Tiles;
#endif
constexpr auto kHalfTiles = half_table(std::make_index_sequence<kRowTile>());
template <int kind>
constexpr auto kCodedFloatTiles = coded_float_table<kind>(std::make_index_sequence<kRowTile>());
template <int kind>
constexpr auto kQuantizedTiles =
    quantized_table<kind>(std::make_index_sequence<kQuantizedRowTile>());

// By kind, from the first quantized one on.
template <int... i>
constexpr auto quantized_tables(std::integer_sequence<int, i...>) {
  return std::array{kQuantizedTiles<LOOM_KIND_INT8 + i>.data()...};
}

constexpr auto kTilesByKind =
    quantized_tables(std::make_integer_sequence<int, LOOM_KIND_FP8 - LOOM_KIND_INT8>());

struct Tiles {
  const TileFunction* by_rows;
  int max_rows;
};

Tiles tiles_of(int kind) {
  if (is_quantized(kind)) return {kTilesByKind[size_t(kind - LOOM_KIND_INT8)], kQuantizedRowTile};
  if (kind == LOOM_KIND_F16) return {kHalfTiles.data(), kRowTile};
  if (kind == LOOM_KIND_FP8) return {kCodedFloatTiles<LOOM_KIND_FP8>.data(), kRowTile};
  if (kind == LOOM_KIND_NF4) return {kCodedFloatTiles<LOOM_KIND_NF4>.data(), kRowTile};
  if (kind == LOOM_KIND_BF16) return {kBf16LinearTiles.data(), int(kBf16LinearTiles.size())};
  return {kFloatTiles.data(), kRowTile};
}

constexpr size_t kMostRows = std::max<size_t>(kRowTile, kBf16LinearTiles.size());

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

int64_t lines_of(int kind, int64_t k) {
  int64_t wide = padded_k(kind, k);
  if (is_quantized(kind)) return wide / kGroup * form_of(kind).lines();
  if (is_of_floats(kind)) return wide / float_codes_of(kind).line_k();
  return kind == LOOM_KIND_F32 ? wide : wide / 2;
}

}  // namespace

void tile_float(int rows, const Tile& tile) { kFloatTiles[size_t(rows - 1)](tile); }
void tile_float_wide(int rows, const Tile& tile) { kFloatWideTiles[size_t(rows - 1)](tile); }

#if defined(__AVX512BF16__)
constexpr auto kBf16WideTiles = bf16_table<4>(std::make_index_sequence<kWideRowTile>());

void tile_bf16(int rows, const Tile& tile) { kBf16Tiles[size_t(rows - 1)](tile); }
void tile_bf16_wide(int rows, const Tile& tile) { kBf16WideTiles[size_t(rows - 1)](tile); }
#endif

Format input_format(int kind) {
#if defined(__AVX512BF16__) || defined(LOOM_BFMMLA)
  if (kind == LOOM_KIND_BF16) return Format::kBf16;
#endif
  return is_quantized(kind) ? Format::kInt8 : Format::kFloat;
}

int64_t padded_k(int kind, int64_t k) {
  if (is_quantized(kind) || is_of_floats(kind)) return round_up(k, kGroup);
  if (kind == LOOM_KIND_F16) return round_up(k, 2);
  return kind == LOOM_KIND_BF16 ? round_up(k, kBf16Step) : k;
}

int64_t panel_bytes(int kind, int64_t k) {
  int64_t bytes = 64 * lines_of(kind, k);
  if (is_of_floats(kind)) {
    int64_t spans = (k + float_codes_of(kind).span - 1) / float_codes_of(kind).span;
    return bytes + 64 * (spans + (kind == LOOM_KIND_NF4));
  }
  if (!is_quantized(kind)) return bytes;
  CodeForm form = form_of(kind);
  return round_up(bytes + (k + form.span() - 1) / form.span() * form.span_bytes(), 64);
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

// Symmetric: the largest magnitude of a group becomes 127. A NaN or an infinity makes the group's
// scale NaN, so that it does not turn into a number.
void quantize_row(const float* x, const int32_t* order, int64_t k, char* out) {
  int64_t groups = (k + kGroup - 1) / kGroup;
  auto* of_row = (GroupOfRow*)(out + groups * kGroup);
  for (int64_t g = 0; g < groups; g++) {
    int n = int(std::min<int64_t>(kGroup, k - g * kGroup));
    const float* from = x + g * kGroup;
    float gathered[kGroup];
    if (order) {
      for (int i = 0; i < n; i++) gathered[i] = x[order[g * kGroup + i]];
      from = gathered;
    }
    F16 low = load_n(from, n), high = load_n(from + kLanes, n - kLanes);
    uint32_t bits = peak_bits(low, high);
    float peak;
    memcpy(&peak, &bits, 4);
    bool finite = bits < 0x7f800000;
    float scale = finite ? peak / 127.0f : NAN;
    F16 inverse = splat(peak > 0 ? 127.0f / peak : 0.0f);
    HalfSums sums = to_bytes(low * inverse, high * inverse, out + g * kGroup);
    // What the conversion made of a value that is no number may not fit the sum.
    if (!finite) sums = {};
    int32_t total = sums.first + sums.second;
    of_row[g] = {scale, scale * float(total), -kSignedOffset * total,
                 {int16_t(sums.first), int16_t(sums.second)}};
  }
}

template <class T>
void convert_row(const float* x, int64_t k, int64_t wide, T* out) {
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) store(out + i, load(x + i));
  if (i < k) store_n(out + i, load_n(x + i, int(k - i)), int(k - i));
  std::fill(out + k, out + wide, T(0));
}

}  // namespace

void encode_row(const LoomLinear& layer, const float* x, char* out) {
  int64_t k = layer.k, wide = padded_k(layer.kind, k);
  switch (input_format(layer.kind)) {
    case Format::kBf16: return convert_row(x, k, wide, (bf16*)out);
    case Format::kInt8: return quantize_row(x, layer.order, k, out);
    default: return convert_row(x, k, wide, (float*)out);
  }
}

F16 act_and_mul(int activation, F16 gate, F16 up) {
  if (activation == LOOM_SILU) return gate * sigmoid(gate) * up;
  if (activation == LOOM_CLAMPED_SILU) {
    gate = min(splat(7.0f), gate);  // in this order a NaN stays one
    up = max(splat(-7.0f), min(splat(7.0f), up));
    return gate * sigmoid(splat(1.702f) * gate) * (up + splat(1.0f));
  }
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

int64_t panels_of(const LoomLinear& layer) { return (layer.n + kPanel - 1) / kPanel; }

// The two panels that are computed together; null: there are none to come.
struct PanelPair {
  const char *panel0, *panel1;
  int kind0, kind1;
};

PanelPair panel_pair(const LoomLinear& layer, bool gated, int64_t pair) {
  int64_t panels = panels_of(layer), first = gated ? pair : 2 * pair;
  // An odd last panel is computed twice and written once.
  int64_t second = gated ? pair + panels / 2 : std::min(first + 1, panels - 1);
  Panel a = panel_at(layer, first), b = panel_at(layer, second);
  return {a.at, b.at, a.kind, b.kind};
}

int64_t pairs_of(const LoomLinear& layer) { return (layer.n + kPair - 1) / kPair; }

// A claimed piece of a layer: a pair of panels by some rows.
struct Piece {
  const LoomLinear& layer;
  const Epilogue& epilogue;
  Rows x;
  int64_t pair;
  PanelPair now, ahead;  // ahead: of the next piece, to be fetched; null if there is none

  // Writes the outputs of rows begin .. end - 1 from their sums.
  void emit(int64_t begin, int64_t end, const float* sums) const {
    for (int64_t row = begin; row < end; row++, sums += kPair) {
      if (epilogue.mode == Epilogue::kActAndMul) {
        emit_product(layer, epilogue, row, pair * kPanel, sums);
      } else {
        emit_columns(layer, epilogue, row, pair * kPair, sums);
      }
    }
  }
};

// Row tiles first .. last - 1 of `count` tiles of equal height: 16 rows are 8 + 8, not 12 + 4.
struct RowTiles {
  int64_t rows, count, first, last;
  int64_t begin(int64_t i) const { return rows * i / count; }
};

// A tile of a pair of panels, whatever their kinds.
void run_tile(int64_t rows, Tile tile, int64_t k, int kind0, int kind1) {
  if (kind0 == kind1) {
    tile.steps = lines_of(kind0, k);
    return tiles_of(kind0).by_rows[rows - 1](tile);
  }
  // Kinds differ where two parts of a layer meet: each panel is computed as a pair with itself.
  alignas(64) float second[kRowTile * kPair];
  Tile other = tile;
  tile.panel1 = tile.panel0;
  other.panel0 = other.panel1;
  other.out = second;
  run_tile(rows, tile, k, kind0, kind0);
  run_tile(rows, other, k, kind1, kind1);
  for (int64_t r = 0; r < rows; r++) {
    store(tile.out + r * kPair + kPanel, load(second + r * kPair));
  }
}

// Each row tile walks all of K.
void run_whole(const Piece& piece, const RowTiles& tiles) {
  alignas(64) float sums[kMostRows * kPair];
  for (int64_t i = tiles.first; i < tiles.last; i++) {
    int64_t begin = tiles.begin(i), end = tiles.begin(i + 1);
    Tile tile = {piece.x.data + begin * piece.x.stride, piece.x.stride, piece.now.panel0,
                 piece.now.panel1, 0, sums, kPair, false, nullptr, nullptr};
    // With several row tiles, the first fetches the first panel to come, the second the other.
    if (i == tiles.first) tile.prefetch0 = piece.ahead.panel0;
    if (i == tiles.first + 1 || tiles.last - tiles.first == 1) tile.prefetch1 = piece.ahead.panel1;
    run_tile(end - begin, tile, piece.layer.k, piece.now.kind0, piece.now.kind1);
    piece.emit(begin, end, sums);
  }
}

// Sixteen registers hold little, so all that a row tile reads must come from the first cache: K is
// walked in blocks whose lines stay there for all row tiles, as floats (what is narrower is widened
// once per block; codes of floats, which take most work, with any registers). Sums wait in memory
// between blocks as the float32 that they are in the registers, so each is still one accumulator
// that walks K upwards.
constexpr int64_t kBlockK = 128, kBlockTiles = 96 / kRowTile;

// k first .. last - 1 of a panel as lines of floats, in `out` where they are not such already;
// `ahead` null or a panel to fetch meanwhile.
const char* as_floats(int kind, int64_t whole_k, const char* panel, const char* ahead,
                      int64_t first, int64_t last, float* out) {
  auto widen = [&](auto of_line) {
    for (int64_t s = first / 2; s < last / 2; s++) {
      if (ahead) prefetch(ahead + 64 * s);
      for (int k = 0; k < 2; k++) {
        store(out + kPanel * (2 * s + k - first), of_line(panel + 64 * s, k));
      }
    }
  };
  int64_t lines = lines_of(kind, whole_k), line_k = whole_k / std::max<int64_t>(lines, 1);
  switch (kind) {
    case LOOM_KIND_F32: return panel + 64 * first;
    case LOOM_KIND_F16: widen(widened<LOOM_KIND_F16>); break;
    case LOOM_KIND_FP8:
      widen_coded_floats<LOOM_KIND_FP8>(panel, ahead, lines, first / line_k, last / line_k, out);
      break;
    case LOOM_KIND_NF4:
      widen_coded_floats<LOOM_KIND_NF4>(panel, ahead, lines, first / line_k, last / line_k, out);
      break;
    default: widen(widened<LOOM_KIND_BF16>);
  }
  return (const char*)out;
}

void run_blocked(const Piece& piece, const RowTiles& tiles) {
  alignas(64) float sums[kBlockTiles * kRowTile * kPair], panels[2][kBlockK * kPanel];
  int64_t k = padded_k(piece.layer.kind, piece.layer.k);
  const PanelPair& now = piece.now;
  for (int64_t first = tiles.first; first < tiles.last; first += kBlockTiles) {
    int64_t last = std::min(first + kBlockTiles, tiles.last), top = tiles.begin(first);
    PanelPair ahead = first == tiles.first ? piece.ahead : PanelPair{};
    for (int64_t at = 0; at < k; at += kBlockK) {
      int64_t steps = std::min(kBlockK, k - at), end = at + steps;
      const char* wide0 = as_floats(now.kind0, k, now.panel0, ahead.panel0, at, end, panels[0]);
      const char* wide1 = as_floats(now.kind1, k, now.panel1, ahead.panel1, at, end, panels[1]);
      for (int64_t i = first; i < last; i++) {
        int64_t begin = tiles.begin(i), rows = tiles.begin(i + 1) - begin;
        tile_float(int(rows), {piece.x.data + begin * piece.x.stride + 4 * at, piece.x.stride,
                               wide0, wide1, steps, sums + (begin - top) * kPair, kPair, at > 0,
                               nullptr, nullptr});
      }
    }
    piece.emit(top, tiles.begin(last), sums);
  }
}

#if defined(LOOM_INT8_WORDS)
// Lines of an int8 panel from k `at` on as words; `ahead` null or a panel to fetch meanwhile.
void widen_block(const char* panel, const char* ahead, int64_t at, int64_t count, int64_t k,
                 int16_t* out) {
  if (ahead) {
    for (int64_t byte = 16 * at; byte < 16 * (at + count); byte += 64) prefetch(ahead + byte);
    for (int64_t byte = at; byte < at + count; byte += 64) prefetch(ahead + 16 * k + byte);
  }
  widen_lines(panel, at / 4, (at + count) / 4, out);
}

// `run_blocked` of int8 rows: both the block's weights and its rows are widened once.
void run_words(const Piece& piece, const RowTiles& tiles) {
  alignas(64) float sums[kWordBlockRows * kPair];
  alignas(64) int16_t panels[2][kWordBlockK * kPanel], words[kWordBlockRows * kWordBlockK];
  int64_t k = padded_k(LOOM_KIND_INT8, piece.layer.k), stride = piece.x.stride;
  int64_t first = tiles.begin(tiles.first), last = tiles.begin(tiles.last);
  for (int64_t top = first; top < last; top += kWordBlockRows) {
    int64_t rows = std::min(kWordBlockRows, last - top);
    const char* x = piece.x.data + top * stride;
    PanelPair ahead = top == first ? piece.ahead : PanelPair{};
    for (int64_t at = 0; at < k; at += kWordBlockK) {
      int64_t count = std::min(kWordBlockK, k - at), group = at / kGroup;
      widen_block(piece.now.panel0, ahead.panel0, at, count, k, panels[0]);
      widen_block(piece.now.panel1, ahead.panel1, at, count, k, panels[1]);
      for (int64_t r = 0; r < rows; r++) {
        widen_row(x + r * stride + at, count, words + r * kWordBlockK);
      }
      for (int p = 0; p < 2; p++) {
        const char* scales = (p ? piece.now.panel1 : piece.now.panel0) + 16 * k;
        for (int64_t r = 0; r < rows; r += kWordRows) {
          tile_words(int(std::min<int64_t>(kWordRows, rows - r)),
                     {words + r * kWordBlockK, panels[p], scales + 32 * group,
                      (const GroupOfRow*)(x + r * stride + k) + group, stride, count / kGroup,
                      sums + r * kPair + p * kPanel, kPair, at > 0});
        }
      }
    }
    piece.emit(top, top + rows, sums);
  }
}
#endif

#if defined(LOOM_AMX)
// Quantized panels of one kind by many rows.
template <int kind>
void run_integers(const Piece& piece, int64_t first, int64_t last) {
  alignas(64) float sums[kAmxBlockRows * kPair];
  AmxBlock blocks[2];
  int64_t groups = padded_k(kind, piece.layer.k) / kGroup, stride = piece.x.stride;
  for (int64_t top = first; top < last; top += kAmxBlockRows) {
    int64_t rows = std::min(kAmxBlockRows, last - top);
    const char* x = piece.x.data + top * stride;
    PanelPair ahead = top == first ? piece.ahead : PanelPair{};
    for (int64_t g = 0; g < groups; g += kAmxBlockK / kGroup) {
      int64_t count = std::min(kAmxBlockK / kGroup, groups - g);
      unpack_block<kind>(piece.now.panel0, ahead.panel0, groups, g, count, blocks[0]);
      unpack_block<kind>(piece.now.panel1, ahead.panel1, groups, g, count, blocks[1]);
      for (int64_t r = 0; r < rows; r += kAmxRows) {
        const char* row = x + r * stride;
        for (int p = 0; p < 2; p++) {
          tile_integers_by_amx<kind>(
              int(std::min<int64_t>(kAmxRows, rows - r)),
              {row + g * kGroup, (const GroupOfRow*)(row + groups * kGroup) + g, stride,
               &blocks[p], count, sums + r * kPair + p * kPanel, kPair, g > 0});
        }
      }
    }
    piece.emit(top, top + rows, sums);
  }
}

template <int... i>
constexpr auto integer_runs(std::integer_sequence<int, i...>) {
  return std::array{run_integers<LOOM_KIND_INT8 + i>...};
}

constexpr auto kIntegerRuns =
    integer_runs(std::make_integer_sequence<int, LOOM_KIND_FP8 - LOOM_KIND_INT8>());
#endif

void run_piece(const Piece& piece, const RowTiles& tiles) {
#if defined(LOOM_AMX)
  int64_t first = tiles.begin(tiles.first), last = tiles.begin(tiles.last);
  bool of_one_kind = piece.now.kind0 == piece.now.kind1;
  if (is_quantized(piece.now.kind0) && of_one_kind && last - first >= kAmxFewestRows) {
    return kIntegerRuns[size_t(piece.now.kind0 - LOOM_KIND_INT8)](piece, first, last);
  }
#endif
#if defined(LOOM_INT8_WORDS)
  bool of_bytes = piece.now.kind0 == LOOM_KIND_INT8 && piece.now.kind1 == LOOM_KIND_INT8;
  if (of_bytes && tiles.last - tiles.first > 1) return run_words(piece, tiles);
#endif
#if defined(LOOM_ZMM)
  bool blocked = is_of_floats(piece.now.kind0);
#else
  bool blocked = input_format(piece.layer.kind) == Format::kFloat;
#endif
  if (blocked && tiles.last - tiles.first > 1) return run_blocked(piece, tiles);
  run_whole(piece, tiles);
}

}  // namespace

Panel panel_at(const LoomLinear& layer, int64_t i) {
  if (!layer.parts) {
    return {(const char*)layer.panels + i * panel_bytes(layer.kind, layer.k), layer.kind};
  }
  auto* part = (const LoomLinear*)layer.panels;
  for (; i >= panels_of(*part); part++) i -= panels_of(*part);
  return panel_at(*part, i);
}

void linear(Worker& worker, const LoomLinear& layer, Rows x, int64_t rows, const Epilogue& epilogue,
            Coming coming) {
  bool gated = epilogue.mode == Epilogue::kActAndMul;
  int64_t most = tiles_of(layer.kind).max_rows;
  int64_t pairs = pairs_of(layer), count = (rows + most - 1) / most;
  // More threads than pairs of panels: the rows are cut as well, in whole tiles.
  int64_t cuts = std::clamp<int64_t>(4 * worker.size() / std::max<int64_t>(pairs, 1), 1,
                                     std::max<int64_t>(count, 1));
  int64_t tasks = rows > 0 ? pairs * cuts : 0;
  int64_t task = worker.id();
  while (task < tasks) {
    int64_t following = worker.claim(), cut = task % cuts;
    Piece piece = {layer, epilogue, x, task / cuts, panel_pair(layer, gated, task / cuts), {}};
    if (following < tasks) {
      piece.ahead = panel_pair(layer, gated, following / cuts);
    } else if (coming.layer && worker.id() < pairs_of(*coming.layer)) {
      piece.ahead = panel_pair(*coming.layer, coming.gated, worker.id());
    }
    RowTiles part = {rows, count, count * cut / cuts, count * (cut + 1) / cuts};
    run_piece(piece, part);
    task = following;
  }
  worker.finish();
}

void linear_each(Worker& worker, const std::vector<LayerRows>& layers) {
  int64_t most = tiles_of(layers[0].layer->kind).max_rows;
  int64_t pairs = pairs_of(*layers[0].layer), tasks = int64_t(layers.size()) * pairs;
  auto panels_of = [&](int64_t task) {
    const LayerRows& of = layers[size_t(task / pairs)];
    return panel_pair(*of.layer, of.epilogue.mode == Epilogue::kActAndMul, task % pairs);
  };
  int64_t task = worker.id();
  while (task < tasks) {
    int64_t following = worker.claim();
    const LayerRows& of = layers[size_t(task / pairs)];
    int64_t count = (of.rows + most - 1) / most;
    Piece piece = {*of.layer, of.epilogue, of.x, task % pairs, panels_of(task), {}};
    if (following < tasks) piece.ahead = panels_of(following);
    run_piece(piece, {of.rows, count, 0, count});
    task = following;
  }
  worker.finish();
}

}  // namespace loom
