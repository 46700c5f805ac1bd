// A whole decoder step on a team of threads: embedding, all blocks, logits.
#pragma once

#include "api.h"
#include "attention.h"
#include "buffer.h"
#include "team.h"

namespace loom {

// What is wrong with a step's data, or LOOM_OK.
LoomStatus check_batch(const LoomBatch& batch, int64_t pool_slots);
LoomStatus check_step(const LoomDecoder& decoder, const LoomStep& step);

// Runs a checked step. `scratch` and `plans` are reused from step to step.
void run_step(Team& team, const LoomDecoder& decoder, const LoomStep& step, Buffer& scratch,
              AttentionPlans& plans);

}  // namespace loom
