// Runs the CPU kernels without Python: reads what to compute from a file and writes the results.
//
//   harness INPUT OUTPUT
//
// The input is a list of commands, each a 64-bit number and its arguments (test_arm_kernels.py
// writes them); the output is the floats of all results, one after the other. Whatever must not
// change a bit (rows beside a row, threads) is compared here: status 1 and a line that says what.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "api.h"

namespace {

FILE *in, *out;

template <class T>
std::vector<T> read(int64_t count) {
  std::vector<T> values(size_t(count) + 1);  // one more, so that none is no null pointer
  if (count && fread(values.data(), sizeof(T), size_t(count), in) != size_t(count)) exit(2);
  values.resize(size_t(count));
  return values;
}

int64_t number() { return read<int64_t>(1)[0]; }

void write(const std::vector<float>& values) {
  fwrite(values.data(), sizeof(float), values.size(), out);
}

void same(const char* what, const float* a, const float* b, int64_t count) {
  if (memcmp(a, b, size_t(count) * sizeof(float)) == 0) return;
  printf("%s changed a result\n", what);
  exit(1);
}

// What layers and models point to stays until the end.
const float* keep(int64_t count) { return (new std::vector<float>(read<float>(count)))->data(); }

LoomLinear packed(LoomContext* c, int64_t kind, int64_t n, int64_t k) {
  std::vector<float> w = read<float>(n * k);
  int64_t bytes = (loom_packed_bytes(int(kind), n, k) + 63) / 64 * 64;
  void* panels = aligned_alloc(64, size_t(bytes));
  std::vector<__fp16> halves(w.begin(), w.end());
  bool narrow = kind == LOOM_KIND_F16;
  const void* given = narrow ? (const void*)halves.data() : w.data();
  loom_pack(c, int(kind), given, narrow ? LOOM_F16 : LOOM_F32, n, k, k, panels);
  return {panels, nullptr, n, k, int32_t(kind), 0, nullptr};
}

void linear(LoomContext* c, LoomContext* other) {
  int64_t kind = number(), n = number(), k = number(), rows = number();
  LoomLinear layer = packed(c, kind, n, k);
  std::vector<float> x = read<float>(rows * k);
  layer.bias = keep(n);
  std::vector<float> all(size_t(rows * n)), some(all.size());
  loom_linear(c, &layer, x.data(), LOOM_F32, rows, k, all.data());
  loom_linear(other, &layer, x.data(), LOOM_F32, rows, k, some.data());
  same("the number of threads", all.data(), some.data(), rows * n);
  for (int64_t r = 0; r < rows; r++) {
    loom_linear(c, &layer, x.data() + r * k, LOOM_F32, 1, k, some.data() + r * n);
  }
  same("the rows beside a row", all.data(), some.data(), rows * n);
  write(all);
}

// A layer of codes from its numbers: its values, then what it gives.
void coded(LoomContext* c, LoomContext* other) {
  int64_t kind = number(), n = number(), k = number(), rows = number();
  int64_t stretches = number(), minima = number(), spans = number(), minimum_spans = number();
  int64_t float_spans = number(), entries = number();
  auto codes = read<uint8_t>(n * k);
  auto scales = read<int8_t>(n * stretches), lows = read<int8_t>(n * minima);
  auto factors = read<uint16_t>(n * spans), low_factors = read<uint16_t>(n * minimum_spans);
  auto float_scales = read<float>(n * float_spans), table = read<float>(entries);
  auto x = read<float>(rows * k);
  LoomCodes numbers = {codes.data(),       scales.data(),       lows.data(), factors.data(),
                       low_factors.data(), float_scales.data(), table.data()};
  int64_t bytes = (loom_packed_bytes(int(kind), n, k) + 63) / 64 * 64;
  void* panels = aligned_alloc(64, size_t(bytes));
  loom_pack_codes(c, int(kind), &numbers, n, k, panels);
  LoomLinear layer = {panels, nullptr, n, k, int32_t(kind), 0, nullptr};
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < n; i++) ids.push_back(i);
  std::vector<float> values(size_t(n * k)), all(size_t(rows * n)), some(all.size());
  if (loom_unpack_rows(c, &layer, ids.data(), n, LOOM_F32, values.data())) exit(3);
  loom_linear(c, &layer, x.data(), LOOM_F32, rows, k, all.data());
  loom_linear(other, &layer, x.data(), LOOM_F32, rows, k, some.data());
  same("the number of threads", all.data(), some.data(), rows * n);
  for (int64_t r = 0; r < rows; r++) {
    loom_linear(c, &layer, x.data() + r * k, LOOM_F32, 1, k, some.data() + r * n);
  }
  same("the rows beside a row", all.data(), some.data(), rows * n);
  write(values);
  write(all);
  free(panels);
}

void attention(LoomContext* c, LoomContext* other) {
  int64_t tokens = number(), heads = number(), kv_heads = number(), dim = number();
  int64_t slots = number(), type = number(), page = number(), batch = number(), pages = number();
  int64_t window = number(), bytes = slots * kv_heads * dim * (type == LOOM_BF16 ? 2 : 4);
  std::vector<float> settings = read<float>(2), q = read<float>(tokens * heads * dim);
  std::vector<char> k = read<char>(bytes), v = read<char>(bytes);
  auto table = read<int32_t>(batch * pages), rows = read<int32_t>(batch);
  auto indptr = read<int32_t>(batch + 1), lens = read<int32_t>(batch);
  LoomBatch b = {table.data(), batch, pages, pages, rows.data(), indptr.data(), lens.data(),
                 batch, tokens, page};
  LoomAttention spec = {settings[0], settings[1], window, nullptr};
  LoomPools pools = {k.data(), v.data(), nullptr, nullptr};
  std::vector<float> all(q.size()), again(q.size());
  auto run = [&](LoomContext* context, std::vector<float>& to) {
    int status = loom_attention(context, q.data(), LOOM_F32, heads * dim, dim, heads, kv_heads, dim,
                                &pools, int(type), slots, &b, &spec, to.data());
    if (status) exit(3);
  };
  run(c, all);
  run(other, again);
  same("the number of threads", all.data(), again.data(), int64_t(all.size()));
  write(all);
}

void rms_norm(LoomContext* c) {
  int64_t rows = number(), dim = number();
  auto x = read<float>(rows * dim), weight = read<float>(dim);
  std::vector<float> y(x.size());
  loom_rms_norm(c, x.data(), weight.data(), LOOM_F32, LOOM_F32, rows, dim, dim, 1e-5f, y.data());
  write(y);
}

void act_and_mul(LoomContext* c) {
  int64_t rows = number(), dim = number(), activation = number();
  auto x = read<float>(rows * dim * 2);
  std::vector<float> y(size_t(rows * dim));
  loom_act_and_mul(c, x.data(), LOOM_F32, rows, dim, int(activation), y.data());
  write(y);
}

void sample(LoomContext* c) {
  int64_t rows = number(), vocab = number();
  auto logits = read<float>(rows * vocab), temperature = read<float>(rows), top_p = read<float>(rows);
  auto seed = read<int64_t>(rows);
  std::vector<float> min_p(size_t(rows), 0.0f);
  std::vector<int32_t> top_k(size_t(rows), 0);
  std::vector<int64_t> position(size_t(rows), 7), ids(size_t(rows), -1);
  LoomSampling s = {};
  s.logits = logits.data();
  s.batch = rows;
  s.vocab = s.stride = vocab;
  s.temperature = temperature.data();
  s.top_p = top_p.data();
  s.min_p = min_p.data();
  s.top_k = top_k.data();
  s.seed = seed.data();
  s.position = position.data();
  s.out = ids.data();
  if (loom_sample(c, &s)) exit(3);
  write(std::vector<float>(ids.begin(), ids.end()));
}

// A decoder of equal layers with its weights, and a prompt.
struct Model {
  int64_t kind, type, vocab, hidden, heads, kv_heads, dim, inner, layers, positions, tokens;
  std::vector<LoomAttentionBlock> attention;
  std::vector<LoomMlpBlock> mlp;
  std::vector<LoomBlock> blocks;
  LoomDecoder decoder = {};
  std::vector<int64_t> ids;

  explicit Model(LoomContext* c) {
    for (int64_t* size : {&kind, &type, &vocab, &hidden, &heads, &kv_heads, &dim, &inner, &layers,
                          &positions, &tokens}) {
      *size = number();
    }
    const float *embedding = keep(vocab * hidden), *rope = keep(positions * dim);
    attention.resize(size_t(layers));
    mlp.resize(size_t(layers));
    for (size_t i = 0; i < size_t(layers); i++) {
      LoomAttentionBlock& a = attention[i];
      blocks.push_back({norm(), {}, &a, nullptr, 1.0f, 0});
      a.qkv = packed(c, kind, (heads + 2 * kv_heads) * dim, hidden);
      a.o = packed(c, kind, hidden, heads * dim);
      a.heads = heads, a.kv_heads = kv_heads, a.head_dim = dim;
      a.rope = rope, a.rope_positions = positions, a.rotary_dim = dim;
      a.attention = {0.25f, 0.0f, 0, nullptr};
      blocks.push_back({norm(), {}, nullptr, &mlp[i], 1.0f, 0});
      mlp[i] = {packed(c, kind, 2 * inner, hidden), packed(c, kind, hidden, inner), LOOM_SILU, 0};
    }
    decoder.final_norm = norm();
    decoder.lm_head = packed(c, kind, vocab, hidden);
    decoder.vocab = vocab, decoder.hidden = hidden, decoder.blocks = int64_t(blocks.size());
    decoder.embed_scale = decoder.logit_scale = 1.0f;
    decoder.embedding = embedding, decoder.embedding_rows = vocab;
    decoder.block = blocks.data();
    ids = read<int64_t>(tokens);
  }

  LoomNorm norm() const { return {keep(hidden), 1e-5f, 0}; }
};

// Every token's logits of the prompt, `chunk` tokens a step, beside `others` rows whose prompts are
// the same turned by some tokens.
std::vector<float> run_in_chunks(LoomContext* c, const Model& m, int64_t chunk, int64_t others) {
  constexpr int64_t page = 16;
  int64_t batch = 1 + others, pages = (m.tokens + page - 1) / page, slots = batch * pages * page;
  std::vector<std::vector<float>> pools(2 * m.blocks.size());
  std::vector<LoomPools> of_block(m.blocks.size());
  for (size_t i = 0; i < pools.size(); i++) {
    pools[i].assign(size_t(slots * m.kv_heads * m.dim), NAN);
    (i % 2 ? of_block[i / 2].v : of_block[i / 2].k) = pools[i].data();
  }
  // The pages of a row lie backwards.
  std::vector<int32_t> table, rows;
  for (int64_t r = 0; r < batch; r++) {
    rows.push_back(int32_t(r));
    for (int64_t p = 0; p < pages; p++) table.push_back(int32_t((r + 1) * pages - 1 - p));
  }
  std::vector<float> logits;
  for (int64_t begin = 0; begin < m.tokens; begin += chunk) {
    int64_t end = std::min(m.tokens, begin + chunk), count = end - begin;
    std::vector<int64_t> ids, positions, at, wanted;
    std::vector<int32_t> indptr = {0}, lens;
    for (int64_t r = 0; r < batch; r++) {
      for (int64_t t = begin; t < end; t++) {
        if (r == 0) wanted.push_back(int64_t(ids.size()));
        ids.push_back(m.ids[size_t((t + r) % m.tokens)]);
        positions.push_back(t);
        at.push_back(table[size_t(r * pages + t / page)] * page + t % page);
      }
      indptr.push_back(int32_t(ids.size()));
      lens.push_back(int32_t(end));
    }
    logits.resize(size_t(end * m.vocab));
    LoomStep step = {};
    step.batch = {table.data(), batch, pages, pages, rows.data(), indptr.data(), lens.data(),
                  batch, int64_t(ids.size()), page};
    step.input_ids = ids.data(), step.positions = positions.data(), step.slots = at.data();
    step.logit_tokens = wanted.data(), step.logits = count;
    step.pools = of_block.data(), step.pool_slots = slots, step.pool_type = m.type;
    step.out = logits.data() + begin * m.vocab;
    if (loom_decode_step(c, &m.decoder, &step)) exit(3);
  }
  return logits;
}

void decode(LoomContext* c, LoomContext* other) {
  Model m(c);
  std::vector<float> whole = run_in_chunks(c, m, m.tokens, 0);
  auto check = [&](const char* what, const std::vector<float>& logits) {
    same(what, whole.data(), logits.data(), int64_t(whole.size()));
  };
  check("the number of threads", run_in_chunks(other, m, m.tokens, 0));
  check("a chunk", run_in_chunks(c, m, 7, 0));
  check("a cached prefix", run_in_chunks(c, m, 1, 0));
  check("a batch", run_in_chunks(other, m, 16, 2));
  write(whole);
}

}  // namespace

int main(int count, char** words) {
  if (count != 3 || !(in = fopen(words[1], "rb")) || !(out = fopen(words[2], "wb"))) return 2;
  LoomContext *one = loom_open(1, 0), *three = loom_open(3, 0);
  for (;;) {
    switch (number()) {
      case 1: linear(one, three); break;
      case 2: attention(one, three); break;
      case 3: rms_norm(one); break;
      case 4: act_and_mul(one); break;
      case 5: sample(one); break;
      case 6: decode(one, three); break;
      case 7: coded(one, three); break;
      default:
        loom_close(one);
        loom_close(three);
        return fclose(out);
    }
  }
}
