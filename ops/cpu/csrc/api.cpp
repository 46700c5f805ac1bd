#include "api.h"

#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "checksum.h"
#include "decoder.h"
#include "experts.h"
#include "kv_codes.h"
#include "linear.h"
#include "recurrent.h"
#include "rows.h"
#include "sampling.h"

using namespace loom;

struct LoomContext {
  LoomContext(int threads, bool pin) : team(threads, pin) {}
  Team team;
  Buffer scratch;
  AttentionPlans plans;
};

namespace {

// Calls body with a null pointer of the storage type.
template <class Body>
void with_type(int type, Body&& body) {
  if (type == LOOM_BF16) {
    body((bf16*)nullptr);
  } else {
    body((float*)nullptr);
  }
}

template <class Body>
void with_types(int first, int second, Body&& body) {
  with_type(first, [&](auto* t) { with_type(second, [&](auto* u) { body(t, u); }); });
}

template <class Body>
void over_rows(LoomContext* c, int64_t rows, Body&& body) {
  c->team.run([&](Worker& w) { w.parallel_for(rows, body); });
}

}  // namespace

extern "C" {

int64_t loom_struct_bytes(int which) {
  constexpr size_t bytes[] = {
      sizeof(LoomLinear), sizeof(LoomBatch),          sizeof(LoomAttention), sizeof(LoomPools),
      sizeof(LoomNorm),   sizeof(LoomAttentionBlock), sizeof(LoomMlpBlock),  sizeof(LoomBlock),
      sizeof(LoomDecoder), sizeof(LoomStep),          sizeof(LoomSampling),  sizeof(LoomExpert),
      sizeof(LoomExperts), sizeof(LoomExpertRows),    sizeof(LoomCodes),
      sizeof(LoomRecurrent), sizeof(LoomConv),        sizeof(LoomDelta)};
  return int64_t(bytes[which]);
}

LoomContext* loom_open(int threads, int pin) { return new LoomContext(threads, pin != 0); }

void loom_close(LoomContext* c) { delete c; }

int64_t loom_packed_bytes(int kind, int64_t n, int64_t k) {
  return (n + kPanel - 1) / kPanel * panel_bytes(kind, k);
}

void loom_pack(LoomContext* c, int kind, const void* weight, int type, int64_t n, int64_t k,
               int64_t stride, void* out) {
  over_rows(c, (n + kPanel - 1) / kPanel, [&](int64_t p) {
    pack_panels(kind, weight, type, n, k, stride, p, p + 1, (char*)out);
  });
}

uint64_t loom_checksum(LoomContext* c, const void* data, int64_t bytes) {
  std::vector<uint64_t> sums(size_t((bytes + kChecksumPiece - 1) / kChecksumPiece));
  over_rows(c, int64_t(sums.size()), [&](int64_t p) {
    int64_t from = p * kChecksumPiece;
    sums[size_t(p)] = checksum((const char*)data + from, std::min(kChecksumPiece, bytes - from));
  });
  return checksum((const char*)sums.data(), int64_t(8 * sums.size()));
}

void loom_pack_codes(LoomContext* c, int kind, const LoomCodes* codes, int64_t n, int64_t k,
                     void* out) {
  over_rows(c, (n + kPanel - 1) / kPanel,
            [&](int64_t p) { pack_codes(kind, *codes, n, k, p, p + 1, (char*)out); });
}

int loom_unpack_rows(LoomContext* c, const LoomLinear* layer, const int64_t* rows, int64_t count,
                     int type, void* out) {
  for (int64_t i = 0; i < count; i++) {
    if (rows[i] < 0 || rows[i] >= layer->n) return LOOM_BAD_TOKEN;
  }
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    over_rows(c, count, [&](int64_t i) {
      static thread_local std::vector<float> wide;
      wide.resize(size_t(layer->k));
      unpack_row(*layer, rows[i], wide.data());
      T* row = (T*)out + i * layer->k;
      for (int64_t d = 0; d < layer->k; d++) narrow(wide[size_t(d)], row + d);
    });
  });
  return LOOM_OK;
}

void loom_use_large_pages([[maybe_unused]] void* start, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t page = 4096;
  auto from = ((int64_t)start + page - 1) / page * page, to = ((int64_t)start + bytes) / page * page;
  // Advice only: where the system has no large pages the buffer works as it is.
  if (to > from) madvise((void*)from, size_t(to - from), MADV_HUGEPAGE);
#endif
}

void loom_linear(LoomContext* c, const LoomLinear* layer, const void* x, int type, int64_t rows,
                 int64_t stride, void* out) {
  int64_t bytes = row_bytes(layer->kind, layer->k);
  char* encoded = c->scratch.reserve(rows * bytes);
  Epilogue e;
  e.out = out;
  e.out_type = type;
  e.stride = layer->n;
  c->team.run([&](Worker& w) {
    w.parallel_for(rows, [&](int64_t r) {
      static thread_local std::vector<float> wide;
      wide.resize(size_t(layer->k));
      with_type(type, [&](auto* t) {
        copy_row((const std::remove_pointer_t<decltype(t)>*)x + r * stride, layer->k, wide.data());
      });
      encode_row(*layer, wide.data(), encoded + r * bytes);
    });
    linear(w, *layer, {encoded, bytes}, rows, e);
  });
}

void loom_rms_norm(LoomContext* c, const void* x, const void* weight, int type, int weight_type,
                   int64_t rows, int64_t stride, int64_t dim, float eps, void* out) {
  with_types(type, weight_type, [&](auto* t, auto* u) {
    using T = std::remove_pointer_t<decltype(t)>;
    using W = std::remove_pointer_t<decltype(u)>;
    over_rows(c, rows, [&](int64_t r) {
      rms_norm_row((const T*)x + r * stride, (const W*)weight, dim, eps, (T*)out + r * dim);
    });
  });
}

void loom_add_rms_norm(LoomContext* c, const void* x, void* residual, const void* weight, int type,
                       int weight_type, int64_t rows, int64_t dim, float eps, void* out) {
  with_types(type, weight_type, [&](auto* t, auto* u) {
    using T = std::remove_pointer_t<decltype(t)>;
    using W = std::remove_pointer_t<decltype(u)>;
    over_rows(c, rows, [&](int64_t r) {
      T* sum = (T*)residual + r * dim;
      add_row((const T*)x + r * dim, dim, sum);
      rms_norm_row(sum, (const W*)weight, dim, eps, (T*)out + r * dim);
    });
  });
}

void loom_act_and_mul(LoomContext* c, const void* x, int type, int64_t rows, int64_t dim,
                      int activation, void* out) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    over_rows(c, rows, [&](int64_t r) {
      const T *gate = (const T*)x + r * 2 * dim, *up = gate + dim;
      for (int64_t d = 0; d < dim; d += kLanes) {
        int n = int(std::min<int64_t>(kLanes, dim - d));
        F16 y = act_and_mul(activation, load_n(gate + d, n), load_n(up + d, n));
        store_n((T*)out + r * dim + d, y, n);
      }
    });
  });
}

int loom_rotary(LoomContext* c, void* x, int type, int64_t tokens, int64_t heads, int64_t stride,
                int64_t head_stride, const int64_t* positions, const float* rope,
                int64_t rope_positions, int64_t rotary_dim, int interleaved) {
  for (int64_t t = 0; t < tokens; t++) {
    if (positions[t] < 0 || positions[t] >= rope_positions) return LOOM_BAD_POSITION;
  }
  with_type(type, [&](auto* p) {
    using T = std::remove_pointer_t<decltype(p)>;
    over_rows(c, tokens, [&](int64_t t) {
      for (int64_t h = 0; h < heads; h++) {
        rotate_head((T*)x + t * stride + h * head_stride, rope + positions[t] * rotary_dim,
                    rotary_dim, interleaved != 0);
      }
    });
  });
  return LOOM_OK;
}

int loom_store_kv(LoomContext* c, const void* x, int type, int64_t tokens, int64_t stride,
                  int64_t head_stride, int64_t heads, int64_t dim, void* pool, float* scales,
                  int pool_type, int64_t pool_slots, const int64_t* slots) {
  for (int64_t t = 0; t < tokens; t++) {
    if (slots[t] >= pool_slots) return LOOM_BAD_SLOT;
  }
  with_type(type, [&](auto* p) {
    using T = std::remove_pointer_t<decltype(p)>;
    over_rows(c, tokens, [&](int64_t t) {
      if (slots[t] < 0) return;
      store_token((const T*)x + t * stride, head_stride, heads, dim, pool_type, pool, scales,
                  slots[t]);
    });
  });
  return LOOM_OK;
}

int loom_attention(LoomContext* c, const void* q, int type, int64_t stride, int64_t head_stride,
                   int64_t heads, int64_t kv_heads, int64_t dim, const LoomPools* pools,
                   int pool_type, int64_t pool_slots, const LoomBatch* batch,
                   const LoomAttention* spec, void* out) {
  if (LoomStatus status = check_batch(*batch, pool_slots)) return status;
  AttentionCall call = {q,         type,      stride, head_stride, heads, kv_heads, dim, *pools,
                        pool_type, batch,     *spec,  out,         type,  heads * dim};
  c->plans.begin(*batch, c->team.size());
  const std::vector<AttentionTask>& tasks = c->plans.of({heads, kv_heads, dim});
  c->team.run([&](Worker& w) { attention(w, call, tasks); });
  return LOOM_OK;
}

int loom_decode_step(LoomContext* c, const LoomDecoder* decoder, const LoomStep* step) {
  if (LoomStatus status = check_step(*decoder, *step)) return status;
  run_step(c->team, *decoder, *step, c->scratch, c->plans);
  return LOOM_OK;
}

int loom_sample(LoomContext* c, const LoomSampling* s) { return sample(c->team, *s); }

int loom_experts(LoomContext* c, const LoomExperts* experts, const LoomExpertRows* rows) {
  return run_experts(c->team, *experts, *rows, c->scratch);
}

int loom_causal_conv(LoomContext* c, const LoomConv* conv, const LoomRecurrent* rows) {
  if (!rows_fit(*rows)) return LOOM_BAD_STATE;
  causal_conv(c->team, *conv, *rows);
  return LOOM_OK;
}

int loom_gated_delta(LoomContext* c, const LoomDelta* delta, const LoomRecurrent* rows) {
  if (!rows_fit(*rows)) return LOOM_BAD_STATE;
  gated_delta(c->team, *delta, *rows);
  return LOOM_OK;
}

}  // extern "C"
