"""The GPU's op set in Triton: one file per operation, each tested against `ops.reference`."""

import os

# Triton warns at import while this is unset. Multiply-add fusion is on in every release so far;
# saying so keeps the numbers when a later release changes its default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
