#include "decoder.h"

#include <algorithm>
#include <cstring>

#include "linear.h"
#include "rows.h"

namespace loom {

namespace {

// Up to this many rows every thread prepares all inputs of a linear layer for itself, which costs
// less than a barrier.
constexpr int64_t kPrivateRows = 4;

// The residual stream and all values between linear layers are float32; only what a linear layer
// or the KV pool takes in is rounded.
class Step {
 public:
  Step(const LoomDecoder& decoder, const LoomStep& step, int threads, Buffer& scratch,
       const std::vector<AttentionTask>& tasks)
      : d_(decoder), s_(step), tasks_(tasks), rows_(step.batch.tokens) {
    q_width_ = d_.heads * d_.head_dim;
    kv_width_ = d_.kv_heads * d_.head_dim;
    Arena measure;
    lay_out(measure, threads);
    Arena arena(scratch.reserve(measure.used()));
    lay_out(arena, threads);
  }

  // On every thread of the team.
  void run(Worker& w) const {
    embed(w);
    for (int64_t i = 0; i + 1 < d_.layers; i++) {
      attend(w, i);
      Coming gate_up = {&d_.layer[i].gate_up, true}, qkv = {&d_.layer[i + 1].qkv};
      finish_layer(w, i, rows_, residual_, mixed_, gate_up, qkv);
    }
    int64_t last = d_.layers - 1;
    if (s_.logits == 0) {
      project(w, last);  // only the pool is wanted
      return;
    }
    attend(w, last);
    pick(w);
    Coming gate_up = {&d_.layer[last].gate_up, true}, head = {&d_.lm_head};
    finish_layer(w, last, s_.logits, picked_residual_, picked_mixed_, gate_up, head);
    write_logits(w);
  }

 private:
  void lay_out(Arena& arena, int threads) {
    int64_t o_row = 0, down_row = 0, private_row = 0, hidden_row = row_bytes(d_.lm_head.kind, d_.hidden);
    for (int64_t i = 0; i < d_.layers; i++) {
      const LoomLayer& l = d_.layer[i];
      o_row = std::max(o_row, row_bytes(l.o.kind, q_width_));
      down_row = std::max(down_row, row_bytes(l.down.kind, d_.intermediate));
      hidden_row = std::max({hidden_row, row_bytes(l.qkv.kind, d_.hidden),
                             row_bytes(l.gate_up.kind, d_.hidden)});
    }
    private_row = std::max({hidden_row, o_row, down_row});
    private_stride_ = kPrivateRows * private_row;
    residual_ = arena.take<float>(rows_ * d_.hidden);
    picked_residual_ = arena.take<float>(s_.logits * d_.hidden);
    branch_ = arena.take<float>(rows_ * d_.hidden);
    qkv_ = arena.take<float>(rows_ * (q_width_ + 2 * kv_width_));
    // Inputs of o and down: written in place where their format is that of the producer.
    mixed_ = arena.take<float>(rows_ * std::max(q_width_, o_row / 4));
    picked_mixed_ = arena.take<float>(s_.logits * std::max(q_width_, o_row / 4));
    product_ = arena.take<float>(rows_ * std::max(d_.intermediate, down_row / 4));
    encoded_ = arena.take<char>(rows_ * private_row);
    private_ = arena.take<char>(threads * private_stride_);
    wide_row_ = arena.take<float>(threads * (d_.hidden + kLanes));
  }

  void embed(Worker& w) const {
    w.parallel_for(rows_, [&](int64_t t) {
      float* out = residual_ + t * d_.hidden;
      int64_t at = s_.input_ids[t] * d_.hidden;
      if (d_.embedding_type == LOOM_BF16) {
        copy_row((const bf16*)d_.embedding + at, d_.hidden, out);
      } else {
        copy_row((const float*)d_.embedding + at, d_.hidden, out);
      }
      if (d_.embed_scale == 1.0f) return;
      for (int64_t i = 0; i < d_.hidden; i++) out[i] *= d_.embed_scale;
    });
  }

  // Encoded rows for a layer of `kind`: source(row) gives a row's floats. Ends a phase where the
  // rows are shared out.
  template <class Source>
  Rows prepare(Worker& w, const LoomLinear& layer, int64_t rows, Source&& source) const {
    int64_t stride = row_bytes(layer.kind, layer.k);
    if (rows <= kPrivateRows) {
      char* out = private_ + w.id() * private_stride_;
      for (int64_t r = 0; r < rows; r++) encode_row(layer.kind, source(r), layer.k, out + r * stride);
      return {out, stride};
    }
    w.parallel_for(rows, [&](int64_t r) {
      encode_row(layer.kind, source(r), layer.k, encoded_ + r * stride);
    });
    return {encoded_, stride};
  }

  Rows prepare_normed(Worker& w, const LoomLinear& layer, int64_t rows, const float* residual,
                      const float* weight) const {
    float* wide = wide_row_ + w.id() * (d_.hidden + kLanes);
    return prepare(w, layer, rows, [=, this](int64_t r) {
      rms_norm_row(residual + r * d_.hidden, weight, d_.hidden, d_.eps, wide);
      return wide;
    });
  }

  // Whether the producer of `layer`'s input can write encoded rows itself.
  static bool written_encoded(const LoomLinear& layer) {
    return input_format(layer.kind) != Format::kInt8 && padded_k(layer.kind, layer.k) == layer.k;
  }

  // Rows that the producer wrote for `layer`, encoded now unless they are.
  Rows prepare_written(Worker& w, const LoomLinear& layer, int64_t rows, const float* from) const {
    if (written_encoded(layer)) return {(const char*)from, row_bytes(layer.kind, layer.k)};
    return prepare(w, layer, rows, [&](int64_t r) { return from + r * layer.k; });
  }

  // How the producer writes rows for `layer`: its type, and elements from row to row.
  static int written_type(const LoomLinear& layer) {
    bool narrow = written_encoded(layer) && input_format(layer.kind) == Format::kBf16;
    return narrow ? LOOM_BF16 : LOOM_F32;
  }
  static int64_t written_stride(const LoomLinear& layer) {
    if (!written_encoded(layer)) return layer.k;
    return row_bytes(layer.kind, layer.k) / (written_type(layer) == LOOM_BF16 ? 2 : 4);
  }

  // Norm, q, k and v, positions, and the new keys and values into the pool.
  void project(Worker& w, int64_t i) const {
    const LoomLayer& l = d_.layer[i];
    Epilogue to_qkv;
    to_qkv.out = qkv_;
    to_qkv.stride = q_width_ + 2 * kv_width_;
    Rows x = prepare_normed(w, l.qkv, rows_, residual_, l.input_norm);
    linear(w, l.qkv, x, rows_, to_qkv, {&l.o});
    w.parallel_for(rows_, [&](int64_t t) {
      float* q = qkv_ + t * (q_width_ + 2 * kv_width_);
      float *k = q + q_width_, *v = k + kv_width_;
      const float* rope = l.rope ? l.rope + s_.positions[t] * d_.rotary_dim : nullptr;
      place_heads(q, d_.heads, l.q_norm, rope);
      place_heads(k, d_.kv_heads, l.k_norm, rope);
      if (s_.slots[t] < 0) return;
      to_pool(k, s_.pools[i].k, s_.slots[t]);
      to_pool(v, s_.pools[i].v, s_.slots[t]);
    });
  }

  void place_heads(float* x, int64_t heads, const float* norm, const float* rope) const {
    for (int64_t h = 0; h < heads; h++) {
      float* head = x + h * d_.head_dim;
      if (norm) rms_norm_row(head, norm, d_.head_dim, d_.eps, head);
      if (rope) rotate_head(head, rope, d_.rotary_dim, d_.rope_interleaved != 0);
    }
  }

  void to_pool(const float* x, void* pool, int64_t slot) const {
    if (d_.pool_type == LOOM_BF16) {
      copy_row(x, kv_width_, (bf16*)pool + slot * kv_width_);
    } else {
      copy_row(x, kv_width_, (float*)pool + slot * kv_width_);
    }
  }

  void attend(Worker& w, int64_t i) const {
    const LoomLayer& l = d_.layer[i];
    project(w, i);
    AttentionCall call;
    call.q = qkv_;
    call.q_type = LOOM_F32;
    call.q_stride = q_width_ + 2 * kv_width_;
    call.q_head_stride = d_.head_dim;
    call.heads = d_.heads;
    call.kv_heads = d_.kv_heads;
    call.dim = d_.head_dim;
    call.pools = s_.pools[i];
    call.pool_type = d_.pool_type;
    call.batch = &s_.batch;
    call.spec = l.attention;
    call.out = mixed_;
    call.out_type = written_type(l.o);
    call.out_stride = written_stride(l.o);
    attention(w, call, tasks_);
  }

  // The last layer goes on with the rows whose logits are wanted.
  void pick(Worker& w) const {
    const LoomLinear& o = d_.layer[d_.layers - 1].o;
    int64_t bytes = written_stride(o) * (written_type(o) == LOOM_BF16 ? 2 : 4);
    w.parallel_for(s_.logits, [&](int64_t r) {
      int64_t t = s_.logit_tokens[r];
      memcpy((char*)picked_mixed_ + r * bytes, (const char*)mixed_ + t * bytes, size_t(bytes));
      copy_row(residual_ + t * d_.hidden, d_.hidden, picked_residual_ + r * d_.hidden);
    });
  }

  // From the attention's output to the layer's end.
  void finish_layer(Worker& w, int64_t i, int64_t rows, float* residual, const float* mixed,
                    Coming gate_up, Coming next) const {
    const LoomLayer& l = d_.layer[i];
    add_branch(w, l.o, prepare_written(w, l.o, rows, mixed), rows, residual, l.attention_out_norm,
               gate_up);
    Epilogue to_product;
    to_product.mode = Epilogue::kActAndMul;
    to_product.activation = d_.activation;
    to_product.out = product_;
    to_product.out_type = written_type(l.down);
    to_product.stride = written_stride(l.down);
    Rows x = prepare_normed(w, l.gate_up, rows, residual, l.post_attention_norm);
    linear(w, l.gate_up, x, rows, to_product, {&l.down});
    add_branch(w, l.down, prepare_written(w, l.down, rows, product_), rows, residual,
               l.mlp_out_norm, next);
  }

  // residual += scale * norm(x W^T), the norm where the family has one.
  void add_branch(Worker& w, const LoomLinear& layer, Rows x, int64_t rows, float* residual,
                  const float* norm, Coming next) const {
    Epilogue e;
    e.stride = d_.hidden;
    e.mode = norm ? Epilogue::kStore : Epilogue::kAdd;
    e.out = norm ? branch_ : residual;
    e.scale = norm ? 1.0f : d_.residual_scale;
    linear(w, layer, x, rows, e, next);
    if (!norm) return;
    w.parallel_for(rows, [&](int64_t r) {
      float *from = branch_ + r * d_.hidden, *to = residual + r * d_.hidden;
      rms_norm_row(from, norm, d_.hidden, d_.eps, from);
      for (int64_t c = 0; c < d_.hidden; c++) to[c] += d_.residual_scale * from[c];
    });
  }

  void write_logits(Worker& w) const {
    Epilogue e;
    e.out = s_.out;
    e.stride = d_.vocab;
    e.scale = d_.logit_scale;
    e.soft_cap = d_.logit_soft_cap;
    Rows x = prepare_normed(w, d_.lm_head, s_.logits, picked_residual_, d_.final_norm);
    linear(w, d_.lm_head, x, s_.logits, e);
  }

  const LoomDecoder& d_;
  const LoomStep& s_;
  const std::vector<AttentionTask>& tasks_;
  int64_t rows_, q_width_, kv_width_, private_stride_ = 0;
  float *residual_, *picked_residual_, *branch_, *qkv_, *mixed_, *picked_mixed_, *product_;
  float* wide_row_;
  char *encoded_, *private_;
};

bool all_within(const int64_t* values, int64_t count, int64_t low, int64_t end) {
  return std::all_of(values, values + count, [=](int64_t v) { return v >= low && v < end; });
}

}  // namespace

LoomStatus check_batch(const LoomBatch& b, int64_t pool_slots) {
  if (b.qo_indptr[0] != 0 || b.qo_indptr[b.batch] != b.tokens) return LOOM_BAD_ROWS;
  for (int64_t i = 0; i < b.batch; i++) {
    int64_t fresh = int64_t(b.qo_indptr[i + 1]) - b.qo_indptr[i];
    if (fresh < 0 || b.kv_lens[i] < fresh) return LOOM_BAD_ROWS;
    if (b.rows[i] < 0 || b.rows[i] >= b.table_rows) return LOOM_BAD_ROWS;
    int64_t pages = (b.kv_lens[i] + b.page_size - 1) / b.page_size;
    if (pages > b.table_pages) return LOOM_BAD_PAGE;
    const int32_t* of_row = b.block_table + b.rows[i] * b.table_stride;
    for (int64_t p = 0; p < pages; p++) {
      if (of_row[p] < 0 || (of_row[p] + int64_t(1)) * b.page_size > pool_slots) {
        return LOOM_BAD_PAGE;
      }
    }
  }
  return LOOM_OK;
}

LoomStatus check_step(const LoomDecoder& d, const LoomStep& s) {
  int64_t tokens = s.batch.tokens, positions = INT64_MAX;
  for (int64_t i = 0; i < d.layers; i++) {
    if (d.layer[i].rope) positions = std::min(positions, d.layer[i].rope_positions);
  }
  if (!all_within(s.input_ids, tokens, 0, d.embedding_rows)) return LOOM_BAD_TOKEN;
  if (!all_within(s.positions, tokens, 0, positions)) return LOOM_BAD_POSITION;
  if (!all_within(s.slots, tokens, INT64_MIN, s.pool_slots)) return LOOM_BAD_SLOT;
  if (!all_within(s.logit_tokens, s.logits, 0, tokens)) return LOOM_BAD_LOGIT_TOKEN;
  return check_batch(s.batch, s.pool_slots);
}

void run_step(Team& team, const LoomDecoder& decoder, const LoomStep& step, Buffer& scratch,
              std::vector<AttentionTask>& tasks) {
  tasks.clear();
  AttentionShape shape = {decoder.heads, decoder.kv_heads, decoder.head_dim};
  plan_attention(step.batch, shape, team.size(), tasks);
  Step whole(decoder, step, team.size(), scratch, tasks);
  team.run([&](Worker& worker) { whole.run(worker); });
}

}  // namespace loom
