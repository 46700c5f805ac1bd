// The packed linear layer: y = x W^T (+ bias), one kernel family for every number of rows.
//
// Layout. A weight [N, K] becomes ceil(N / 16) panels of 16 outputs each. A panel lists its K in
// order, one 64-byte line per step:
//   float32   1 k a line:  16 floats
//   bfloat16  2 k a line:  16 pairs (k, k + 1), what one dpbf16 instruction takes; for bfmmla 4 k in
//             two lines: 16 quads
//   float16   2 k a line:  16 halves of the one, then of the other
//   int8      4 k a line:  16 quads of unsigned bytes (w / scale + 128); after the lines, 16 half
//             scales per 32 k
//   int4      8 k a line:  16 quads in the low halves (k .. k + 3) and in the high halves
//             (k + 4 .. k + 7); after the lines, 16 half scales and 16 half minima per 32 k
//   others    see forms.h, which these two fit, and coded_floats.h
// K is padded with zeros to whole lines, quantized kinds to whole groups, bfloat16 for AMX to 32 k.
//
// Order. Each output is one accumulator that walks K in steps of one line from 0 upwards, whatever
// the number of rows beside it, so a row's result never depends on its neighbours (nor on the
// number of threads). The quantized kinds add up what shares a scale in int32 and those sums in
// float32, in order.
//
// Blocking. Two panels (32 outputs) by up to kRowTile rows of accumulators stay in registers. A
// thread takes a pair of panels over all rows, then claims the next pair, whose lines it prefetches
// meanwhile: with few rows the weights stream at memory bandwidth, with many they are read once
// from memory and stay in the cache for the other row tiles. Sixteen 256-bit registers hold one
// panel by six rows; there many rows walk K in blocks that the first cache holds. Tiles of AMX hold
// two panels by 32 rows, whose accumulators take 32 k in a step, one row's as well as many's.
#pragma once

#include <cstdint>
#include <vector>

#include "api.h"
#include "forms.h"
#include "simd.h"
#include "team.h"

namespace loom {

constexpr int kPanel = 16;  // outputs of a panel
constexpr int kPair = 2 * kPanel;
constexpr int kGroup = 32;  // k that share a scale, of weights and of quantized inputs
#if defined(LOOM_BFMMLA)
constexpr int kBf16Block = 4;  // k of an output that lie side by side in a bfloat16 panel
#else
constexpr int kBf16Block = 2;
#endif
#if defined(LOOM_AMX)
constexpr int kBf16Step = 32;  // k of one product of bfloat16 panels
#else
constexpr int kBf16Step = kBf16Block;
#endif

// How the input rows of a linear layer are stored: by the weight's kind and by the machine.
enum class Format { kFloat, kBf16, kInt8 };

Format input_format(int kind);

// Encoded rows: `stride` bytes from row to row.
struct Rows {
  const char* data;
  int64_t stride;
};

int64_t padded_k(int kind, int64_t k);
int64_t panel_bytes(int kind, int64_t k);

// Bytes of one encoded row, a multiple of 64.
int64_t row_bytes(int kind, int64_t k);

// Writes x [k] as a row for `layer`, padding with zeros. `out` is 64-byte aligned.
void encode_row(const LoomLinear& layer, const float* x, char* out);

// What becomes of a row's 32 sums.
struct Epilogue {
  enum Mode {
    kStore,      // out = scale * (sum + bias), then the soft cap
    kAdd,        // out += scale * (sum + bias)
    kActAndMul,  // out = act(gate) * up; the panels pair gate i with up i
  };
  Mode mode = kStore;
  int out_type = LOOM_F32;  // LOOM_BF16 is meant for kStore and kActAndMul
  int activation = LOOM_SILU;
  float scale = 1.0f;
  float soft_cap = 0.0f;
  void* out = nullptr;
  int64_t stride = 0;  // elements
};

// The linear layer that follows, whose first lines are fetched at the end of the one before.
struct Coming {
  const LoomLinear* layer = nullptr;
  bool gated = false;  // it will run with kActAndMul
};

// y for rows x; ends the phase.
void linear(Worker& worker, const LoomLinear& layer, Rows x, int64_t rows, const Epilogue& epilogue,
            Coming coming = {});

// A layer with the rows that go through it.
struct LayerRows {
  const LoomLinear* layer;
  Rows x;
  int64_t rows;
  Epilogue epilogue;
};

// `linear` for several layers of one kind and shape, whose pieces the threads share in one phase.
void linear_each(Worker& worker, const std::vector<LayerRows>& layers);

// out[r][0 .. 31] (+)= sum over `steps` lines of x[r] * (panel 0, panel 1), for r < rows.
// The building block of `linear` and of attention; `Pair` says what a line is.
struct Tile {
  const char* x;
  int64_t x_stride;  // bytes
  const char* panel0;
  const char* panel1;
  int64_t steps;
  float* out;
  int64_t out_stride;  // elements
  bool accumulate;
  const char* prefetch0;  // null or lines to fetch meanwhile, one per step
  const char* prefetch1;
};

void tile_float(int rows, const Tile& tile);
#if defined(__AVX512BF16__)
void tile_bf16(int rows, const Tile& tile);
#endif
// The same over four panels at equal distances, 64 outputs: with few rows, two panels' sums are
// too few to hide the latency of a product.
void tile_float_wide(int rows, const Tile& tile);
#if defined(__AVX512BF16__)
void tile_bf16_wide(int rows, const Tile& tile);
#endif
// Rows of a tile, and of a wide tile, that fit the registers.
#if defined(LOOM_ZMM)
constexpr int kRowTile = 12;
constexpr int kWideRowTile = 6;
#else
constexpr int kRowTile = 6;
constexpr int kWideRowTile = 1;
#endif

// dst[j] = a * activation(gate[j]) * up[j] for 16 lanes.
F16 act_and_mul(int activation, F16 gate, F16 up);

// x as panels of `kind`, see above. Panels first <= p < last are written. Halves are packed from
// halves (LOOM_F16), which no other kind is.
void pack_panels(int kind, const void* weight, int type, int64_t n, int64_t k, int64_t stride,
                 int64_t first, int64_t last, char* out);

// The same from the numbers of codes.
void pack_codes(int kind, const LoomCodes& codes, int64_t n, int64_t k, int64_t first, int64_t last,
                char* out);

// Row `row` of a layer of halves or codes, as floats [k].
void unpack_row(const LoomLinear& layer, int64_t row, float* out);

// A panel of a layer: where it begins, and its kind.
struct Panel {
  const char* at;
  int kind;
};

Panel panel_at(const LoomLinear& layer, int64_t i);

}  // namespace loom
