// Runs the CPU kernels without Python: reads what to compute from a file and writes the results.
//
//   harness INPUT OUTPUT
//
// The input is a list of commands, each a 64-bit number and its arguments (test_arm_kernels.py
// writes them); the output is the floats of all results, one after the other. Whatever must not
// change a bit (rows beside a row, threads) is compared here: status 1 and a line that says what.
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


void linear(LoomContext* c, LoomContext* other) {
  int64_t kind = number(), n = number(), k = number(), rows = number();
  std::vector<float> w = read<float>(n * k), x = read<float>(rows * k), bias = read<float>(n);
  int64_t bytes = (loom_packed_bytes(int(kind), n, k) + 63) / 64 * 64;
  void* panels = aligned_alloc(64, size_t(bytes));
  loom_pack(c, int(kind), w.data(), LOOM_F32, n, k, k, panels);
  LoomLinear layer = {panels, bias.data(), n, k, int32_t(kind), 0};
  std::vector<float> all(size_t(rows * n)), some(all.size());
  loom_linear(c, &layer, x.data(), LOOM_F32, rows, k, all.data());
  loom_linear(other, &layer, x.data(), LOOM_F32, rows, k, some.data());
  same("the number of threads", all.data(), some.data(), rows * n);
  for (int64_t r = 0; r < rows; r++) {
    loom_linear(c, &layer, x.data() + r * k, LOOM_F32, 1, k, some.data() + r * n);
  }
  same("the rows beside a row", all.data(), some.data(), rows * n);
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
      default:
        loom_close(one);
        loom_close(three);
        return fclose(out);
    }
  }
}
