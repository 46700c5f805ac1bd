#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kv_codes.h"
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
       AttentionPlans& plans)
      : d_(decoder), s_(step), rows_(step.batch.tokens) {
    plans.begin(step.batch, threads);
    for (int64_t i = 0; i < d_.blocks; i++) {
      const LoomAttentionBlock* a = d_.block[i].attention;
      tasks_.push_back(a ? &plans.of({a->heads, a->kv_heads, a->head_dim}) : nullptr);
      if (a) last_attention_ = i;
    }
    Arena measure;
    lay_out(measure, threads);
    Arena arena(scratch.reserve(measure.used()));
    lay_out(arena, threads);
  }

  // On every thread of the team.
  void run(Worker& w) const {
    embed(w);
    Stream stream = {residual_, rows_};
    for (int64_t i = 0; i < d_.blocks; i++) {
      if (d_.block[i].mlp) {
        run_mlp(w, i, stream);
      } else if (i < last_attention_) {
        attend(w, i);
        finish_attention(w, i, stream, mixed_);
      } else if (s_.logits == 0) {
        project(w, i);  // only the pool is wanted
        return;
      } else {
        // No later block looks at other tokens, so it goes on with those whose logits are wanted.
        attend(w, i);
        pick(w);
        stream = {picked_residual_, s_.logits};
        finish_attention(w, i, stream, picked_mixed_);
      }
    }
    write_logits(w, stream);
  }

 private:
  // The residual stream of the rows that are still computed.
  struct Stream {
    float* residual;
    int64_t rows;
  };

  void lay_out(Arena& arena, int threads) {
    int64_t private_row = row_bytes(d_.lm_head.kind, d_.hidden), qkv_row = 0, mixed_row = 0,
            product_row = 0;
    for (int64_t i = 0; i < d_.blocks; i++) {
      if (const LoomAttentionBlock* a = d_.block[i].attention) {
        int64_t o_row = row_bytes(a->o.kind, a->o.k);
        private_row = std::max({private_row, row_bytes(a->qkv.kind, d_.hidden), o_row});
        qkv_row = std::max(qkv_row, a->qkv.n);
        mixed_row = std::max({mixed_row, a->o.k, o_row / 4});
      }
      if (const LoomMlpBlock* m = d_.block[i].mlp) {
        int64_t down_row = row_bytes(m->down.kind, m->down.k);
        private_row = std::max({private_row, row_bytes(m->gate_up.kind, d_.hidden), down_row});
        product_row = std::max({product_row, m->down.k, down_row / 4});
      }
    }
    private_stride_ = kPrivateRows * private_row;
    // A token may be asked for its logits more than once.
    int64_t most = std::max(rows_, s_.logits);
    residual_ = arena.take<float>(rows_ * d_.hidden);
    picked_residual_ = arena.take<float>(s_.logits * d_.hidden);
    branch_ = arena.take<float>(most * d_.hidden);
    qkv_ = arena.take<float>(rows_ * qkv_row);
    // Inputs of o and down: written in place where their format is that of the producer.
    mixed_ = arena.take<float>(rows_ * mixed_row);
    picked_mixed_ = arena.take<float>(s_.logits * mixed_row);
    product_ = arena.take<float>(most * product_row);
    encoded_ = arena.take<char>(most * private_row);
    private_ = arena.take<char>(threads * private_stride_);
    wide_row_ = arena.take<float>(threads * (d_.hidden + kLanes));
  }

  void embed(Worker& w) const {
    w.parallel_for(rows_, [&](int64_t t) {
      float* out = residual_ + t * d_.hidden;
      int64_t at = s_.input_ids[t] * d_.hidden;
      if (d_.embedding_type < 0) {
        unpack_row(*(const LoomLinear*)d_.embedding, s_.input_ids[t], out);
      } else if (d_.embedding_type == LOOM_BF16) {
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
      for (int64_t r = 0; r < rows; r++) encode_row(layer, source(r), out + r * stride);
      return {out, stride};
    }
    w.parallel_for(rows, [&](int64_t r) { encode_row(layer, source(r), encoded_ + r * stride); });
    return {encoded_, stride};
  }

  Rows prepare_normed(Worker& w, const LoomLinear& layer, const Stream& stream,
                      const LoomNorm& norm) const {
    float* wide = wide_row_ + w.id() * (d_.hidden + kLanes);
    return prepare(w, layer, stream.rows, [=, this](int64_t r) -> const float* {
      const float* row = stream.residual + r * d_.hidden;
      if (!norm.weight) return row;
      rms_norm_row(row, norm.weight, d_.hidden, norm.eps, wide);
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

  // The linear layer that block i begins with; behind the last block, the head.
  Coming first_of(int64_t i) const {
    if (i == d_.blocks) return {&d_.lm_head};
    const LoomBlock& block = d_.block[i];
    if (block.attention) return {&block.attention->qkv};
    return {&block.mlp->gate_up, true};
  }

  // Norm, q, k and v, positions, and the new keys and values into the pool.
  void project(Worker& w, int64_t i) const {
    const LoomAttentionBlock& a = *d_.block[i].attention;
    int64_t q_width = a.heads * a.head_dim, kv_width = a.kv_heads * a.head_dim;
    Epilogue to_qkv;
    to_qkv.out = qkv_;
    to_qkv.stride = a.qkv.n;
    Rows x = prepare_normed(w, a.qkv, {residual_, rows_}, d_.block[i].norm);
    linear(w, a.qkv, x, rows_, to_qkv, {&a.o});
    w.parallel_for(rows_, [&](int64_t t) {
      float *q = qkv_ + t * a.qkv.n, *k = q + q_width, *v = k + kv_width;
      const float* rope = a.rope ? a.rope + s_.positions[t] * a.rotary_dim : nullptr;
      place_heads(q, a.heads, a, a.q_norm, rope);
      place_heads(k, a.kv_heads, a, a.k_norm, rope);
      if (s_.slots[t] < 0) return;
      const LoomPools& pools = s_.pools[i];
      auto store = [&](const float* x, void* pool, float* scales) {
        store_token(x, a.head_dim, a.kv_heads, a.head_dim, s_.pool_type, pool, scales, s_.slots[t]);
      };
      store(k, pools.k, pools.k_scales);
      store(v, pools.v, pools.v_scales);
    });
  }

  static void place_heads(float* x, int64_t heads, const LoomAttentionBlock& a,
                          const LoomNorm& norm, const float* rope) {
    bool whole = a.qk_norm_whole != 0;
    if (norm.weight && whole) rms_norm_row(x, norm.weight, heads * a.head_dim, norm.eps, x);
    for (int64_t h = 0; h < heads; h++) {
      float* head = x + h * a.head_dim;
      if (norm.weight && !whole) rms_norm_row(head, norm.weight, a.head_dim, norm.eps, head);
      if (rope) rotate_head(head, rope, a.rotary_dim, a.rope_interleaved != 0);
    }
  }

  void attend(Worker& w, int64_t i) const {
    const LoomAttentionBlock& a = *d_.block[i].attention;
    project(w, i);
    AttentionCall call;
    call.q = qkv_;
    call.q_type = LOOM_F32;
    call.q_stride = a.qkv.n;
    call.q_head_stride = a.head_dim;
    call.heads = a.heads;
    call.kv_heads = a.kv_heads;
    call.dim = a.head_dim;
    call.pools = s_.pools[i];
    call.pool_type = int(s_.pool_type);
    call.batch = &s_.batch;
    call.spec = a.attention;
    call.out = mixed_;
    call.out_type = written_type(a.o);
    call.out_stride = written_stride(a.o);
    attention(w, call, *tasks_[size_t(i)]);
  }

  // The rows whose logits are wanted, after the last attention.
  void pick(Worker& w) const {
    const LoomLinear& o = d_.block[last_attention_].attention->o;
    int64_t bytes = written_stride(o) * (written_type(o) == LOOM_BF16 ? 2 : 4);
    w.parallel_for(s_.logits, [&](int64_t r) {
      int64_t t = s_.logit_tokens[r];
      memcpy((char*)picked_mixed_ + r * bytes, (const char*)mixed_ + t * bytes, size_t(bytes));
      copy_row(residual_ + t * d_.hidden, d_.hidden, picked_residual_ + r * d_.hidden);
    });
  }

  // From the heads' outputs to the residual stream.
  void finish_attention(Worker& w, int64_t i, const Stream& stream, const float* mixed) const {
    const LoomLinear& o = d_.block[i].attention->o;
    add_branch(w, i, o, prepare_written(w, o, stream.rows, mixed), stream);
  }

  void run_mlp(Worker& w, int64_t i, const Stream& stream) const {
    const LoomMlpBlock& m = *d_.block[i].mlp;
    Epilogue to_product;
    to_product.mode = Epilogue::kActAndMul;
    to_product.activation = m.activation;
    to_product.out = product_;
    to_product.out_type = written_type(m.down);
    to_product.stride = written_stride(m.down);
    Rows x = prepare_normed(w, m.gate_up, stream, d_.block[i].norm);
    linear(w, m.gate_up, x, stream.rows, to_product, {&m.down});
    add_branch(w, i, m.down, prepare_written(w, m.down, stream.rows, product_), stream);
  }

  // residual += scale * norm(x W^T), the norm where the block has one.
  void add_branch(Worker& w, int64_t i, const LoomLinear& layer, Rows x,
                  const Stream& stream) const {
    const LoomBlock& block = d_.block[i];
    bool normed = block.out_norm.weight != nullptr;
    Epilogue e;
    e.stride = d_.hidden;
    e.mode = normed ? Epilogue::kStore : Epilogue::kAdd;
    e.out = normed ? branch_ : stream.residual;
    e.scale = normed ? 1.0f : block.residual_scale;
    linear(w, layer, x, stream.rows, e, first_of(i + 1));
    if (!normed) return;
    w.parallel_for(stream.rows, [&](int64_t r) {
      float *from = branch_ + r * d_.hidden, *to = stream.residual + r * d_.hidden;
      rms_norm_row(from, block.out_norm.weight, d_.hidden, block.out_norm.eps, from);
      for (int64_t c = 0; c < d_.hidden; c++) to[c] += block.residual_scale * from[c];
    });
  }

  void write_logits(Worker& w, const Stream& stream) const {
    Epilogue e;
    e.out = s_.out;
    e.stride = d_.vocab;
    e.scale = d_.logit_scale;
    e.soft_cap = d_.logit_soft_cap;
    Rows x = prepare_normed(w, d_.lm_head, stream, d_.final_norm);
    linear(w, d_.lm_head, x, stream.rows, e);
  }

  const LoomDecoder& d_;
  const LoomStep& s_;
  std::vector<const std::vector<AttentionTask>*> tasks_;  // by block, null for other kinds
  int64_t rows_, last_attention_ = -1, private_stride_ = 0;
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
  for (int64_t i = 0; i < d.blocks; i++) {
    const LoomAttentionBlock* a = d.block[i].attention;
    if (a && a->rope) positions = std::min(positions, a->rope_positions);
  }
  if (!all_within(s.input_ids, tokens, 0, d.embedding_rows)) return LOOM_BAD_TOKEN;
  if (!all_within(s.positions, tokens, 0, positions)) return LOOM_BAD_POSITION;
  if (!all_within(s.slots, tokens, INT64_MIN, s.pool_slots)) return LOOM_BAD_SLOT;
  if (!all_within(s.logit_tokens, s.logits, 0, tokens)) return LOOM_BAD_LOGIT_TOKEN;
  return check_batch(s.batch, s.pool_slots);
}

void run_step(Team& team, const LoomDecoder& decoder, const LoomStep& step, Buffer& scratch,
              AttentionPlans& plans) {
  Step whole(decoder, step, team.size(), scratch, plans);
  team.run([&](Worker& worker) { whole.run(worker); });
}

}  // namespace loom
