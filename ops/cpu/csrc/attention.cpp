#include "attention.h"

#include <algorithm>

#include "attention_math.h"
#include "buffer.h"
#include "kv_codes.h"
#include "tiles.h"

namespace loom {

namespace {

// Queries of a task: enough to spread the transposing of a key tile, few enough for the cache.
constexpr int64_t kTaskQueries = 96;
constexpr float kNoMaximum = -1e30f;  // finite, so that differences of two of them are 0
constexpr float kNegativeInfinity = -INFINITY;

// What stands for a key or value that no query attends to: of every KV head that shares a task.
constexpr int64_t kMaxTaskElements = 4096;
alignas(64) const float kZeros[kMaxTaskElements] = {};

// The keys and values of a tile of positions, as many as a query attends to, in whole pairs of
// panels.
template <class T>
struct TileRows {
  int count;
  int64_t bytes;  // of a row: the task's KV heads lie side by side
  const T *key[kKeyTile], *value[kKeyTile];
  const float *key_scale[kKeyTile], *value_scale[kKeyTile];  // set where T is a code
};

// A task with its geometry.
struct Span {
  const int32_t* pages;
  int64_t token;     // the first of the step's tokens
  int64_t count;     // tokens
  int64_t position;  // of the first token
  int64_t begin, end;  // positions of the keys that some query attends to

  Span(const LoomBatch& b, const AttentionTask& task, int64_t window) {
    int64_t row_first = b.qo_indptr[task.row], row_end = b.qo_indptr[task.row + 1];
    pages = b.block_table + b.rows[task.row] * b.table_stride;
    token = task.first;
    count = task.count;
    position = b.kv_lens[task.row] - (row_end - row_first) + (task.first - row_first);
    end = position + task.count;
    begin = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
  }

  int64_t first_tile() const { return begin / kKeyTile * kKeyTile; }
};

// Keys of a tile in whole pairs of panels.
int whole_pairs(int64_t keys) {
  return int(std::min<int64_t>((keys + kPair - 1) / kPair * kPair, kKeyTile));
}

// Where a tile's keys and values are. Positions outside the span give zeros, so that what lies
// there (a page of somebody else, a NaN) is never read.
template <class T>
void locate(const AttentionCall& c, const Span& span, int64_t kv_head, int64_t tile,
            TileRows<T>& rows) {
  int64_t page_size = c.batch->page_size, step = c.kv_heads * c.dim;
  int64_t page = tile / page_size, offset = tile % page_size;
  rows.count = whole_pairs(span.end - tile);
  for (int i = 0; i < rows.count; i++) {
    bool in = tile + i >= span.begin && tile + i < span.end;
    int64_t slot = in ? span.pages[page] * page_size + offset : 0;
    int64_t at = slot * step + kv_head * c.dim;
    rows.key[i] = in ? (const T*)c.pools.k + at : (const T*)kZeros;
    rows.value[i] = in ? (const T*)c.pools.v + at : (const T*)kZeros;
    if constexpr (is_code<T>) {
      int64_t head = slot * c.kv_heads + kv_head;
      rows.key_scale[i] = in ? c.pools.k_scales + head : kZeros;
      rows.value_scale[i] = in ? c.pools.v_scales + head : kZeros;
    }
    if (++offset == page_size) {
      offset = 0;
      page++;
    }
  }
}

// One task: pointers into the thread's scratch, and the walk over the keys.
template <class Math, class T>
class Walk {
 public:
  Walk(const AttentionCall& call, const AttentionTask& task, Buffer& scratch)
      : c_(call),
        span_(*call.batch, task, call.spec.window),
        first_head_(task.first_head),
        kv_heads_(task.kv_heads),
        group_(call.heads / call.kv_heads),
        queries_(task.count * group_),
        wide_((call.dim + kPair - 1) / kPair * kPair) {
    Arena measure;
    lay_out(measure);
    Arena arena(scratch.reserve(measure.used()));
    lay_out(arena);
  }

  // `now` has the first tile's rows; after the last tile, `following` gives the first rows of what
  // this thread does next. The rows to come are fetched while a tile is computed: they lie
  // scattered over the pool, where no hardware prefetcher finds them.
  template <class Following>
  void run(TileRows<T>*& now, TileRows<T>*& ahead, Following&& following) {
    for (int64_t head = 0; head < kv_heads_; head++) start(head);
    for (int64_t tile = span_.first_tile(); tile < span_.end; tile += kKeyTile) {
      if (tile + kKeyTile < span_.end) {
        locate(c_, span_, first_head_, tile + kKeyTile, *ahead);
        ahead->bytes = kv_heads_ * c_.dim * int64_t(sizeof(T));
      } else {
        following(*ahead);
      }
      coming_ = ahead;
      fetched_ = 0;
      for (int64_t head = 0; head < kv_heads_; head++) {
        if constexpr (is_code<T>) {
          widen(*now, head);
          fill_keys(widened_, 0);
          fill_values(widened_, 0);
        } else {
          fill_keys(*now, head * c_.dim);
          fill_values(*now, head * c_.dim);
        }
        for (int64_t q = 0; q < queries_; q += kRowTile) {
          int rows = int(std::min<int64_t>(kRowTile, queries_ - q));
          if (sees(q, rows, tile)) update(head, q, rows, tile);
        }
      }
      fetch(2 * kKeyTile);
      std::swap(now, ahead);
    }
    for (int64_t head = 0; head < kv_heads_; head++) write(head);
  }

 private:
  using X = typename Math::X;
  using Wide = std::conditional_t<is_code<T>, X, T>;

  void lay_out(Arena& arena) {
    int64_t all = kv_heads_ * queries_;
    q_ = arena.take<X>(all * wide_);
    out_ = arena.take<float>(all * wide_);
    sum_ = arena.take<float>(all * kLanes);
    maximum_ = arena.take<float>(all);
    keys_ = arena.take<char>(kKeyTile / kPanel * key_panel_bytes());
    values_ = arena.take<char>(wide_ / kPanel * value_panel_bytes());
    scores_ = arena.take<float>(kRowTile * kKeyTile);
    weights_ = arena.take<X>(kRowTile * kKeyTile);
    if constexpr (is_code<T>) {
      key_codes_ = arena.take<X>(kKeyTile * wide_);
      value_codes_ = arena.take<X>(kKeyTile * wide_);
    }
  }

  int64_t key_lines() const { return c_.dim / Math::k_per_line; }
  int64_t key_panel_bytes() const { return 64 * key_lines(); }
  static constexpr int value_lines() { return kKeyTile / Math::k_per_line; }
  static constexpr int64_t value_panel_bytes() { return 64 * value_lines(); }

  int64_t position_of(int64_t query) const { return span_.position + query / group_; }

  // A query's place in the scratch: `query` counts within a KV head.
  int64_t at(int64_t head, int64_t query) const { return head * queries_ + query; }

  // Gathers the queries of a KV head; query i is its head i % group of token i / group. A sink is a
  // logit without a value: it starts the maximum and the sum.
  void start(int64_t head) {
    std::fill(out_ + at(head, 0) * wide_, out_ + at(head, queries_) * wide_, 0.0f);
    std::fill(sum_ + at(head, 0) * kLanes, sum_ + at(head, queries_) * kLanes, 0.0f);
    for (int64_t i = 0; i < queries_; i++) {
      int64_t q_head = (first_head_ + head) * group_ + i % group_, token = span_.token + i / group_;
      int64_t from = token * c_.q_stride + q_head * c_.q_head_stride;
      for (int64_t d = 0; d < c_.dim; d += kLanes) {
        int n = int(std::min<int64_t>(kLanes, c_.dim - d));
        F16 x = c_.q_type == LOOM_BF16 ? load_n((const bf16*)c_.q + from + d, n)
                                       : load_n((const float*)c_.q + from + d, n);
        store_n(q_ + at(head, i) * wide_ + d, x, n);
      }
      maximum_[at(head, i)] = c_.spec.sinks ? c_.spec.sinks[q_head] * kLog2e : kNoMaximum;
      if (c_.spec.sinks) sum_[at(head, i) * kLanes] = 1.0f;
    }
  }

  // Requests up to `rows` more of the rows to come. A few at a time, between other work: many at
  // once fill the queue of outstanding misses and everything waits.
  void fetch(int rows) {
    int end = std::min(fetched_ + rows, 2 * coming_->count);
    for (; fetched_ < end; fetched_++) {
      int i = fetched_ - coming_->count;
      auto* row = (const char*)(i < 0 ? coming_->key[fetched_] : coming_->value[i]);
      for (int64_t byte = 0; byte < coming_->bytes; byte += 64) prefetch(row + byte);
    }
  }

  // A KV head's codes as what the products take, and its scales.
  void widen(const TileRows<T>& now, int64_t head) {
    widened_.count = now.count;
    for (int i = 0; i < now.count; i++) {
      X *key = key_codes_ + i * wide_, *value = value_codes_ + i * wide_;
      widen_codes(now.key[i] + head * c_.dim, c_.dim, key);
      widen_codes(now.value[i] + head * c_.dim, c_.dim, value);
      widened_.key[i] = key;
      widened_.value[i] = value;
      key_scales_[i] = now.key_scale[i][head];
      value_scales_[i] = now.value_scale[i][head];
      fetch(2);
    }
  }

  void fill_keys(const TileRows<Wide>& now, int64_t offset) {
    constexpr int dims = kLanes * Math::k_per_line;  // of a line of 16 words
    for (int p = 0; p < now.count; p += kPanel) {
      char* panel = keys_ + p / kPanel * key_panel_bytes();
      for (int64_t d = 0; d < c_.dim; d += dims) {
        int n = int(std::min<int64_t>(dims, c_.dim - d));
        float* to = (float*)(panel + 64 * (d / Math::k_per_line));
        F16 block[kPanel];
        if (n == dims) {
          Math::transposed(&now.key[p], offset + d, block);
#pragma GCC unroll 16
          for (int i = 0; i < kPanel; i++) store(to + kPanel * i, block[i]);
        } else {
          for (int i = 0; i < kPanel; i++) block[i] = Math::words(now.key[p + i] + offset + d, n);
          transpose(block);
          for (int i = 0; i < n / Math::k_per_line; i++) store(to + kPanel * i, block[i]);
        }
        fetch(4);
      }
    }
  }

  void fill_values(const TileRows<Wide>& now, int64_t offset) {
    int lines = now.count / Math::k_per_line;
    for (int64_t d = 0; d < wide_; d += kPair) {
      char* panel = values_ + d / kPanel * value_panel_bytes();
      int n = int(std::min<int64_t>(kPair, c_.dim - d));
      for (int line = 0; line < lines; line += 4) {
        fetch(2);
#pragma GCC unroll 4
        for (int i = line; i < line + 4; i++) {
          char* to = panel + 64 * i;
          Math::value_lines(now.value, i, offset + d, n, to, to + value_panel_bytes());
        }
      }
    }
  }

  // Whether some of the queries attend to some key of the tile.
  bool sees(int64_t query, int rows, int64_t tile) const {
    if (tile > position_of(query + rows - 1)) return false;
    return c_.spec.window <= 0 || tile + kKeyTile > position_of(query) - c_.spec.window + 1;
  }

  void update(int64_t head, int64_t query, int rows, int64_t tile) {
    // Later keys have weight 0 for all of these queries, and adding 0 changes no sum.
    int keys = whole_pairs(position_of(query + rows - 1) + 1 - tile);
    Tile t = {(const char*)(q_ + at(head, query) * wide_), wide_ * int64_t(sizeof(X)), nullptr,
              nullptr, key_lines(), nullptr, kKeyTile, false, nullptr, nullptr};
    multiply(t, rows, keys_, key_panel_bytes(), keys, scores_);
    for (int r = 0; r < rows; r++) {
      soften(at(head, query + r), position_of(query + r), r, tile, keys);
      fetch(8);
    }
    t = {(const char*)weights_, kKeyTile * int64_t(sizeof(X)), nullptr, nullptr,
         keys / Math::k_per_line, nullptr, wide_, true, nullptr, nullptr};
    multiply(t, rows, values_, value_panel_bytes(), wide_, out_ + at(head, query) * wide_);
  }

  // A row tile times all panels, `columns` outputs.
  void multiply(Tile t, int rows, const char* panels, int64_t panel_bytes, int64_t columns,
                float* out) {
    for (int64_t column = 0; column < columns;) {
      t.panel0 = panels + column / kPanel * panel_bytes;
      t.panel1 = t.panel0 + panel_bytes;
      t.out = out + column;
      bool wide = rows <= kWideRowTile && columns - column >= 2 * kPair;
      wide ? Math::wide_tile(rows, t) : Math::tile(rows, t);
      column += wide ? 2 * kPair : kPair;
      fetch(8);
    }
  }

  // One step of the online softmax, in powers of two: turns a row of scores into weights and
  // rescales the row's sum and output to the new maximum.
  void soften(int64_t query, int64_t position, int r, int64_t tile, int keys) {
    int parts = keys / kLanes;
    F16 s[kKeyTile / kLanes], top = splat(kNegativeInfinity);
    int hi = int(std::min<int64_t>(position + 1 - tile, kKeyTile)), lo = 0;
    if (c_.spec.window > 0) {
      lo = int(std::clamp<int64_t>(position - c_.spec.window + 1 - tile, 0, kKeyTile));
    }
    for (int i = 0; i < parts; i++) {
      s[i] = load(scores_ + r * kKeyTile + i * kLanes);
      if constexpr (is_code<T>) s[i] = s[i] * load(key_scales_ + i * kLanes);
      if (c_.spec.soft_cap > 0) {
        F16 x = s[i] * splat(c_.spec.scale) / splat(c_.spec.soft_cap);
        s[i] = tanh(x) * splat(c_.spec.soft_cap * kLog2e);
      } else {
        s[i] = s[i] * splat(c_.spec.scale * kLog2e);
      }
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
      sum = sum + weight;
      if constexpr (is_code<T>) weight = weight * load(value_scales_ + i * kLanes);
      store(weights_ + r * kKeyTile + i * kLanes, weight);
    }
    store(sum_ + query * kLanes, sum);
  }

  void write(int64_t head) const {
    for (int64_t i = 0; i < queries_; i++) {
      int64_t q_head = (first_head_ + head) * group_ + i % group_, token = span_.token + i / group_;
      int64_t to = token * c_.out_stride + q_head * c_.dim;
      float* out = out_ + at(head, i) * wide_;
      F16 inverse = splat(1.0f / sum(load(sum_ + at(head, i) * kLanes)));
      for (int64_t d = 0; d < wide_; d += kPair) Math::restore(out + d);
      for (int64_t d = 0; d < c_.dim; d += kLanes) {
        int n = int(std::min<int64_t>(kLanes, c_.dim - d));
        F16 y = load(out + d) * inverse;
        if (c_.out_type == LOOM_BF16) {
          store_n((bf16*)c_.out + to + d, y, n);
        } else {
          store_n((float*)c_.out + to + d, y, n);
        }
      }
    }
  }

  const AttentionCall& c_;
  Span span_;
  int64_t first_head_, kv_heads_, group_, queries_, wide_;
  X *q_, *weights_;
  float *out_, *sum_, *maximum_, *scores_;
  char *keys_, *values_;
  X *key_codes_, *value_codes_;  // where T is a code, [kKeyTile, wide_], as are:
  TileRows<Wide> widened_;
  float key_scales_[kKeyTile], value_scales_[kKeyTile];
  const TileRows<T>* coming_ = nullptr;
  int fetched_ = 0;
};

template <class T>
void run_tasks(Worker& worker, const AttentionCall& c, const std::vector<AttentionTask>& tasks) {
#if defined(__AVX512BF16__)
  using Math = std::conditional_t<std::is_same_v<T, float>, FloatMath, DotMath>;
#else
  using Math = FloatMath;
#endif
  static thread_local Buffer scratch;
  TileRows<T> two[2], *now = &two[0], *ahead = &two[1];
  int64_t count = int64_t(tasks.size()), i = worker.id();
  auto first_rows = [&](const AttentionTask& task, TileRows<T>& rows) {
    Span span(*c.batch, task, c.spec.window);
    locate(c, span, task.first_head, span.first_tile(), rows);
    rows.bytes = task.kv_heads * c.dim * int64_t(sizeof(T));
  };
  if (i < count) first_rows(tasks[size_t(i)], *now);
  while (i < count) {
    int64_t next = worker.claim();
    Walk<Math, T> walk(c, tasks[size_t(i)], scratch);
    walk.run(now, ahead, [&](TileRows<T>& rows) {
      if (next < count) {
        first_rows(tasks[size_t(next)], rows);
      } else {
        rows.count = 0;
      }
    });
    i = next;
  }
  worker.finish();
}

void plan_attention(const LoomBatch& batch, const AttentionShape& shape, int threads,
                    std::vector<AttentionTask>& out) {
  int64_t group = shape.heads / shape.kv_heads;
  int32_t tokens = int32_t(std::max<int64_t>(1, kTaskQueries / group));
  // A decode row's KV heads lie side by side in the pool; read together they are long stretches of
  // memory, several times as fast as one head's pieces. With few rows the threads share the heads.
  bool together = batch.batch >= 4 * threads &&
                  shape.kv_heads * shape.dim <= kMaxTaskElements;
  for (int32_t row = 0; row < batch.batch; row++) {
    int32_t end = batch.qo_indptr[row + 1];
    for (int32_t first = batch.qo_indptr[row]; first < end; first += tokens) {
      int32_t count = std::min(tokens, end - first);
      int32_t heads = together && count * group <= kRowTile ? int32_t(shape.kv_heads) : 1;
      for (int32_t head = 0; head < shape.kv_heads; head += heads) {
        out.push_back({row, first, count, head, heads});
      }
    }
  }
}

}  // namespace

void AttentionPlans::begin(const LoomBatch& batch, int threads) {
  batch_ = &batch;
  threads_ = threads;
  used_ = 0;
}

const std::vector<AttentionTask>& AttentionPlans::of(const AttentionShape& shape) {
  for (size_t i = 0; i < used_; i++) {
    if (plans_[i].shape == shape) return plans_[i].tasks;
  }
  if (used_ == plans_.size()) plans_.emplace_back();
  Plan& plan = plans_[used_++];
  plan.shape = shape;
  plan.tasks.clear();
  plan_attention(*batch_, shape, threads_, plan.tasks);
  return plan.tasks;
}

void attention(Worker& worker, const AttentionCall& call, const std::vector<AttentionTask>& tasks) {
  with_pool_type(call.pool_type, [&](auto* p) {
    run_tasks<std::remove_pointer_t<decltype(p)>>(worker, call, tasks);
  });
}

}  // namespace loom
