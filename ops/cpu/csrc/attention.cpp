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

// What stands for a key or value that no query attends to.
alignas(64) const float kZeros[256] = {};

// How the products are computed: what a query and a softmax weight are stored as, and how a tile's
// rows become panels. Two value panels hold 32 dimensions in an order of their own, which
// `restore` undoes in the output.
struct FloatMath {
  using X = float;
  static constexpr int k_per_line = 1;
  static void tile(int rows, const Tile& t) { tile_float(rows, t); }

  template <class T>
  static F16 words(const T* row, int n) {
    return n >= kLanes ? load(row) : load_n(row, n);
  }
  template <class T>
  static void value_lines(const T* const* values, int line, int64_t d, int n, char* panel0,
                          char* panel1) {
    const T* from = values[line] + d;
    store((float*)panel0, load_n(from, n));
    store((float*)panel1, n > kLanes ? load_n(from + kLanes, n - kLanes) : splat(0.0f));
  }
  static void restore(float*) {}
};

#if defined(__AVX512BF16__)
struct DotMath {
  using X = bf16;
  static constexpr int k_per_line = 2;
  static void tile(int rows, const Tile& t) { tile_bf16(rows, t); }

  // Up to sixteen pairs of a key's dimensions.
  static F16 words(const bf16* row, int n) {
    return n >= 2 * kLanes ? load((const float*)row) : load_n((const float*)row, n / 2);
  }
  // 32 dimensions of two successive keys' values, paired. Unpacking within 128-bit lanes leaves
  // dimensions 8 i .. 8 i + 3 in the first panel and 8 i + 4 .. 8 i + 7 in the second.
  static void value_lines(const bf16* const* values, int line, int64_t d, int n, char* panel0,
                          char* panel1) {
    __mmask32 in = n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1;
    __m512i a = _mm512_maskz_loadu_epi16(in, values[2 * line] + d);
    __m512i b = _mm512_maskz_loadu_epi16(in, values[2 * line + 1] + d);
    _mm512_storeu_si512(panel0, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(panel1, _mm512_unpackhi_epi16(a, b));
  }
  static void restore(float* out) {
    float ordered[kPair];
    for (int i = 0; i < 8; i++) memcpy(ordered + 4 * i, out + i % 2 * kPanel + i / 2 * 4, 16);
    memcpy(out, ordered, sizeof(ordered));
  }
};
#endif

// The keys and values of a tile of positions.
template <class T>
struct TileRows {
  const T *key[kKeyTile], *value[kKeyTile];
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

// Where a tile's keys and values are. Positions outside the span give zeros, so that what lies
// there (a page of somebody else, a NaN) is never read.
template <class T>
void locate(const AttentionCall& c, const Span& span, int64_t kv_head, int64_t tile,
            TileRows<T>& rows) {
  int64_t page_size = c.batch->page_size, step = c.kv_heads * c.dim;
  int64_t page = tile / page_size, offset = tile % page_size;
  for (int i = 0; i < kKeyTile; i++) {
    bool in = tile + i >= span.begin && tile + i < span.end;
    int64_t slot = in ? span.pages[page] * page_size + offset : 0;
    int64_t at = slot * step + kv_head * c.dim;
    rows.key[i] = in ? (const T*)c.pools.k + at : (const T*)kZeros;
    rows.value[i] = in ? (const T*)c.pools.v + at : (const T*)kZeros;
    if (++offset == page_size) {
      offset = 0;
      page++;
    }
  }
}

// One task on one KV head: pointers into the thread's scratch, and the walk over the keys.
template <class Math, class T>
class Walk {
 public:
  Walk(const AttentionCall& call, const AttentionTask& task, int64_t kv_head, Buffer& scratch)
      : c_(call),
        span_(*call.batch, task, call.spec.window),
        kv_head_(kv_head),
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
    start();
    for (int64_t tile = span_.first_tile(); tile < span_.end; tile += kKeyTile) {
      if (tile + kKeyTile < span_.end) {
        locate(c_, span_, kv_head_, tile + kKeyTile, *ahead);
      } else {
        following(*ahead);
      }
      fill_keys(*now, *ahead);
      fill_values(*now, *ahead);
      for (int64_t q = 0; q < queries_; q += kRowTile) {
        int rows = int(std::min<int64_t>(kRowTile, queries_ - q));
        if (sees(q, rows, tile)) update(q, rows, tile);
      }
      std::swap(now, ahead);
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

  int64_t position_of(int64_t query) const { return span_.position + query / group_; }

  // Gathers the queries; query i is head i % group of token i / group. A sink is a logit without a
  // value: it starts the maximum and the sum.
  void start() {
    std::fill(out_, out_ + queries_ * wide_, 0.0f);
    std::fill(sum_, sum_ + queries_ * kLanes, 0.0f);
    for (int64_t i = 0; i < queries_; i++) {
      int64_t head = kv_head_ * group_ + i % group_, token = span_.token + i / group_;
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

  void fetch(const T* row) const {
    for (int64_t d = 0; d < c_.dim; d += 64 / int64_t(sizeof(T))) {
      _mm_prefetch((const char*)(row + d), _MM_HINT_T1);
    }
  }

  void fill_keys(const TileRows<T>& now, const TileRows<T>& ahead) {
    constexpr int dims = kLanes * Math::k_per_line;  // of a line of 16 words
    for (int p = 0; p < kKeyTile; p += kPanel) {
      char* panel = keys_ + p / kPanel * key_panel_bytes();
      for (int i = 0; i < kPanel; i++) fetch(ahead.key[p + i]);
      for (int64_t d = 0; d < c_.dim; d += dims) {
        int n = int(std::min<int64_t>(dims, c_.dim - d));
        F16 block[kPanel];
        for (int i = 0; i < kPanel; i++) block[i] = Math::words(now.key[p + i] + d, n);
        transpose(block);
        float* to = (float*)(panel + 64 * (d / Math::k_per_line));
        for (int i = 0; i < n / Math::k_per_line; i++) store(to + kPanel * i, block[i]);
      }
    }
  }

  void fill_values(const TileRows<T>& now, const TileRows<T>& ahead) {
    for (int line = 0; line < value_lines(); line++) {
      for (int i = 0; i < Math::k_per_line; i++) fetch(ahead.value[line * Math::k_per_line + i]);
      for (int64_t d = 0; d < wide_; d += kPair) {
        char* panel = values_ + d / kPanel * value_panel_bytes() + 64 * line;
        int n = int(std::min<int64_t>(kPair, c_.dim - d));
        Math::value_lines(now.value, line, d, n, panel, panel + value_panel_bytes());
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
      s[i] = load(scores_ + r * kKeyTile + i * kLanes);
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
      store(weights_ + r * kKeyTile + i * kLanes, weight);
      sum = sum + weight;
    }
    store(sum_ + query * kLanes, sum);
  }

  void write() const {
    for (int64_t i = 0; i < queries_; i++) {
      int64_t head = kv_head_ * group_ + i % group_, token = span_.token + i / group_;
      int64_t at = token * c_.out_stride + head * c_.dim;
      F16 inverse = splat(1.0f / sum(load(sum_ + i * kLanes)));
      for (int64_t d = 0; d < wide_; d += kPair) Math::restore(out_ + i * wide_ + d);
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
  Span span_;
  int64_t kv_head_, group_, queries_, wide_;
  X *q_, *weights_;
  float *out_, *sum_, *maximum_, *scores_;
  char *keys_, *values_;
};

template <class T>
void run_tasks(Worker& worker, const AttentionCall& c, const std::vector<AttentionTask>& tasks) {
#if defined(__AVX512BF16__)
  using Math = std::conditional_t<std::is_same_v<T, bf16>, DotMath, FloatMath>;
#else
  using Math = FloatMath;
#endif
  static thread_local Buffer scratch;
  TileRows<T> two[2], *now = &two[0], *ahead = &two[1];
  int64_t count = int64_t(tasks.size()) * c.kv_heads, i = worker.id();
  auto first_rows = [&](int64_t task, TileRows<T>& rows) {
    Span span(*c.batch, tasks[size_t(task / c.kv_heads)], c.spec.window);
    locate(c, span, task % c.kv_heads, span.first_tile(), rows);
  };
  if (i < count) first_rows(i, *now);
  while (i < count) {
    int64_t next = worker.claim();
    Walk<Math, T> walk(c, tasks[size_t(i / c.kv_heads)], i % c.kv_heads, scratch);
    walk.run(now, ahead, [&](TileRows<T>& rows) {
      if (next < count) {
        first_rows(next, rows);
      } else {
        rows = *now;  // nothing to come: what is in the cache costs nothing
      }
    });
    i = next;
  }
  worker.finish();
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
  if (call.pool_type == LOOM_BF16) {
    run_tasks<bf16>(worker, call, tasks);
  } else {
    run_tasks<float>(worker, call, tasks);
  }
}

}  // namespace loom
