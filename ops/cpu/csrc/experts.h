// A mixture of experts: gated MLPs, of which each token goes through a few.
//
// The (token, expert) pairs are laid out by expert, so that an expert's panels are read once for
// all of its tokens, and one phase runs the pieces of all experts: with one token the threads share
// out eight small layers as they would one large one. Between the layers everything is float32. A
// token's sum runs through its experts in the order of their ids, so its result depends on its own
// row alone.
#pragma once

#include "api.h"
#include "buffer.h"
#include "team.h"

namespace loom {

LoomStatus run_experts(Team& team, const LoomExperts& experts, const LoomExpertRows& rows,
                       Buffer& scratch);

}  // namespace loom
