#include "experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear.h"
#include "rows.h"

namespace loom {

namespace {

// Tokens that run together: bounds the memory of a prompt that is computed whole.
constexpr int64_t kMostTokens = 1024;

// Some tokens' pairs in the order of their experts.
struct Pairs {
  std::vector<int64_t> place;    // of pair token * top_k + i
  std::vector<int64_t> expert;   // those with tokens, ascending
  std::vector<int64_t> begin;    // of their pairs, and the end of the last one

  Pairs(const int64_t* ids, int64_t pairs, int64_t experts) : place(size_t(pairs)) {
    std::vector<int64_t> next(size_t(experts) + 1);
    for (int64_t p = 0; p < pairs; p++) next[size_t(ids[p]) + 1]++;
    for (size_t e = 0; e < size_t(experts); e++) {
      if (next[e + 1]) {
        expert.push_back(int64_t(e));
        begin.push_back(next[e]);
      }
      next[e + 1] += next[e];
    }
    begin.push_back(pairs);
    for (int64_t p = 0; p < pairs; p++) place[size_t(p)] = next[size_t(ids[p])]++;
  }
};

template <class T>
class Mixture {
 public:
  Mixture(const LoomExperts& experts, const LoomExpertRows& rows, int64_t first, int64_t tokens,
          int threads, Buffer& scratch)
      : e_(experts),
        r_(rows),
        first_(first),
        tokens_(tokens),
        pairs_(rows.ids + first * rows.top_k, tokens * rows.top_k, experts.count),
        hidden_(experts.expert->gate_up.k),
        inner_(experts.expert->down.k),
        in_bytes_(row_bytes(experts.expert->gate_up.kind, hidden_)),
        inner_bytes_(row_bytes(experts.expert->down.kind, inner_)) {
    Arena measure;
    lay_out(measure, threads);
    Arena arena(scratch.reserve(measure.used()));
    lay_out(arena, threads);
    for (size_t i = 0; i < pairs_.expert.size(); i++) {
      const LoomExpert& expert = e_.expert[pairs_.expert[i]];
      int64_t at = pairs_.begin[i], count = pairs_.begin[i + 1] - at;
      Epilogue product, out;
      product.mode = Epilogue::kActAndMul;
      product.activation = e_.activation;
      product.out = product_ + at * inner_;
      product.stride = inner_;
      out.out = out_ + at * hidden_;
      out.stride = hidden_;
      gate_up_.push_back({&expert.gate_up, {in_ + at * in_bytes_, in_bytes_}, count, product});
      down_.push_back({&expert.down, {inner_in_ + at * inner_bytes_, inner_bytes_}, count, out});
    }
  }

  // On every thread of the team.
  void run(Worker& w) const {
    w.parallel_for(tokens_, [&](int64_t t) { encode_token(w, t); });
    linear_each(w, gate_up_);
    w.parallel_for(tokens_ * r_.top_k, [&](int64_t p) {
      encode_row(e_.expert->down, product_ + p * inner_, inner_in_ + p * inner_bytes_);
    });
    linear_each(w, down_);
    w.parallel_for(tokens_, [&](int64_t t) { add_up(t); });
  }

 private:
  void lay_out(Arena& arena, int threads) {
    int64_t pairs = tokens_ * r_.top_k;
    in_ = arena.take<char>(pairs * in_bytes_);
    inner_in_ = arena.take<char>(pairs * inner_bytes_);
    product_ = arena.take<float>(pairs * inner_);
    out_ = arena.take<float>(pairs * hidden_);
    wide_ = arena.take<float>(threads * hidden_);
  }

  // A token's row to its places among each of its experts' rows.
  void encode_token(Worker& w, int64_t t) const {
    float* wide = wide_ + w.id() * hidden_;
    copy_row((const T*)r_.x + (first_ + t) * r_.stride, hidden_, wide);
    const int64_t* place = &pairs_.place[size_t(t * r_.top_k)];
    char* first = in_ + place[0] * in_bytes_;
    encode_row(e_.expert->gate_up, wide, first);
    for (int64_t i = 1; i < r_.top_k; i++) {
      memcpy(in_ + place[i] * in_bytes_, first, size_t(in_bytes_));
    }
  }

  // Places ascend with the experts' ids.
  void add_up(int64_t t) const {
    const int64_t* place = &pairs_.place[size_t(t * r_.top_k)];
    const float* weight = r_.weights + (first_ + t) * r_.top_k;
    static thread_local std::vector<std::pair<int64_t, float>> parts;
    parts.clear();
    for (int64_t i = 0; i < r_.top_k; i++) parts.emplace_back(place[i], weight[i]);
    std::sort(parts.begin(), parts.end());
    T* out = (T*)r_.out + (first_ + t) * hidden_;
    for (int64_t d = 0; d < hidden_; d += kLanes) {
      int n = int(std::min<int64_t>(kLanes, hidden_ - d));
      F16 sum = splat(0.0f);
      for (auto [at, factor] : parts) {
        sum = sum + load_n(out_ + at * hidden_ + d, n) * splat(factor);
      }
      store_n(out + d, sum, n);
    }
  }

  const LoomExperts& e_;
  const LoomExpertRows& r_;
  int64_t first_, tokens_;
  Pairs pairs_;
  int64_t hidden_, inner_, in_bytes_, inner_bytes_;
  std::vector<LayerRows> gate_up_, down_;
  char *in_, *inner_in_;
  float *product_, *out_, *wide_;
};

template <class T>
void run_all(Team& team, const LoomExperts& experts, const LoomExpertRows& rows, Buffer& scratch) {
  for (int64_t first = 0; first < rows.tokens; first += kMostTokens) {
    int64_t tokens = std::min(kMostTokens, rows.tokens - first);
    Mixture<T> mixture(experts, rows, first, tokens, team.size(), scratch);
    team.run([&](Worker& worker) { mixture.run(worker); });
  }
}

}  // namespace

LoomStatus run_experts(Team& team, const LoomExperts& experts, const LoomExpertRows& rows,
                       Buffer& scratch) {
  const int64_t* end = rows.ids + rows.tokens * rows.top_k;
  bool known = std::all_of(rows.ids, end, [&](int64_t id) { return id >= 0 && id < experts.count; });
  if (!known) return LOOM_BAD_EXPERT;
  if (rows.type == LOOM_BF16) {
    run_all<bf16>(team, experts, rows, scratch);
  } else {
    run_all<float>(team, experts, rows, scratch);
  }
  return LOOM_OK;
}

}  // namespace loom
