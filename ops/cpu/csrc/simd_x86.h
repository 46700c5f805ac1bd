// What simd.h needs beside its lanes on x86, whatever their width.
#pragma once

#include <immintrin.h>

namespace loom {

inline half to_half(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
inline float to_float_half(half h) { return _cvtsh_ss(h); }
inline void pause() { _mm_pause(); }

}  // namespace loom
