// Paged attention with an online softmax (Dao et al. 2022, FlashAttention, algorithm 1).
//
// One routine serves prefill and decode rows. Keys are walked in tiles of kKeyTile positions that
// are aligned to absolute positions, from the first one that the query attends to; a query's
// maximum, sum and output are updated tile by tile. The result of a query therefore depends on its
// position and the keys alone: not on the chunk it came in, on cached prefixes or on other rows.
//
// Scores and outputs are the register tiles of linear.h: a tile of keys is transposed into panels
// of 16 keys, a tile of values into panels of 16 dimensions. With a bfloat16 pool on a machine with
// dpbf16, queries and softmax weights are rounded to bfloat16 for these products; all sums,
// maxima and rescalings are float32. Otherwise everything is float32. A pool of codes (kv_codes.h)
// is widened tile by tile, and its scales join the scores and the softmax weights in float32.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "api.h"
#include "team.h"

namespace loom {

constexpr int kKeyTile = 64;

struct AttentionCall {
  const void* q;  // [tokens, heads, dim]
  int q_type;
  int64_t q_stride, q_head_stride;  // elements
  int64_t heads, kv_heads, dim;
  LoomPools pools;  // [slots, kv_heads, dim]
  int pool_type;
  const LoomBatch* batch;
  LoomAttention spec;
  void* out;  // [tokens, heads, dim], head stride dim
  int out_type;
  int64_t out_stride;
};

// Some consecutive new tokens of one row and some KV heads: queries that share walks over the keys.
struct AttentionTask {
  int32_t row;    // batch row
  int32_t first;  // token of the step
  int32_t count;
  int32_t first_head, kv_heads;
};

struct AttentionShape {
  int64_t heads, kv_heads, dim;
  bool operator==(const AttentionShape&) const = default;
};

// The tasks of a step by the shape of the heads; blocks of one shape share theirs. Kept from step
// to step for its memory.
class AttentionPlans {
 public:
  void begin(const LoomBatch& batch, int threads);
  // Valid until the next `begin`; not for several threads.
  const std::vector<AttentionTask>& of(const AttentionShape& shape);

 private:
  struct Plan {
    AttentionShape shape;
    std::vector<AttentionTask> tasks;
  };
  std::deque<Plan> plans_;
  size_t used_ = 0;
  const LoomBatch* batch_ = nullptr;
  int threads_ = 1;
};

// Runs the tasks; ends the phase.
void attention(Worker& worker, const AttentionCall& call, const std::vector<AttentionTask>& tasks);

}  // namespace loom
