#include "attention.h"

#include <algorithm>

#include "buffer.h"
#include "linear.h"

namespace loom {

namespace {

// Queries of a task: enough to spread the transposing of a key tile, few enough for the cache.
constexpr int64_t kTaskQueries = 96;
constexpr float kNoMaximum = -1e30f;  // finite, so that differences of two of them are 0
constexpr float kNegativeInfinity = -INFINITY;

// How the products are computed: what a query and a softmax weight are stored as.
struct FloatMath {
  using X = float;
  static constexpr int k_per_line = 1;
  static void tile(int rows, const Tile& t) { tile_float(rows, t); }

  template <class T>
  static F16 words(const T* row, int64_t dim, int64_t word) {
    return load_n(row + word, int(dim - word));
  }
  template <class T>
  static F16 value_line(const T* const* values, int line, int64_t d, int n) {
    return values[line] ? load_n(values[line] + d, n) : splat(0.0f);
  }
};

#if defined(__AVX512BF16__)
struct DotMath {
  using X = bf16;
  static constexpr int k_per_line = 2;
  static void tile(int rows, const Tile& t) { tile_bf16(rows, t); }

  // Sixteen pairs of a key's dimensions, from pair `word` on. dim is even.
  static F16 words(const bf16* row, int64_t dim, int64_t word) {
    return load_n((const float*)row + word, int(dim / 2 - word));
  }
  // Sixteen dimensions of two successive keys' values, paired.
  static F16 value_line(const bf16* const* values, int line, int64_t d, int n) {
    const bf16 *a = values[2 * line], *b = values[2 * line + 1];
    __m512i low = a ? widened(a + d, n) : _mm512_setzero_si512();
    __m512i high = b ? widened(b + d, n) : _mm512_setzero_si512();
    return {_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)))};
  }
  static __m512i widened(const bf16* p, int n) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
  }
};
#endif

// One task's view: pointers into the thread's scratch and the geometry.
template <class Math, class T>
class Walk {
 public:
  Walk(const AttentionCall& call, const AttentionTask& task, int64_t kv_head, Buffer& scratch)
      : c_(call), kv_head_(kv_head), group_(call.heads / call.kv_heads) {
    const LoomBatch& b = *call.batch;
    int64_t row_first = b.qo_indptr[task.row], row_end = b.qo_indptr[task.row + 1];
    pages_ = b.block_table + b.rows[task.row] * b.table_stride;
    token_ = task.first;
    position_ = b.kv_lens[task.row] - (row_end - row_first) + (task.first - row_first);
    end_ = position_ + task.count;
    begin_ = call.spec.window > 0 ? std::max<int64_t>(0, position_ - call.spec.window + 1) : 0;
    queries_ = task.count * group_;
    wide_ = (call.dim + kPair - 1) / kPair * kPair;
    Arena measure;
    lay_out(measure);
    Arena arena(scratch.reserve(measure.used()));
    lay_out(arena);
  }

  void run() {
    start();
    for (int64_t tile = begin_ / kKeyTile * kKeyTile; tile < end_; tile += kKeyTile) {
      locate(tile);
      fill_panels();
      for (int64_t q = 0; q < queries_; q += kRowTile) {
        int rows = int(std::min<int64_t>(kRowTile, queries_ - q));
        if (sees(q, rows, tile)) update(q, rows, tile);
      }
    }
    write();
  }

 private:
  using X = typename Math::X;

  void lay_out(Arena& arena) {
    q_ = arena.take<X>(queries_ * wide_);
    out_ = arena.take<float>(queries_ * wide_);
    sum_ = arena.take<float>(queries_ * kLanes);
    maximum_ = arena.take<float>(queries_);
    keys_ = arena.take<char>(kKeyTile / kPanel * key_panel_bytes());
    values_ = arena.take<char>(wide_ / kPanel * value_panel_bytes());
    scores_ = arena.take<float>(kRowTile * kKeyTile);
    weights_ = arena.take<X>(kRowTile * kKeyTile);
  }

  int64_t key_lines() const { return c_.dim / Math::k_per_line; }
  int64_t key_panel_bytes() const { return 64 * key_lines(); }
  static constexpr int value_lines() { return kKeyTile / Math::k_per_line; }
  static constexpr int64_t value_panel_bytes() { return 64 * value_lines(); }

  int64_t position_of(int64_t query) const { return position_ + query / group_; }

  // Gathers the queries; query i is head i % group of token i / group. A sink is a logit without a
  // value: it starts the maximum and the sum.
  void start() {
    std::fill(out_, out_ + queries_ * wide_, 0.0f);
    std::fill(sum_, sum_ + queries_ * kLanes, 0.0f);
    for (int64_t i = 0; i < queries_; i++) {
      int64_t head = kv_head_ * group_ + i % group_, token = token_ + i / group_;
      int64_t from = token * c_.q_stride + head * c_.q_head_stride;
      for (int64_t d = 0; d < c_.dim; d += kLanes) {
        int n = int(std::min<int64_t>(kLanes, c_.dim - d));
        F16 x = c_.q_type == LOOM_BF16 ? load_n((const bf16*)c_.q + from + d, n)
                                       : load_n((const float*)c_.q + from + d, n);
        store_n(q_ + i * wide_ + d, x, n);
      }
      maximum_[i] = c_.spec.sinks ? c_.spec.sinks[head] * kLog2e : kNoMaximum;
      if (c_.spec.sinks) sum_[i * kLanes] = 1.0f;
    }
  }

  // Where the tile's keys and values are; null where no query of the task attends to a position,
  // so that what lies there (a page of somebody else, a NaN) is never read.
  void locate(int64_t tile) {
    int64_t page_size = c_.batch->page_size, step = c_.kv_heads * c_.dim;
    int64_t page = tile / page_size, offset = tile % page_size;
    for (int i = 0; i < kKeyTile; i++) {
      bool in = tile + i >= begin_ && tile + i < end_;
      int64_t slot = in ? pages_[page] * page_size + offset : 0;
      int64_t at = slot * step + kv_head_ * c_.dim;
      key_at_[i] = in ? (const T*)c_.pools.k + at : nullptr;
      value_at_[i] = in ? (const T*)c_.pools.v + at : nullptr;
      if (++offset == page_size) {
        offset = 0;
        page++;
      }
    }
  }

  void fill_panels() {
    for (int p = 0; p < kKeyTile / kPanel; p++) {
      for (int64_t word = 0; word < key_lines(); word += 16) {
        F16 block[16];
        for (int i = 0; i < 16; i++) {
          const T* key = key_at_[p * kPanel + i];
          block[i] = key ? Math::words(key, c_.dim, word) : splat(0.0f);
        }
        transpose(block);
        int lines = int(std::min<int64_t>(16, key_lines() - word));
        char* to = keys_ + p * key_panel_bytes() + 64 * word;
        for (int i = 0; i < lines; i++) store((float*)(to + 64 * i), block[i]);
      }
    }
    for (int64_t d = 0; d < wide_; d += kPanel) {
      char* to = values_ + d / kPanel * value_panel_bytes();
      int n = int(std::clamp<int64_t>(c_.dim - d, 0, kPanel));
      for (int line = 0; line < value_lines(); line++) {
        F16 x = n > 0 ? Math::value_line(value_at_, line, d, n) : splat(0.0f);
        store((float*)(to + 64 * line), x);
      }
    }
  }

  // Whether some of the queries attend to some key of the tile.
  bool sees(int64_t query, int rows, int64_t tile) const {
    if (tile > position_of(query + rows - 1)) return false;
    return c_.spec.window <= 0 || tile + kKeyTile > position_of(query) - c_.spec.window + 1;
  }

  void update(int64_t query, int rows, int64_t tile) {
    Tile t = {(const char*)(q_ + query * wide_), wide_ * int64_t(sizeof(X)), nullptr, nullptr,
              key_lines(), nullptr, kKeyTile, false, nullptr, nullptr};
    for (int p = 0; p < kKeyTile / kPanel; p += 2) {
      t.panel0 = keys_ + p * key_panel_bytes();
      t.panel1 = t.panel0 + key_panel_bytes();
      t.out = scores_ + p * kPanel;
      Math::tile(rows, t);
    }
    for (int r = 0; r < rows; r++) soften(query + r, r, tile);
    t = {(const char*)weights_, kKeyTile * int64_t(sizeof(X)), nullptr, nullptr,
         value_lines(), nullptr, wide_, true, nullptr, nullptr};
    for (int64_t d = 0; d < wide_; d += kPair) {
      t.panel0 = values_ + d / kPanel * value_panel_bytes();
      t.panel1 = t.panel0 + value_panel_bytes();
      t.out = out_ + query * wide_ + d;
      Math::tile(rows, t);
    }
  }

  // One step of the online softmax, in powers of two: turns a row of scores into weights and
  // rescales the row's sum and output to the new maximum.
  void soften(int64_t query, int r, int64_t tile) {
    constexpr int parts = kKeyTile / kLanes;
    F16 s[parts], top = splat(kNegativeInfinity);
    int64_t position = position_of(query);
    int hi = int(std::min<int64_t>(position + 1 - tile, kKeyTile)), lo = 0;
    if (c_.spec.window > 0) {
      lo = int(std::clamp<int64_t>(position - c_.spec.window + 1 - tile, 0, kKeyTile));
    }
    for (int i = 0; i < parts; i++) {
      s[i] = load(scores_ + r * kKeyTile + i * kLanes) * splat(c_.spec.scale);
      if (c_.spec.soft_cap > 0) {
        s[i] = splat(c_.spec.soft_cap) * tanh(s[i] / splat(c_.spec.soft_cap));
      }
      s[i] = s[i] * splat(kLog2e);
      if (lo > 0 || hi < kKeyTile) {
        s[i] = keep_between(s[i], lo - i * kLanes, hi - i * kLanes, splat(kNegativeInfinity));
      }
      top = max(top, s[i]);
    }
    float old = maximum_[query], maximum = std::max(old, hmax(top));
    F16 sum = load(sum_ + query * kLanes);
    if (maximum != old) {
      F16 rescale = exp2(splat(old - maximum));
      sum = sum * rescale;
      float* out = out_ + query * wide_;
      for (int64_t d = 0; d < wide_; d += kLanes) store(out + d, load(out + d) * rescale);
      maximum_[query] = maximum;
    }
    for (int i = 0; i < parts; i++) {
      F16 weight = exp2(s[i] - splat(maximum));
      store(weights_ + r * kKeyTile + i * kLanes, weight);
      sum = sum + weight;
    }
    store(sum_ + query * kLanes, sum);
  }

  void write() const {
    for (int64_t i = 0; i < queries_; i++) {
      int64_t head = kv_head_ * group_ + i % group_, token = token_ + i / group_;
      int64_t at = token * c_.out_stride + head * c_.dim;
      F16 inverse = splat(1.0f / sum(load(sum_ + i * kLanes)));
      for (int64_t d = 0; d < c_.dim; d += kLanes) {
        int n = int(std::min<int64_t>(kLanes, c_.dim - d));
        F16 y = load(out_ + i * wide_ + d) * inverse;
        if (c_.out_type == LOOM_BF16) {
          store_n((bf16*)c_.out + at + d, y, n);
        } else {
          store_n((float*)c_.out + at + d, y, n);
        }
      }
    }
  }

  const AttentionCall& c_;
  int64_t kv_head_, group_, token_, position_, begin_, end_, queries_, wide_;
  const int32_t* pages_;
  X *q_, *weights_;
  float *out_, *sum_, *maximum_, *scores_;
  char *keys_, *values_;
  const T *key_at_[kKeyTile], *value_at_[kKeyTile];
};

template <class T>
void run_task(const AttentionCall& call, const AttentionTask& task, int64_t kv_head,
              Buffer& scratch) {
#if defined(__AVX512BF16__)
  using Math = std::conditional_t<std::is_same_v<T, bf16>, DotMath, FloatMath>;
#else
  using Math = FloatMath;
#endif
  Walk<Math, T>(call, task, kv_head, scratch).run();
}

}  // namespace

void plan_attention(const LoomBatch& batch, int64_t queries_per_key,
                    std::vector<AttentionTask>& out) {
  int32_t tokens = int32_t(std::max<int64_t>(1, kTaskQueries / queries_per_key));
  for (int32_t row = 0; row < batch.batch; row++) {
    int32_t end = batch.qo_indptr[row + 1];
    for (int32_t first = batch.qo_indptr[row]; first < end; first += tokens) {
      out.push_back({row, first, std::min(tokens, end - first)});
    }
  }
}

void attention(Worker& worker, const AttentionCall& call, const std::vector<AttentionTask>& tasks) {
  static thread_local Buffer scratch;
  worker.parallel_for(int64_t(tasks.size()) * call.kv_heads, [&](int64_t i) {
    const AttentionTask& task = tasks[size_t(i / call.kv_heads)];
    if (call.pool_type == LOOM_BF16) {
      run_task<bf16>(call, task, i % call.kv_heads, scratch);
    } else {
      run_task<float>(call, task, i % call.kv_heads, scratch);
    }
  });
}

}  // namespace loom
