// Recurrent states: a short convolution along a row's tokens, and the gated delta rule.
//
// Both run over rows and, within a row, over columns that never meet: channels of the convolution,
// and columns of each head's matrix, which stay in the first cache while the tokens go by in their
// order. So a result depends on its row's tokens alone, whatever pieces they come in.
#pragma once

#include "api.h"
#include "team.h"

namespace loom {

// Whether all slots, tokens and stops are within their bounds.
bool rows_fit(const LoomRecurrent&);

void causal_conv(Team&, const LoomConv&, const LoomRecurrent&);
void gated_delta(Team&, const LoomDelta&, const LoomRecurrent&);

}  // namespace loom
