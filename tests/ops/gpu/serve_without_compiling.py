"""Serves on a GPU that is not there: each launch is bound and looked up as Triton does it, and where
it would be compiled, that is noted. Nothing is run. Prints, as one line of JSON, the kernels that
were compiled for the warm-up and capture, those compiled afterwards, and which steps there were.

Run as a script, since Triton interprets or compiles for the life of a process.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import ops
from ops.gpu import extend_attention
from ops.gpu.op_set import GpuOps
from runtime.execution.graph_capture import GraphPlan, capture_graphs
from runtime.execution.model_runner import ModelStep
from runtime.execution.packed_step import PackedShape
from runtime.execution.warm_up import warm_up
from runtime.request import SamplingParams
from scripts._eager_recorder import EagerRecorder
from tests.ops.gpu.compile_once import Driver
from tests.ops.gpu.tiny_decoder import (
    SAMPLINGS,
    QueuedDevice,
    make_queued_device,
    make_runner,
    serve_all_ways,
)

PLAN = GraphPlan([1, 2, 4], [PackedShape(32, 4, 4, 4)])
# The prompt of the last one is not replayed.
WAYS_TO_SAMPLE = [*SAMPLINGS, SamplingParams(temperature=0.0, prompt_logprobs=1)]


class Kernel:
    """A compiled kernel that runs nothing: what it would write as `out` becomes 0."""

    function = packed_metadata = None

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        for name, value in zip(self._names, arguments[-len(self._names) :], strict=True):
            if name == "out":
                value.zero_()


COMPILED: list[str] = []


def compile_nothing(self: JITFunction[Any], key: Any, *arguments: Any) -> Kernel:
    COMPILED.append(self.fn.__name__)
    device = arguments[1]
    kernel = self.device_caches[device][0][key] = Kernel(self.arg_names)
    knobs.runtime.jit_post_compile_hook()
    return kernel


def main() -> None:
    driver.set_active(Driver())
    JITFunction._do_compile = compile_nothing
    # The tiny decoder is in float32, which has one tile; half types have one for short rows too.
    of_type = extend_attention.extend_tile
    extend_attention.extend_tile = lambda head_dim, _, **options: of_type(head_dim, 2, **options)
    device = make_queued_device(GpuOps())
    fields = {name: getattr(device, name) for name in QueuedDevice.__slots__}
    counter = ops.gpu_kernel_counter()
    runner = make_runner(QueuedDevice(**fields | {"compiled_kernels": counter}))
    warm_up(runner)
    capture_graphs(runner, PLAN, EagerRecorder())
    before = len(COMPILED)
    assert counter() == before

    paths: Counter[str] = Counter()
    late: list[int] = []
    for name in ("_replayed_logits", "_replayed_mixed_logits", "_eager_logits", "output"):
        original = getattr(ModelStep, name)

        def counted(*arguments: Any, name: str = name, original: Any = original) -> Any:
            result = original(*arguments)
            paths[name] += 1
            if name == "output":
                late.append(result.compiled_kernels)
            return result

        setattr(ModelStep, name, counted)
    serve_all_ways(runner, WAYS_TO_SAMPLE)
    runner.close()
    print(
        json.dumps(
            {
                "before": sorted(set(COMPILED[:before])),
                "later": COMPILED[before:],
                "noticed": sum(late),
                "paths": paths,
            }
        )
    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
