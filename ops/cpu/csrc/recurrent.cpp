#include "recurrent.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace loom {

namespace {

// Channels, and columns of a matrix, that a thread takes at once: as many sums of F16 run side by
// side in gated_delta as hide the latency of one.
constexpr int64_t kChannels = 256;
constexpr int kSums = 4, kColumns = kSums * kLanes;

// Up to kChannels channels of one row.
template <class T>
class Channels {
 public:
  Channels(const LoomConv& conv, const LoomRecurrent& rows, int64_t row, int64_t channel)
      : c_(conv),
        r_(rows),
        kept_(conv.kernel - 1),
        from_(channel),
        to_(std::min(conv.channels, channel + kChannels)),
        first_(rows.starts[row]),
        x_((const T*)conv.x + first_ * conv.stride),
        row_(row) {
    int64_t source = rows.sources[row];
    before_ = source < 0 ? nullptr : rows.before + source * kept_ * conv.channels;
  }

  void run() const {
    for (int64_t t = 0; t < r_.starts[row_ + 1] - first_; t++) {
      for (int64_t d = from_; d < to_; d += kLanes) {
        int n = int(std::min<int64_t>(kLanes, to_ - d));
        F16 y = input(t - kept_, d, n) * load_n(c_.weight + d, n);
        for (int64_t j = 1; j <= kept_; j++) {
          y = fma(input(t - kept_ + j, d, n), load_n(c_.weight + j * c_.channels + d, n), y);
        }
        store_n(c_.out + (first_ + t) * c_.channels + d, y, n);
      }
    }
    for (int64_t s = r_.stops[row_]; s < r_.stops[row_ + 1]; s++) {
      if (r_.stop_slots[s] >= 0) leave(r_.stop_tokens[s], r_.stop_slots[s]);
    }
  }

 private:
  // Of a token of the row; those before its first one are the state's.
  F16 input(int64_t t, int64_t d, int n) const {
    if (t >= 0) return load_n(x_ + t * c_.stride + d, n);
    return before_ ? load_n(before_ + (kept_ + t) * c_.channels + d, n) : splat(0.0f);
  }

  // May write to what it reads: place j gets what was in it or in a later one.
  void leave(int64_t tokens, int64_t slot) const {
    float* state = r_.states + slot * kept_ * c_.channels;
    for (int64_t j = 0; j < kept_; j++) {
      for (int64_t d = from_; d < to_; d += kLanes) {
        int n = int(std::min<int64_t>(kLanes, to_ - d));
        store_n(state + j * c_.channels + d, input(tokens - kept_ + j, d, n), n);
      }
    }
  }

  const LoomConv& c_;
  const LoomRecurrent& r_;
  int64_t kept_, from_, to_, first_;
  const T* x_;
  int64_t row_;
  const float* before_;
};

// x [dim] of length 1, times scale.
void unit(const float* x, int64_t dim, float scale, float* out) {
  F16 squares = splat(0.0f);
  for (int64_t i = 0; i < dim; i += kLanes) {
    F16 a = load_n(x + i, int(std::min<int64_t>(kLanes, dim - i)));
    squares = fma(a, a, squares);
  }
  F16 factor = splat(scale / std::sqrt(sum(squares) + 1e-6f));
  for (int64_t i = 0; i < dim; i += kLanes) {
    int n = int(std::min<int64_t>(kLanes, dim - i));
    store_n(out + i, load_n(x + i, n) * factor, n);
  }
}

// Up to kColumns columns of the matrix of one row and head.
class Columns {
 public:
  Columns(const LoomDelta& delta, const LoomRecurrent& rows, int64_t row, int64_t head,
          int64_t column)
      : d_(delta), r_(rows), row_(row), head_(head), column_(column) {
    static thread_local std::vector<float> memory;
    memory.resize(size_t(d_.key_dim * (kColumns + 2)));
    state_ = memory.data();
    query_ = state_ + d_.key_dim * kColumns;
    key_ = query_ + d_.key_dim;
  }

  void run() {
    int64_t source = r_.sources[row_], t = r_.starts[row_];
    for (int64_t i = 0; i < d_.key_dim; i++) {
      for (int c = 0; c < kColumns; c += kLanes) {
        F16 row = source < 0 ? splat(0.0f) : load_n(at(r_.before, source, i) + c, left(c));
        store(state_ + i * kColumns + c, row);
      }
    }
    for (int64_t s = r_.stops[row_]; s < r_.stops[row_ + 1]; s++) {
      for (int64_t end = r_.starts[row_] + r_.stop_tokens[s]; t < end; t++) step(t);
      if (r_.stop_slots[s] >= 0) leave(r_.stop_slots[s]);
    }
  }

 private:
  template <class Float>
  Float* at(Float* states, int64_t slot, int64_t i) const {
    return states + ((slot * d_.value_heads + head_) * d_.key_dim + i) * d_.value_dim + column_;
  }

  // Columns from c on; none where negative.
  int left(int c) const { return int(std::min<int64_t>(kLanes, d_.value_dim - column_ - c)); }

  void step(int64_t t) {
    int64_t shared = head_ / (d_.value_heads / d_.key_heads), own = t * d_.value_heads + head_;
    unit(d_.q + t * d_.q_stride + shared * d_.q_head_stride, d_.key_dim,
         1.0f / std::sqrt(float(d_.key_dim)), query_);
    unit(d_.k + t * d_.k_stride + shared * d_.k_head_stride, d_.key_dim, 1.0f, key_);
    F16 decay = exp(splat(d_.decay[own])), rate = splat(d_.rate[own]), sums[kSums], change[kSums];
    for (F16& sum : sums) sum = splat(0.0f);
    for (int64_t i = 0; i < d_.key_dim; i++) {
      F16 key = splat(key_[i]);
      const float* row = state_ + i * kColumns;
      for (int c = 0; c < kSums; c++) sums[c] = fma(key, load(row + c * kLanes), sums[c]);
    }
    const float* value = d_.v + t * d_.v_stride + head_ * d_.v_head_stride + column_;
    for (int c = 0; c < kSums; c++) {
      F16 wanted = load_n(value + c * kLanes, left(c * kLanes));
      change[c] = (wanted - decay * sums[c]) * rate;
      sums[c] = splat(0.0f);
    }
    for (int64_t i = 0; i < d_.key_dim; i++) {
      F16 key = splat(key_[i]), query = splat(query_[i]);
      float* row = state_ + i * kColumns;
      for (int c = 0; c < kSums; c++) {
        F16 now = fma(key, change[c], decay * load(row + c * kLanes));
        store(row + c * kLanes, now);
        sums[c] = fma(query, now, sums[c]);
      }
    }
    float* out = d_.out + own * d_.value_dim + column_;
    for (int c = 0; c < kSums; c++) store_n(out + c * kLanes, sums[c], left(c * kLanes));
  }

  void leave(int64_t slot) const {
    for (int64_t i = 0; i < d_.key_dim; i++) {
      float* to = at(r_.states, slot, i);
      for (int c = 0; c < kColumns; c += kLanes) {
        store_n(to + c, load(state_ + i * kColumns + c), left(c));
      }
    }
  }

  const LoomDelta& d_;
  const LoomRecurrent& r_;
  int64_t row_, head_, column_;
  float *state_, *query_, *key_;
};

}  // namespace

bool rows_fit(const LoomRecurrent& r) {
  if (r.starts[0] < 0 || r.starts[r.batch] > r.tokens) return false;
  if (r.stops[0] < 0 || r.stops[r.batch] > r.stop_count) return false;
  for (int64_t b = 0; b < r.batch; b++) {
    if (r.sources[b] >= r.before_slots || r.stops[b + 1] < r.stops[b]) return false;
  }
  for (int64_t b = 0; b < r.batch; b++) {
    int64_t at = 0;
    for (int64_t s = r.stops[b]; s < r.stops[b + 1]; s++) {
      if (r.stop_tokens[s] < at || r.stop_slots[s] >= r.slots) return false;
      at = r.stop_tokens[s];
    }
    if (at != r.starts[b + 1] - r.starts[b]) return false;
  }
  return true;
}

void causal_conv(Team& team, const LoomConv& conv, const LoomRecurrent& rows) {
  int64_t pieces = (conv.channels + kChannels - 1) / kChannels;
  team.run([&](Worker& w) {
    w.parallel_for(rows.batch * pieces, [&](int64_t i) {
      int64_t row = i / pieces, channel = i % pieces * kChannels;
      if (conv.type == LOOM_BF16) {
        Channels<bf16>(conv, rows, row, channel).run();
      } else {
        Channels<float>(conv, rows, row, channel).run();
      }
    });
  });
}

void gated_delta(Team& team, const LoomDelta& delta, const LoomRecurrent& rows) {
  int64_t pieces = (delta.value_dim + kColumns - 1) / kColumns, each = delta.value_heads * pieces;
  team.run([&](Worker& w) {
    w.parallel_for(rows.batch * each, [&](int64_t i) {
      int64_t of_row = i % each;
      Columns(delta, rows, i / each, of_row / pieces, of_row % pieces * kColumns).run();
    });
  });
}

}  // namespace loom
