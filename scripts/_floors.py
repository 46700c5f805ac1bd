"""What this machine cannot go below: measured limits, and what a model's work takes at them.

Absolute times do not travel between machines; a ratio to a floor measured in the same run does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a step costs in bytes and operations. The defaults are SmolLM2-135M's, in bfloat16.

    Args:
        weight_bytes: read by every decode step.
        token_flops: of one prefill token (its linear layers, without the head's).
        head_flops: of one sampled token's logits.
        attention_flops: of one (query, key) pair over all layers.
    """

    weight_bytes: float = 269.0e6
    token_flops: float = 212.3e6
    head_flops: float = 56.6e6
    attention_flops: float = 4.0 * 30 * 576


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured limits: bytes read per second, bfloat16 operations per second."""

    bandwidth: float
    bf16_flops: float

    def best_of(self, other: Machine) -> Machine:
        """Both limits at their better measurement: what else ran can only have slowed one."""
        return Machine(max(self.bandwidth, other.bandwidth), max(self.bf16_flops, other.bf16_flops))


def measure_machine() -> Machine:
    """About five seconds; meant for an idle machine, so the best of many tries counts."""
    import torch

    values = torch.randint(0, 100, (1 << 26,), dtype=torch.int64)  # 512 MB, beyond any cache
    bandwidth = values.nbytes / best_seconds(lambda: values.max(), 20)
    peaks = []
    for size in (1024, 2048):
        left, right = (torch.randn(size, size).bfloat16() for _ in range(2))
        peaks.append(2 * size**3 / best_seconds(partial(torch.matmul, left, right), 30))
    return Machine(bandwidth, max(peaks))


def best_seconds(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


@dataclass(frozen=True, slots=True)
class Floors:
    """Seconds below which this machine cannot go."""

    machine: Machine
    size: ModelSize

    def prefill(self, tokens: int, cached: int = 0) -> float:
        """`tokens` new prompt tokens after `cached` ones."""
        pairs = tokens * (cached + tokens / 2)
        flops = tokens * self.size.token_flops + pairs * self.size.attention_flops
        return flops / self.machine.bf16_flops

    def decode_step(self, rows: int) -> float:
        """One token for each of `rows` sequences: the weights' bytes or the rows' arithmetic."""
        flops = rows * (self.size.token_flops + self.size.head_flops)
        return max(self.size.weight_bytes / self.machine.bandwidth, flops / self.machine.bf16_flops)
