"""How large the KV pool of a GPU becomes, and which decode steps are captured."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.blocks.block import Block
from ops.blocks.gated_delta_net import GatedDeltaNet
from ops.cpu.op_set import CpuOps
from ops.kv_codes import CODE_DTYPES
from runtime.config import RunnerConfig, gpu_chunk_tokens
from runtime.errors import ConfigError
from runtime.execution import build
from runtime.execution.build import _capture_graphs
from runtime.execution.device import Device
from runtime.execution.graph_capture import GraphPlan, capture_graphs, plan_graphs
from runtime.execution.kv_pool import KVPool, bytes_per_state, bytes_per_token
from runtime.execution.kv_sizing import pool_sizes, total_tokens, work_bytes
from runtime.execution.model_runner import ModelRunner, RunnerSizes
from runtime.execution.packed_step import PackedShape
from runtime.execution.warm_up import largest_step
from scripts._eager_recorder import EagerRecorder
from tests.ops.gpu.tiny_decoder import (
    PAGE_SIZE,
    VOCAB_SIZE,
    make_device,
    make_model,
    make_runner,
)

# 2 layers of 2 heads of 16 floats, K and V: 512 bytes.
PER_TOKEN = 512
MODEL = make_model(CpuOps())


class Gpu(Device):
    """A device of 10 MB on which weights and other processes have taken 100,000 bytes, and any
    step takes 3,000."""

    def used_bytes(self) -> int:
        return 100_000

    def memory_bytes(self) -> int:
        return 10_000_000

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return 3000


def gpu(budget_bytes: int) -> Gpu:
    device = replace(make_device(CpuOps()), memory_budget_bytes=budget_bytes)
    return Gpu(**{name: getattr(device, name) for name in Device.__slots__})


def test_the_pool_takes_what_the_budget_leaves_in_whole_pages() -> None:
    device = gpu(100_000 + 5_000 * PER_TOKEN + 17)
    assert bytes_per_token(MODEL, device.dtype) == PER_TOKEN
    assert total_tokens(RunnerConfig(), device, MODEL, 16, work=0) == 4992  # 312 pages
    assert total_tokens(RunnerConfig(), device, MODEL, 1, work=0) == 5000


@pytest.mark.parametrize("codes", CODE_DTYPES.values(), ids=CODE_DTYPES)
def test_codes_let_more_tokens_into_the_same_memory(codes: torch.dtype) -> None:
    """A head's 16 floats become 16 bytes and a scale of 4."""
    coded = 2 * 2 * 2 * (16 + 4)
    assert bytes_per_token(MODEL, codes) == coded
    assert sum(t[0].nbytes for t in pool_tensors(codes)) == coded
    device = replace(gpu(100_000 + 5_000 * PER_TOKEN), kv_codes=codes)
    assert total_tokens(RunnerConfig(), device, MODEL, 1, work=0) == 5_000 * PER_TOKEN // coded
    unlimited = replace(make_device(CpuOps()), kv_codes=codes)
    assert total_tokens(RunnerConfig(), unlimited, MODEL, 1, work=0) == 32768 * PER_TOKEN // coded


def pool_tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    return KVPool(MODEL, 8, device=torch.device("cpu"), dtype=dtype).tensors()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system has no /proc")
def test_a_pool_takes_no_memory_before_it_is_used() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident_bytes()
    pool = KVPool(MODEL, 1 << 20, device=torch.device("cpu"), dtype=torch.float32)
    assert sum(tensor.nbytes for tensor in pool.tensors()) == PER_TOKEN << 20
    assert resident_bytes() - before < PER_TOKEN << 16
    assert not any(tensor[::1000].any() for tensor in pool.tensors())


def test_an_option_wins_over_what_would_fit() -> None:
    config = RunnerConfig(max_total_tokens=160)
    assert total_tokens(config, gpu(10**9), MODEL, 16, work=10**9) == 160


def test_saved_states_take_half_as_much_as_the_pool_or_what_an_option_says() -> None:
    weights: Any = dict.fromkeys(("qkvz", "rates", "conv", "a_log", "dt_bias", "norm", "out"))
    mixer = GatedDeltaNet(key_heads=1, value_heads=1, key_dim=8, value_dim=8, kernel=4, **weights)
    model = replace(MODEL, layers=(*MODEL.layers, (Block(mixer=mixer, norm=None),)))
    each = 4 * (3 * 24 + 8 * 8)
    assert bytes_per_state(model) == each
    asked = RunnerSizes(page_size=1, total_tokens=0, rows=4, context_length=64)
    left = 5000 * PER_TOKEN

    def sizes(device: Device, slots: int | None, **options: Any) -> tuple[int, int]:
        made = pool_sizes(RunnerConfig(**options), device, model, asked, 0, slots)
        return made.total_tokens, made.state_slots

    tokens, slots = sizes(gpu(100_000 + left), None)
    assert slots == left // 3 // each
    assert left - PER_TOKEN < tokens * PER_TOKEN + slots * each <= left
    assert sizes(gpu(100_000 + left), 100) == ((left - 100 * each) // PER_TOKEN, 100)
    unlimited = make_device(CpuOps())
    assert sizes(unlimited, None) == (32768, 32768 * PER_TOKEN // 2 // each)
    assert sizes(unlimited, 0, max_total_tokens=600) == (600, 0)
    assert sizes(unlimited, None, max_total_tokens=10) == (10, 8)


def test_where_steps_take_more_than_the_rest_the_pool_gives_way() -> None:
    device = gpu(9_000_000)
    rest = 10_000_000 - 9_000_000
    budgeted = (9_000_000 - 100_000) // PER_TOKEN
    assert total_tokens(RunnerConfig(), device, MODEL, 1, work=rest) == budgeted
    more = rest + 40 * PER_TOKEN
    assert total_tokens(RunnerConfig(), device, MODEL, 1, work=more) == budgeted - 40


def test_what_steps_take_is_measured_at_the_largest_and_counts_what_rows_keep() -> None:
    runner = make_runner(gpu(10**6), rows=5)
    taken = work_bytes(runner.device, runner.decoder, runner.sizes, 100, GraphPlan([], []))
    table = 6 * (256 // PAGE_SIZE) * 4  # int32, the reserved row among them
    penalties = 6 * VOCAB_SIZE * (1 + 4)  # what the prompt holds, and counts of the output
    assert taken == 3000 + table + penalties
    unlimited = make_device(CpuOps())
    assert work_bytes(unlimited, runner.decoder, runner.sizes, 100, GraphPlan([], [])) == 0
    runner.close()


def test_captured_steps_are_counted_at_the_largest_of_each_kind(monkeypatch) -> None:
    """They are recorded into a pool of their own, which the smaller ones share."""
    device = replace(gpu(10**6), graphs=True)
    runner = make_runner(device, rows=5)
    seen: list[object] = []

    def noted(_, first, *more):
        seen.append(more[0] if isinstance(more[0], PackedShape) else first.shape)
        return torch.empty(5, VOCAB_SIZE)

    monkeypatch.setattr(ModelRunner, "decode_logits", noted)
    monkeypatch.setattr(ModelRunner, "packed_logits", noted)
    plan = plan_graphs(RunnerConfig(cuda_graph_max_tokens=64), device, runner.sizes)
    with_graphs = work_bytes(device, runner.decoder, runner.sizes, 100, plan)
    assert seen == [PackedShape(64, 5, 5, 5), (5,)]
    without = work_bytes(gpu(10**6), runner.decoder, runner.sizes, 100, plan)
    assert with_graphs - without == 3000
    runner.close()


def test_the_step_that_is_measured_is_as_large_as_any() -> None:
    runner = make_runner(make_device(CpuOps()), rows=5)
    launched = []
    launch = runner.launch

    def spy(batch):
        launched.append(batch)
        return launch(batch)

    runner.launch = spy
    largest_step(runner, 100)
    (batch,) = launched
    assert (batch.prefill_tokens, batch.num_decode, len(batch.sampled)) == (100, 4, 5)
    runner.close()


@pytest.mark.parametrize(
    ("gib", "tokens"), [(8, 2048), (24, 2048), (40, 4096), (48, 4096), (80, 8192), (141, 8192)]
)
def test_a_chunk_is_as_large_as_the_card(gib: int, tokens: int) -> None:
    assert gpu_chunk_tokens(gib << 30) == tokens


@pytest.mark.parametrize("budget", [50_000, 100_000 + 1023 * PER_TOKEN])
def test_too_little_memory_is_an_error_with_the_numbers(budget: int) -> None:
    with pytest.raises(ConfigError) as caught:
        total_tokens(RunnerConfig(mem_fraction_static=0.5), gpu(budget), MODEL, 16, work=77)
    message = str(caught.value)
    assert message.startswith("mem_fraction_static 0.5:")
    for number in (budget, 100_000, 77, max(0, budget - 100_000), PER_TOKEN):
        assert f"{number:,}" in message
    assert "1024 tokens" in message


@pytest.mark.parametrize(
    ("graphs", "options"),
    [(False, {}), (True, {"cuda_graph_max_bs": 0})],
    ids=["disabled", "no size"],
)
def test_nothing_is_captured_where_graphs_are_off(graphs: bool, options: dict) -> None:
    runner = make_runner(replace(make_device(CpuOps()), graphs=graphs))
    plan = plan_graphs(RunnerConfig(**options), runner.device, runner.sizes)
    assert plan == GraphPlan([], [])
    capture_graphs(runner, plan, EagerRecorder())
    assert (runner.graphs, runner.mixed_graphs) == (None, None)
    runner.close()


def test_steps_with_prompts_are_captured_up_to_their_own_bound() -> None:
    device, sizes = (
        replace(make_device(CpuOps()), graphs=True),
        RunnerSizes(page_size=4, total_tokens=512, rows=8, context_length=256),
    )
    none = plan_graphs(RunnerConfig(cuda_graph_max_tokens=0), device, sizes)
    assert (none.decode_sizes, none.shapes) == ([1, 2, 4, 8], [])
    few = plan_graphs(RunnerConfig(cuda_graph_max_tokens=70), device, sizes)
    assert few.shapes == [PackedShape(tokens, 8, 8, 8) for tokens in (32, 64, 70)]


def test_a_capture_without_memory_is_one_sentence_with_numbers(monkeypatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(build, "CudaRecorder", lambda device: None)
    monkeypatch.setattr(build, "capture_graphs", full)
    runner = make_runner(replace(gpu(10**6), graphs=True))
    with pytest.raises(ConfigError) as caught:
        _capture_graphs(runner, RunnerConfig(mem_fraction_static=0.8), lambda _: None)
    message = str(caught.value)
    assert message.startswith("cuda_graph_max_bs 256 with cuda_graph_max_tokens 1024:")
    for told in ("10,000,000", "100,000", "512 tokens", "mem_fraction_static (0.8)"):
        assert told in message
    runner.close()
