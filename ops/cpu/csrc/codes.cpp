// Weights of codes from their numbers into panels, and back; see forms.h and coded_floats.h. Rows of
// halves come back, too.
#include <algorithm>
#include <cstring>

#include "coded_floats.h"
#include "linear.h"

namespace loom {

namespace {

// A plane of codes: their bits from `from` on, `width` of them.
struct Plane {
  int width, from;
};

// Those of a form, in the order of their lines.
struct Planes {
  Plane plane[3];
  int count = 0;

  explicit Planes(int bits) {
    if (bits == 8) {
      plane[count++] = {8, 0};
      return;
    }
    for (int width : {4, 2, 1}) {
      if (bits & width) plane[count++] = {width, (bits & ~(2 * width - 1)) };
    }
  }
};

uint32_t word_of(const uint8_t* bytes) {
  uint32_t word;
  memcpy(&word, bytes, 4);
  return word;
}

// The 32 codes of an output to its words of a group's lines.
void put_codes(int bits, const uint8_t* codes, int lane, char* lines) {
  Planes planes(bits);
  for (int p = 0; p < planes.count; p++) {
    auto [width, from] = planes.plane[p];
    uint32_t mask = ((1u << width) - 1) * 0x01010101u;
    for (int quad = 0; quad < kGroup / 4; lines += 64) {
      uint32_t word = 0;
      for (int at = 0; at < 8; at += width, quad++) {
        word |= (word_of(codes + 4 * quad) >> from & mask) << at;
      }
      memcpy(lines + 4 * lane, &word, 4);
    }
  }
}

void get_codes(int bits, const char* lines, int lane, uint8_t* codes) {
  Planes planes(bits);
  std::fill(codes, codes + kGroup, uint8_t(0));
  for (int p = 0; p < planes.count; p++) {
    auto [width, from] = planes.plane[p];
    for (int quad = 0; quad < kGroup / 4; lines += 64) {
      for (int at = 0; at < 8; at += width, quad++) {
        for (int i = 0; i < 4; i++) {
          int part = uint8_t(lines[4 * lane + i]) >> at & ((1 << width) - 1);
          codes[4 * quad + i] |= uint8_t(part << from);
        }
      }
    }
  }
}

// One span's factors and integers of an output, to where the panel has the span's.
void put_scales(const CodeForm& form, const LoomCodes& c, int64_t span_of_all, int lane, char* out) {
  int stretches = form.span() / form.stretch;
  memcpy(out + 2 * lane, c.factors + span_of_all, 2);
  if (form.has_minimum_factor()) {
    memcpy(out + 2 * (kPanel + lane), c.minimum_factors + span_of_all, 2);
  }
  char* integers = out + form.factor_bytes();
  for (int i = 0; i < stretches; i++, integers += form.integer_bytes()) {
    int64_t stretch = span_of_all * stretches + i;
    if (form.has_scales()) integers[lane] = char(c.scales[stretch]);
    if (form.has_minima()) integers[form.minima_at() + lane] = char(c.minima[stretch]);
  }
}

// The codes and scales of an output of codes of floats, to its lane of a panel.
void put_floats(int kind, const LoomCodes& c, int64_t row, int64_t k, int lane, char* panel) {
  FloatCodes form = float_codes_of(kind);
  const uint8_t* codes = c.codes + row * k;
  int64_t spans = (k + form.span - 1) / form.span;
  auto* scales = (float*)(panel + 64 * (k / form.line_k()));
  for (int64_t s = 0; s < spans; s++) scales[kPanel * s + lane] = c.float_scales[row * spans + s];
  if (kind == LOOM_KIND_FP8) {
    for (int64_t i = 0; i < k; i++) panel[kPanel * i + lane] = char(codes[i]);
    return;
  }
  memcpy(scales + kPanel * spans, c.table, sizeof(float) * kPanel);
  for (int64_t line = 0; line < k / 8; line++, codes += 8) {
    uint32_t word = 0;
    for (int i = 0; i < 8; i++) word |= uint32_t(codes[i] & 15) << (4 * i);
    memcpy(panel + 64 * line + 4 * lane, &word, 4);
  }
}

template <int kind>
void get_floats(const char* panel, int64_t k, int lane, float* out) {
  int64_t lines = k / float_codes_of(kind).line_k();
  float numbers[kPanel * float_codes_of(kind).line_k()];
  for (int64_t s = 0; s < lines; s++) {
    widen_coded_floats<kind>(panel, nullptr, lines, s, s + 1, numbers);
    for (int64_t i = 0; i < k / lines; i++) *out++ = numbers[kPanel * i + lane];
  }
}

}  // namespace

void pack_codes(int kind, const LoomCodes& codes, int64_t n, int64_t k, int64_t first, int64_t last,
                char* out) {
  int64_t bytes = panel_bytes(kind, k);
  if (is_of_floats(kind)) {
    for (int64_t p = first; p < last; p++) {
      memset(out + p * bytes, 0, size_t(bytes));  // outputs beyond the last have scales of zero
      for (int lane = 0; lane < kPanel && p * kPanel + lane < n; lane++) {
        put_floats(kind, codes, p * kPanel + lane, k, lane, out + p * bytes);
      }
    }
    return;
  }
  CodeForm form = form_of(kind);
  int64_t groups = k / kGroup, spans = k / form.span();
  int64_t group_bytes = 64 * form.lines();
  for (int64_t p = first; p < last; p++) {
    char *panel = out + p * bytes, *scales = panel + groups * group_bytes;
    memset(panel, 0, size_t(bytes));  // outputs beyond the last have factors of zero
    for (int lane = 0; lane < kPanel && p * kPanel + lane < n; lane++) {
      int64_t row = p * kPanel + lane;
      for (int64_t g = 0; g < groups; g++) {
        put_codes(form.bits, codes.codes + row * k + g * kGroup, lane, panel + g * group_bytes);
      }
      for (int64_t s = 0; s < spans; s++) {
        put_scales(form, codes, row * spans + s, lane, scales + s * form.span_bytes());
      }
    }
  }
}

void unpack_row(const LoomLinear& layer, int64_t row, float* out) {
  auto [panel, kind] = panel_at(layer, row / kPanel);
  int lane = int(row % kPanel);
  auto half_at = [&](const char* at, int64_t i) {
    half h;
    memcpy(&h, at + 2 * i, 2);
    return to_float_half(h);
  };
  if (kind == LOOM_KIND_F16) {
    for (int64_t i = 0; i < layer.k; i++) out[i] = half_at(panel, kPanel * i + lane);
    return;
  }
  if (kind == LOOM_KIND_FP8) return get_floats<LOOM_KIND_FP8>(panel, layer.k, lane, out);
  if (kind == LOOM_KIND_NF4) return get_floats<LOOM_KIND_NF4>(panel, layer.k, lane, out);
  CodeForm form = form_of(kind);
  int64_t groups = padded_k(kind, layer.k) / kGroup;
  const char* scales = panel + groups * 64 * form.lines();
  for (int64_t g = 0; g < groups; g++) {
    uint8_t codes[kGroup];
    get_codes(form.bits, panel + g * 64 * form.lines(), lane, codes);
    int64_t group_in_span = g % (form.span() / kGroup);
    const char* span = scales + g / (form.span() / kGroup) * form.span_bytes();
    for (int i = 0; i < kGroup && g * kGroup + i < layer.k; i++) {
      float scale = half_at(span, lane);
      float minimum = form.has_zero() ? -scale : 0.0f;
      if (form.has_minimum_factor()) minimum = half_at(span, kPanel + lane);
      int64_t stretch = (group_in_span * kGroup + i) / form.stretch;
      const char* integers = span + form.factor_bytes() + stretch * form.integer_bytes();
      if (form.has_scales()) scale *= float(int8_t(integers[lane]));
      if (form.has_minima()) minimum *= float(int8_t(integers[form.minima_at() + lane]));
      int code = form.of_table() ? numbers_of(form.table)[codes[i]]
                                 : codes[i] - (form.in_bytes() ? 128 : form.offset);
      int64_t at = g * kGroup + i;
      out[layer.order ? layer.order[at] : at] = scale * float(code) + minimum;
    }
  }
}

}  // namespace loom
