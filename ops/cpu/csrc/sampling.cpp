#include "sampling.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "philox.h"
#include "simd.h"

namespace loom {

namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
// -log(-log(1 - 2^-24)): no noise is larger.
constexpr float kLargestNoise = 16.64f;
constexpr size_t kFewCandidates = 64;

F16 gumbel(F16 uniform) {
  F16 zero = splat(0.0f);
  return zero - log(zero - log(uniform));
}

// What a vocabulary's logits have in common; `best` is the lowest id among the largest.
struct Peak {
  float value = kNegativeInfinity;
  int64_t best = -1;
  bool nan = false;

  bool bad() const { return nan || value == kNegativeInfinity; }
};

// Sixteen logits from `i` on; past the vocabulary there is -inf.
F16 lanes_at(const float* logits, int64_t i, int64_t vocab) {
  if (i + kLanes <= vocab) return load(logits + i);
  int n = int(std::max<int64_t>(0, vocab - i));
  return keep_between(load_n(logits + i, n), 0, n, splat(kNegativeInfinity));
}

Peak find_peak(const float* logits, int64_t vocab) {
  Peak peak;
  F16 top = splat(kNegativeInfinity), poison = splat(0.0f);
  for (int64_t i = 0; i < vocab; i += kLanes) {
    F16 x = lanes_at(logits, i, vocab);
    top = max(top, x);
    // NaN * 0 is NaN; so is infinity * 0, hence the clamp (which keeps a NaN).
    poison = fma(min(splat(1e30f), max(splat(-1e30f), x)), splat(0.0f), poison);
  }
  float total = sum(poison);
  peak.nan = total != total;
  if (peak.nan) return peak;
  peak.value = hmax(top);
  if (peak.bad()) return peak;
  float below = std::nextafter(peak.value, kNegativeInfinity);
  int64_t block = 0;
  while (!any_above(lanes_at(logits, block, vocab), below)) block += kLanes;
  peak.best = std::find(logits + block, logits + vocab, peak.value) - logits;
  return peak;
}

void penalize(float* logits, const LoomSampling& s, int64_t row) {
  int64_t state = s.state_rows[row];
  const int32_t* counts = s.output_counts + state * s.vocab;
  const uint8_t* prompt = s.prompt_mask + state * s.vocab;
  float repetition = s.repetition[row], frequency = s.frequency[row], presence = s.presence[row];
  for (int64_t t = 0; t < s.vocab; t++) {
    float x = logits[t], repeated = x > 0 ? x / repetition : x * repetition;
    x = (counts[t] > 0) | (prompt[t] != 0) ? repeated : x;
    logits[t] = x - (frequency * float(counts[t]) + presence * float(counts[t] > 0));
  }
}

void mask(float* logits, const int32_t* bits, int64_t vocab) {
  for (int64_t t = 0; t < vocab; t += 32) {
    uint32_t word = uint32_t(bits[t / 32]);
    if (word == 0xffffffffu) continue;
    int64_t end = std::min<int64_t>(32, vocab - t);
    for (int64_t i = 0; i < end; i++) {
      if (!(word >> i & 1)) logits[t + i] = kNegativeInfinity;
    }
  }
}

struct Candidate {
  float value;
  int32_t id;

  // Largest first, lower ids first among equals.
  bool operator<(const Candidate& other) const {
    return value > other.value || (value == other.value && id < other.id);
  }
};

struct Filter {
  int32_t top_k;
  float top_p, min_p;

  bool on() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

// The tokens of one row that the filters keep, best first.
class Filtering {
 public:
  Filtering(const float* scaled, int64_t vocab, float top, Filter filter)
      : scaled_(scaled), vocab_(vocab), top_(top), filter_(filter) {}

  const std::vector<Candidate>& run() {
    if (filter_.top_k <= 0) weigh();
    gather();
    if (filter_.top_k > 0 && filter_.top_k < int64_t(kept_.size())) {
      std::nth_element(kept_.begin(), kept_.begin() + filter_.top_k, kept_.end());
      kept_.resize(size_t(filter_.top_k));
    }
    std::sort(kept_.begin(), kept_.end());
    if (filter_.top_k > 0) {
      float e[kLanes];
      for (size_t i = 0; i < kept_.size(); i++) {
        if (i % kLanes == 0) weights(i, e);
        total_ += e[i % kLanes];
      }
    }
    cut();
    return kept_;
  }

 private:
  // Sums of exp(logit - top): of all tokens, and of those within each of `kDistances` of the top.
  void weigh() {
    constexpr int64_t block = 64 * kLanes;  // summed in float, then in double
    for (int64_t begin = 0; begin < vocab_; begin += block) {
      F16 sums[1 + kNear];
      for (F16& sum : sums) sum = splat(0.0f);
      for (int64_t i = begin; i < std::min(begin + block, vocab_); i += kLanes) {
        F16 x = lanes_at(scaled_, i, vocab_), e = exp(x - splat(top_));
        sums[0] = sums[0] + e;
        for (int j = 0; j < kNear; j++) {
          sums[1 + j] = sums[1 + j] + where_above(x, top_ - kDistances[j], e, splat(0.0f));
        }
      }
      total_ += double(sum(sums[0]));
      for (int j = 0; j < kNear; j++) near_[j] += double(sum(sums[1 + j]));
    }
  }

  void collect(float threshold) {
    kept_.clear();
    for (int64_t i = 0; i < vocab_; i += kLanes) {
      if (!any_above(lanes_at(scaled_, i, vocab_), threshold)) continue;
      for (int64_t j = i; j < std::min(i + kLanes, vocab_); j++) {
        if (scaled_[j] > threshold) kept_.push_back({scaled_[j], int32_t(j)});
      }
    }
  }

  // Collects a superset of what is kept: the tokens within some distance of the best one, tried
  // with growing distances, since sorting the whole vocabulary costs milliseconds.
  void gather() {
    for (int j = 0; j < kNear; j++) {
      if (filter_.top_k > 0) {
        collect(top_ - kDistances[j]);
        if (int64_t(kept_.size()) >= filter_.top_k) return;
      } else if (filter_.top_p < 1 ? near_[j] > filter_.top_p * total_ * (1 + 1e-5)
                                   : std::exp(-kDistances[j]) < filter_.min_p * 0.999f) {
        collect(top_ - kDistances[j]);
        return;
      }
    }
    collect(kNegativeInfinity);
  }

  // exp(logit - top) of up to sixteen kept tokens from `begin` on.
  void weights(size_t begin, float out[kLanes]) const {
    size_t n = std::min<size_t>(kLanes, kept_.size() - begin);
    for (size_t i = 0; i < n; i++) out[i] = kept_[begin + i].value;
    store_n(out, exp(load_n(out, int(n)) - splat(top_)), int(n));
  }

  // top-p keeps what has less than top_p before it, min-p what is not too far below the best;
  // both keep a prefix of the order, and at least the best.
  void cut() {
    double before = 0;
    float e[kLanes], best = 0;
    size_t keep = 0;
    for (; keep < kept_.size(); keep++) {
      if (keep % kLanes == 0) weights(keep, e);
      float p = float(e[keep % kLanes] / total_);
      if (keep == 0) best = p;
      bool in_mass = filter_.top_p >= 1 || keep == 0 || before < double(filter_.top_p);
      if (!in_mass || p < filter_.min_p * best) break;
      before += double(p);
    }
    kept_.resize(keep);
  }

  const float* scaled_;
  int64_t vocab_;
  float top_;
  Filter filter_;
  static constexpr int kNear = 4;
  static constexpr float kDistances[kNear] = {3.0f, 6.0f, 9.0f, 14.0f};
  double total_ = 0, near_[kNear] = {};
  std::vector<Candidate> kept_;
};

// argmax of value + noise over the kept tokens, the lowest id among equals.
int64_t draw_among(const std::vector<Candidate>& kept, const Philox& philox) {
  float best = kNegativeInfinity;
  int64_t chosen = -1;
  for (const Candidate& c : kept) {
    float uniform[64], noise[kLanes];
    philox.fill(c.id / 64, uniform);
    store(noise, gumbel(splat(uniform[c.id % 64])));
    float total = c.value + noise[0];
    if (total > best || (total == best && c.id < chosen)) {
      best = total;
      chosen = c.id;
    }
  }
  return chosen;
}

// The same over the whole vocabulary. Blocks whose best logit cannot win with the largest possible
// noise are passed over; the block of the best logit goes first, so that most are.
int64_t draw(const float* scaled, int64_t vocab, int64_t peak, const Philox& philox) {
  float best = kNegativeInfinity;
  int64_t chosen = vocab;
  auto visit = [&](int64_t block) {
    int64_t begin = block * 64, count = std::min<int64_t>(64, vocab - begin);
    F16 x[4], top = splat(kNegativeInfinity);
    for (int i = 0; i < 4; i++) {
      int n = int(std::clamp<int64_t>(count - i * kLanes, 0, kLanes));
      x[i] = splat(kNegativeInfinity);
      if (n > 0) x[i] = keep_between(load_n(scaled + begin + i * kLanes, n), 0, n, x[i]);
      top = max(top, x[i]);
    }
    if (hmax(top) + kLargestNoise < best) return;
    float values[64];
    philox.fill(block, values);
    for (int i = 0; i < 4; i++) {
      store(values + i * kLanes, x[i] + gumbel(load(values + i * kLanes)));
    }
    for (int64_t i = 0; i < count; i++) {
      if (values[i] > best || (values[i] == best && begin + i < chosen)) {
        best = values[i];
        chosen = begin + i;
      }
    }
  };
  visit(peak / 64);
  for (int64_t block = 0; block * 64 < vocab; block++) {
    if (block != peak / 64) visit(block);
  }
  return chosen;
}

// A draw among what the filters keep. Random numbers come in blocks of 64 tokens, so with many kept
// tokens whole blocks are drawn.
int64_t draw_filtered(float* scaled, int64_t vocab, float top, Filter filter,
                      const Philox& philox) {
  Filtering filtering(scaled, vocab, top, filter);
  const std::vector<Candidate>& kept = filtering.run();
  if (kept.size() <= kFewCandidates) return draw_among(kept, philox);
  std::fill(scaled, scaled + vocab, kNegativeInfinity);
  for (const Candidate& c : kept) scaled[c.id] = c.value;
  return draw(scaled, vocab, kept[0].id, philox);
}

int64_t sample_row(float* logits, const LoomSampling& s, int64_t row, const int32_t* mask_bits) {
  bool penalized = s.state_rows && s.state_rows[row] >= 0;
  if (penalized) penalize(logits, s, row);
  if (mask_bits) mask(logits, mask_bits, s.vocab);
  Peak peak = find_peak(logits, s.vocab);
  if (peak.bad()) return -1;
  float temperature = s.temperature[row];
  int64_t chosen = peak.best;
  if (temperature > 0) {
    for (int64_t i = 0; i < s.vocab; i++) logits[i] /= temperature;
    Philox philox(s.seed[row], s.position[row]);
    Filter filter = {s.top_k[row], s.top_p[row], s.min_p[row]};
    float top = logits[peak.best];
    chosen = filter.on() ? draw_filtered(logits, s.vocab, top, filter, philox)
                         : draw(logits, s.vocab, peak.best, philox);
  }
  if (penalized && chosen >= 0) s.output_counts[s.state_rows[row] * s.vocab + chosen]++;
  return chosen;
}

bool inside(const int64_t* rows, const int64_t* tokens, int64_t count, const LoomSampling& s) {
  for (int64_t i = 0; i < count; i++) {
    if (rows[i] < 0 || rows[i] >= s.batch) return false;
    if (tokens && (tokens[i] < 0 || tokens[i] >= s.vocab)) return false;
  }
  return true;
}

}  // namespace

LoomStatus sample(Team& team, const LoomSampling& s) {
  if (!inside(s.bias_row, s.bias_token, s.biases, s)) return LOOM_BAD_TOKEN;
  if (!inside(s.banned_row, s.banned_token, s.banned, s)) return LOOM_BAD_TOKEN;
  if (!inside(s.mask_rows, nullptr, s.masks, s)) return LOOM_BAD_ROWS;
  for (int64_t row = 0; s.state_rows && row < s.batch; row++) {
    if (s.state_rows[row] >= s.states) return LOOM_BAD_ROWS;
  }
  std::vector<const int32_t*> masks(size_t(s.batch), nullptr);
  for (int64_t i = 0; i < s.masks; i++) {
    masks[size_t(s.mask_rows[i])] = s.mask_bits + i * s.mask_words;
  }
  for (int64_t i = 0; i < s.biases; i++) {
    s.logits[s.bias_row[i] * s.stride + s.bias_token[i]] += s.bias_value[i];
  }
  // Before the penalties instead of after them: no penalty brings a banned token back.
  for (int64_t i = 0; i < s.banned; i++) {
    s.logits[s.banned_row[i] * s.stride + s.banned_token[i]] = kNegativeInfinity;
  }
  team.run([&](Worker& worker) {
    worker.parallel_for(s.batch, [&](int64_t row) {
      s.out[row] = sample_row(s.logits + row * s.stride, s, row, masks[size_t(row)]);
    });
  });
  return LOOM_OK;
}

}  // namespace loom
