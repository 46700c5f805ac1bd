"""Scheduler and model runner on the Triton ops: the same greedy tokens as on the CPU ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ops.cpu.op_set import CpuOps
from ops.gpu.op_set import GpuOps
from runtime.config import SchedulerConfig
from runtime.execution.graph_capture import GraphPlan, capture_graphs
from runtime.execution.packed_step import PackedShape
from runtime.request import SamplingParams
from runtime.scheduling.scheduler import Scheduler
from scripts._eager_recorder import EagerRecorder
from tests.ops.gpu.tiny_decoder import (
    PAGE_SIZE,
    VOCAB_SIZE,
    make_device,
    make_queued_device,
    make_runner,
)
from tests.runtime.execution.drivers import Run, request, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]

SHARED = [(7 * i) % 200 + 3 for i in range(20)]
PROMPTS = {
    "single": [17],
    "short": [5, 9, 31],
    "long": SHARED + [(11 * i) % 190 + 5 for i in range(33)],
}
LATER = {"cached": [*SHARED, 44, 45]}


def generate(
    ops: CpuOps | GpuOps,
    *,
    overlap: bool,
    graphs: bool = False,
    kv_codes: torch.dtype | None = None,
) -> list[Run]:
    """The prompts in chunks of 16 tokens beside running rows, then one that finds a prefix.

    graphs: steps go through the graph runners, recorded as a CPU can.
    """
    device = make_queued_device(ops) if graphs else make_device(ops)
    runner = make_runner(replace(device, kv_codes=kv_codes))
    if graphs:
        plan = GraphPlan([2, 4], [PackedShape(20, 4, 4, 4)])
        capture_graphs(runner, plan, EagerRecorder())
    scheduler = Scheduler(
        SchedulerConfig(
            capacity_tokens=512,
            context_length=256,
            page_size=PAGE_SIZE,
            max_running_requests=8,
            chunked_prefill_size=16,
        )
    )
    runs = []
    for prompts in (PROMPTS, LATER):
        sampling = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
        requests = [request(name, prompt, sampling) for name, prompt in prompts.items()]
        runs.append(run(scheduler, runner, requests, overlap=overlap))
    runner.close()
    return runs


@pytest.mark.parametrize(
    ("overlap", "graphs", "kv_codes"),
    [
        (True, False, None),
        (False, False, None),
        (True, True, None),
        (True, True, torch.int8),
    ],
    ids=["overlap", "synchronous", "overlap and graphs", "int8 keys"],
)
def test_greedy_tokens_equal_those_of_the_cpu_ops(
    overlap: bool, graphs: bool, kv_codes: torch.dtype | None
) -> None:
    first, second = generate(GpuOps(), overlap=overlap, graphs=graphs, kv_codes=kv_codes)
    assert first.steps["mixed"] >= 2  # chunks of the long prompt beside the others' decode rows
    assert first.steps["decode"] >= 1
    assert second.cached_tokens >= PAGE_SIZE * 4
    expected = generate(CpuOps(), overlap=overlap, kv_codes=kv_codes)
    for got, want in zip((first, second), expected, strict=True):
        tokens = {name: output.token_ids for name, output in want.outputs.items()}
        assert {name: output.token_ids for name, output in got.outputs.items()} == tokens
        assert all(len(ids) == 6 for ids in tokens.values())
        assert all(0 <= token < VOCAB_SIZE for ids in tokens.values() for token in ids)
