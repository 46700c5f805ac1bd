// What a request waits for: the scheduler's `BlockingTerm` (runtime/scheduling/accounting.py)
// in words that follow "waits for".

const REASONS = {
  next_pass: "the next pass: it has just arrived",
  rows: "a free row: as many run as may",
  kv_total: "KV: what all admitted requests will need to their end leaves too little",
  kv_step: "KV pages: too few are free in this step",
  input_budget: "the prompt tokens that one step may take",
  chunk_budget: "the chunk: prompts before it use it up",
  delayer: "more prompts, to come in one step together",
  policy: "its turn: a step takes only so many prompts",
  shared_prefix: "a twin that is filling the cache for it",
  grammar: "its grammar to be compiled",
  retracted: "others to give back KV: a pass that retracts admits nobody",
  kv_load: "its prefix to be loaded from host memory or the file",
};

export function reason(term) {
  return REASONS[term] ?? term;
}
