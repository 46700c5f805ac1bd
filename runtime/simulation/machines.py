"""Known machines with a model on them: cost parameters with their derivation, and pool sizes.

A machine here is a starting point for "what would happen on ...": for a machine at hand, record a
trace and fit its costs (`runtime.simulation.cost_fit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.errors import ConfigError
from runtime.simulation.cost_model import CostModel
from runtime.simulation.simulator import HostCost
from runtime.simulation.tier import TierTimes


@dataclass(frozen=True, slots=True)
class Machine:
    """What a simulation needs to know of a machine.

    Args:
        cost: of a step on the device. host: of a turn of the engine's loop beside it.
        options: the scheduler options that the launcher would derive there.
        tier: of copies to host memory and back; None: they take no time.
    """

    cost: CostModel
    host: HostCost
    options: dict[str, Any]
    tier: TierTimes | None = None


def _h200_llama_8b() -> Machine:
    """Llama-3.1-8B in bfloat16 on one H200, from the device's rates; nothing here is fitted.

    Rates: memory copies at 4.3 TB/s, dense bf16 matmul at 790 TFLOP/s (what a large copy and a
    large matmul reach, not the data sheet). Model: 32 layers, hidden 4096, 32 query and 8 KV heads
    of 128, vocabulary 128,256: 6.98e9 parameters in the layers, 0.525e9 in the output head (the
    input embedding is gathered, not read)."""
    memory, matmul = 4.3e12, 790e12
    layers, heads, kv_heads, head_dim, vocab = 32, 32, 8, 128, 128_256
    layer_params, head_params = 6.98e9, 0.525e9
    # 1.15: norms, gaps between kernels and the last wave of each, at batch 1.
    step_s = 1.15 * 2 * (layer_params + head_params) / memory  # 4.0 ms
    token_s = 2 * layer_params / matmul  # 17.7 us
    # Flash attention at 0.6 of the matmul rate: QK and PV, 2 FLOP each per dimension.
    pair_s = 4 * heads * head_dim * layers / (0.6 * matmul)  # 1.1 ns
    # Decode attention streams K and V at 0.8 of the copy rate.
    context_s = 2 * kv_heads * head_dim * layers * 2 / (0.8 * memory)  # 38 ns
    # Output head, then about eight passes of the sampler over fp32 logits.
    row_s = 2 * head_params / matmul + 8 * 4 * vocab / memory  # 2.3 us
    cost = CostModel(
        step_s=step_s,
        token_s=token_s,
        # Arithmetic catches up with the weights' trip at 227 rows; an assumed 0.6 of that, since
        # tiles and last waves keep the two from overlapping fully.
        knee_tokens=0.6 * step_s / token_s,
        pair_s=pair_s,
        context_s=context_s,
        row_s=row_s,
        # Clocks under a power cap move by about 2 %; rarely a step is hit by the host.
        sigma=0.02,
        tail_probability=0.002,
        tail_index=2.5,
    )
    kv_bytes = 2 * kv_heads * head_dim * layers * 2  # 128 KiB a token
    pool_bytes = 0.88 * 141e9 - 2 * (layer_params + 2 * head_params)
    options = {
        "capacity_tokens": int(pool_bytes / kv_bytes) // 16 * 16,
        "context_length": 131_072,
        "chunked_prefill_size": 8192,
    }
    # Planning and committing at 3 us a row, texts and queues at about as much again.
    # A page of 2 MiB through page-locked memory at 40 GB/s, and what a copy's start costs.
    tier = TierTimes(start_s=200e-6, page_s=16 * kv_bytes / 40e9)
    return Machine(cost, HostCost(step_s=100e-6, row_s=6e-6), options, tier)


def _cpu_smollm2_135m() -> Machine:
    """SmolLM2-135M in bfloat16 on two cores of an EPYC (Zen 4, AVX512-BF16), native kernels.

    Measured: a decode step of 8 rows with 64 tokens each takes 11.1 ms on the quiet machine. The
    slopes are CPU times of one thread over rows, history and context, halved for two: 1.0 ms per
    token of prefill (from 8 rows on), 0.49 us per (query, key) pair, 2.3 us per token of decode
    context. For comparison, the floors of this model are 8.7 ms (269 MB at 31 GB/s) and 0.51 ms a
    token (212 MFLOP at 0.42 TFLOP/s). The sampler's passes over 49,152 logits cost about 50 us a
    row."""
    cost = CostModel(
        step_s=10.1e-3,
        token_s=0.51e-3,
        knee_tokens=8.0,
        pair_s=0.25e-6,
        context_s=1.17e-6,
        row_s=50e-6,
        # Two cores that also run the server and its clients.
        sigma=0.06,
        tail_probability=0.01,
        tail_index=2.5,
    )
    options = {
        "capacity_tokens": 32_768,
        "context_length": 8192,
        "chunked_prefill_size": 128,
    }
    # Memory to memory: 360 KiB a page, copied twice.
    tier = TierTimes(start_s=1e-3, page_s=0.15e-3)
    return Machine(cost, HostCost(step_s=300e-6, row_s=20e-6), options, tier)


_MACHINES = {"h200-llama-8b": _h200_llama_8b, "cpu-smollm2-135m": _cpu_smollm2_135m}
MACHINE_NAMES = tuple(_MACHINES)


def machine(name: str) -> Machine:
    """A known machine. Raises: ConfigError: lists the names there are."""
    if name not in _MACHINES:
        raise ConfigError(f"machine {name!r}: must be one of {', '.join(MACHINE_NAMES)}")
    return _MACHINES[name]()
