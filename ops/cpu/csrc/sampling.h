// From logits to token ids; the order of operations is that of ops/reference.py: sample.
#pragma once

#include "api.h"
#include "team.h"

namespace loom {

LoomStatus sample(Team& team, const LoomSampling& s);

}  // namespace loom
