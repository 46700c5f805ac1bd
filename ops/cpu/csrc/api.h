// The plain C interface of the CPU kernels. ops/cpu/native.py mirrors these structs field by field
// and checks types, shapes and strides before it calls; what depends on the data (ids, positions,
// slots, pages) is checked here, and a bad value gives a status, never an access out of bounds.
#pragma once

#include <stdint.h>

extern "C" {

// Bytes only in KV pools, halves only of weights that are packed as such.
enum LoomType { LOOM_F32 = 0, LOOM_BF16 = 1, LOOM_INT8 = 2, LOOM_FP8 = 3, LOOM_F16 = 4 };

// How a linear layer's weight is stored; the quantized kinds are told in forms.h, the last two in
// coded_floats.h.
enum LoomKind {
  LOOM_KIND_F32 = 0,
  LOOM_KIND_BF16 = 1,
  LOOM_KIND_F16 = 2,
  LOOM_KIND_INT8 = 3,
  LOOM_KIND_INT4 = 4,
  LOOM_KIND_Q2_K = 5,
  LOOM_KIND_Q3_K = 6,
  LOOM_KIND_Q4_K = 7,
  LOOM_KIND_Q5_K = 8,
  LOOM_KIND_Q6_K = 9,
  LOOM_KIND_Q5_1 = 10,
  LOOM_KIND_IQ4_NL = 11,
  LOOM_KIND_IQ4_XS = 12,
  LOOM_KIND_INT4_ZERO = 13,
  LOOM_KIND_INT8_ZERO = 14,
  LOOM_KIND_MXFP4 = 15,
  LOOM_KIND_FP8 = 16,
  LOOM_KIND_NF4 = 17,
  LOOM_KINDS = 18,
};

// See ops/blocks/dense_mlp.py: act_and_mul.
enum LoomActivation { LOOM_SILU = 0, LOOM_GELU_TANH = 1, LOOM_GELU = 2, LOOM_CLAMPED_SILU = 3 };

enum LoomStatus {
  LOOM_OK = 0,
  LOOM_BAD_TOKEN = 1,
  LOOM_BAD_POSITION = 2,
  LOOM_BAD_SLOT = 3,
  LOOM_BAD_PAGE = 4,
  LOOM_BAD_ROWS = 5,
  LOOM_BAD_LOGIT_TOKEN = 6,
  LOOM_BAD_EXPERT = 7,
  LOOM_BAD_STATE = 8,
};

// A packed weight [n, k] with its bias, as `loom_pack` or `loom_pack_codes` wrote it. A layer may
// have parts of different quantized kinds, one below the other: `panels` is then an array of
// `parts` layers with k of this one, no biases, and whole panels in all but the last; `kind` is the
// first one's.
struct LoomLinear {
  const void* panels;
  const float* bias;  // [n] or null
  int64_t n;
  int64_t k;
  int32_t kind;
  int32_t parts;  // 0: it is one
  const int32_t* order;  // [k]: the input that each k of the panels takes, of quantized kinds; or null
};

// A weight [n, k] of a quantized kind in numbers (forms.h): codes [n, k], scales and minima
// [n, k / stretch] where the kind has them, factors and minimum factors [n, k / span] halves. Codes
// of floats (coded_floats.h) have float scales [n, spans] alone, and of nf4 a table [16].
struct LoomCodes {
  const uint8_t* codes;
  const int8_t* scales;
  const int8_t* minima;
  const uint16_t* factors;
  const uint16_t* minimum_factors;
  const float* float_scales;
  const float* table;
};

// Which keys each row of a step attends to; see ops/op_set.py: AttentionBatch.
struct LoomBatch {
  const int32_t* block_table;  // [table_rows, table_stride]
  int64_t table_rows;
  int64_t table_stride;
  int64_t table_pages;  // columns that may be read
  const int32_t* rows;
  const int32_t* qo_indptr;
  const int32_t* kv_lens;
  int64_t batch;
  int64_t tokens;
  int64_t page_size;
};

struct LoomAttention {
  float scale;
  float soft_cap;  // 0: off
  int64_t window;  // 0: off
  const float* sinks;  // [heads] or null
};

struct LoomPools {
  void* k;  // [slots, kv_heads, head_dim], contiguous
  void* v;
  float* k_scales;  // [slots, kv_heads] of pools of codes, else null
  float* v_scales;
};

struct LoomNorm {
  const float* weight;  // null: no norm
  float eps;
  int32_t reserved;
};

// The kinds of blocks; see ops/blocks/attention.py and dense_mlp.py.
struct LoomAttentionBlock {
  LoomLinear qkv, o;
  int64_t heads, kv_heads, head_dim;
  LoomNorm q_norm, k_norm;  // of each head, or of all heads together
  const float* rope;        // [rope_positions, rotary_dim] or null
  int64_t rope_positions, rotary_dim;
  int32_t rope_interleaved;
  int32_t qk_norm_whole;
  LoomAttention attention;
};

struct LoomMlpBlock {
  LoomLinear gate_up, down;
  int32_t activation;  // LoomActivation
  int32_t reserved;
};

// residual += residual_scale * out_norm(mixer(norm(residual))); one of the mixers is not null.
struct LoomBlock {
  LoomNorm norm, out_norm;
  const LoomAttentionBlock* attention;
  const LoomMlpBlock* mlp;
  float residual_scale;
  int32_t reserved;
};

struct LoomDecoder {
  int64_t vocab, hidden, blocks;
  int32_t embedding_type;  // LoomType, or negative: packed
  float embed_scale, logit_scale, logit_soft_cap;
  const void* embedding;   // [embedding_rows, hidden], or a LoomLinear whose rows can be unpacked
  int64_t embedding_rows;  // may be more than can be sampled
  const LoomBlock* block;
  LoomNorm final_norm;
  LoomLinear lm_head;
};

struct LoomStep {
  LoomBatch batch;
  const int64_t* input_ids;  // [tokens]
  const int64_t* positions;  // [tokens]
  const int64_t* slots;      // [tokens], negative: not stored
  const int64_t* logit_tokens;
  int64_t logits;         // how many tokens give logits
  const LoomPools* pools;  // one per block, read for attention alone
  int64_t pool_slots;
  int64_t pool_type;  // LoomType
  float* out;  // [logits, vocab]
};

struct LoomSampling {
  float* logits;  // [batch, vocab], overwritten
  int64_t batch, vocab, stride;
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int64_t *seed, *position;
  int64_t *out;
  const int64_t *bias_row, *bias_token;
  const float* bias_value;
  int64_t biases;
  const int32_t* state_rows;  // null: no penalties
  const float *repetition, *presence, *frequency;
  const uint8_t* prompt_mask;  // [state rows, vocab]
  int32_t* output_counts;      // [state rows, vocab]
  int64_t states;
  const int64_t *banned_row, *banned_token;
  int64_t banned;
  const int64_t* mask_rows;
  const int32_t* mask_bits;  // [masks, mask_words]
  int64_t masks, mask_words;
};

struct LoomExpert {
  LoomLinear gate_up, down;
};

// At least one expert; all have layers of one shape and kind.
struct LoomExperts {
  const LoomExpert* expert;
  int64_t count;
  int32_t activation;  // LoomActivation
  int32_t reserved;
};

// Tokens with their experts, as OpSet.run_experts has them.
struct LoomExpertRows {
  const void* x;  // [tokens, hidden]
  int64_t tokens;
  int64_t stride;  // elements
  const int64_t* ids;    // [tokens, top_k]
  const float* weights;  // [tokens, top_k]
  int64_t top_k;
  void* out;  // [tokens, hidden], contiguous, of x's type
  int32_t type;  // LoomType
  int32_t reserved;
};

// Which states the rows of a step go on from, and where they are left, see ops/op_set.py:
// RecurrentBatch. What is read of `before` nothing writes but the row that goes on from it.
struct LoomRecurrent {
  const int64_t *sources, *starts, *stops;        // [batch], [batch + 1], [batch + 1]
  const int64_t *stop_tokens, *stop_slots;        // [stop_count]
  int64_t batch, tokens, stop_count;
  const float* before;  // [before_slots, ...]
  float* states;        // [slots, ...]
  int64_t before_slots, slots;
};

// See OpSet.causal_conv.
struct LoomConv {
  const void* x;  // [tokens, channels]
  const float* weight;  // [kernel, channels]
  float* out;           // [tokens, channels]
  int64_t stride, channels, kernel;
  int32_t type;  // LoomType
  int32_t reserved;
};

// See OpSet.gated_delta; q, k and v are strided.
struct LoomDelta {
  const float *q, *k, *v, *decay, *rate;
  float* out;
  int64_t q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride;
  int64_t key_heads, value_heads, key_dim, value_dim;
};

// Size of the structs above as ops/cpu/structs.py counts them: the caller's mirror must agree.
int64_t loom_struct_bytes(int which);

// Threads and scratch memory. One call at a time.
struct LoomContext;
LoomContext* loom_open(int threads, int pin);
void loom_close(LoomContext*);

int64_t loom_packed_bytes(int kind, int64_t n, int64_t k);
// LOOM_KIND_F16 takes LOOM_F16 alone, which no other kind takes.
void loom_pack(LoomContext*, int kind, const void* weight, int type, int64_t n, int64_t k,
               int64_t stride, void* out);
// A checksum of bytes, the same for any number of threads.
uint64_t loom_checksum(LoomContext*, const void* data, int64_t bytes);
// The same from numbers; k is a multiple of the kind's span, of codes of floats one of 32.
void loom_pack_codes(LoomContext*, int kind, const LoomCodes*, int64_t n, int64_t k, void* out);
// Rows of a weight of halves or codes as floats, [count, k] of type.
int loom_unpack_rows(LoomContext*, const LoomLinear*, const int64_t* rows, int64_t count, int type,
                     void* out);
// Asks the system for large pages behind a buffer; without them the streams of a step miss the TLB.
void loom_use_large_pages(void* start, int64_t bytes);

// Strides count elements. Every `type` is a LoomType.
void loom_linear(LoomContext*, const LoomLinear*, const void* x, int type, int64_t rows,
                 int64_t stride, void* out);
void loom_rms_norm(LoomContext*, const void* x, const void* weight, int type, int weight_type,
                   int64_t rows, int64_t stride, int64_t dim, float eps, void* out);
void loom_add_rms_norm(LoomContext*, const void* x, void* residual, const void* weight, int type,
                       int weight_type, int64_t rows, int64_t dim, float eps, void* out);
void loom_act_and_mul(LoomContext*, const void* x, int type, int64_t rows, int64_t dim,
                      int activation, void* out);
int loom_rotary(LoomContext*, void* x, int type, int64_t tokens, int64_t heads, int64_t stride,
                int64_t head_stride, const int64_t* positions, const float* rope,
                int64_t rope_positions, int64_t rotary_dim, int interleaved);
int loom_store_kv(LoomContext*, const void* x, int type, int64_t tokens, int64_t stride,
                  int64_t head_stride, int64_t heads, int64_t dim, void* pool, float* scales,
                  int pool_type, int64_t pool_slots, const int64_t* slots);
int loom_attention(LoomContext*, const void* q, int type, int64_t stride, int64_t head_stride,
                   int64_t heads, int64_t kv_heads, int64_t dim, const LoomPools*, int pool_type,
                   int64_t pool_slots, const LoomBatch*, const LoomAttention*, void* out);
int loom_decode_step(LoomContext*, const LoomDecoder*, const LoomStep*);
int loom_sample(LoomContext*, const LoomSampling*);
int loom_experts(LoomContext*, const LoomExperts*, const LoomExpertRows*);
int loom_causal_conv(LoomContext*, const LoomConv*, const LoomRecurrent*);
int loom_gated_delta(LoomContext*, const LoomDelta*, const LoomRecurrent*);

}  // extern "C"
