"""What every test needs."""

from __future__ import annotations

import os

# Before anything imports triton, whose own library reads it at import: the GPU kernels' tests run
# them in Triton's interpreter. Compilation is tested in processes of its own.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
