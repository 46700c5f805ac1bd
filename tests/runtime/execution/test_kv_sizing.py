"""How large the KV pool of a GPU becomes, and which decode steps are captured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.cpu.op_set import CpuOps
from runtime.config import RunnerConfig
from runtime.errors import ConfigError
from runtime.execution.build import _capture_graphs, _total_tokens
from runtime.execution.device import Device
from runtime.execution.kv_pool import bytes_per_token
from tests.ops.gpu.tiny_decoder import make_device, make_model, make_runner

# 2 layers of 2 heads of 16 floats, K and V: 512 bytes.
PER_TOKEN = 512
MODEL = make_model(CpuOps())


class Gpu(Device):
    """A device on which weights and other processes have taken 100,000 bytes."""

    def used_bytes(self) -> int:
        return 100_000


def gpu(budget_bytes: int) -> Gpu:
    device = replace(make_device(CpuOps()), memory_budget_bytes=budget_bytes)
    return Gpu(**{name: getattr(device, name) for name in Device.__slots__})


def test_the_pool_takes_what_the_budget_leaves_in_whole_pages() -> None:
    device = gpu(100_000 + 5_000 * PER_TOKEN + 17)
    assert bytes_per_token(MODEL, device.dtype) == PER_TOKEN
    assert _total_tokens(RunnerConfig(), device, MODEL, page_size=16) == 4992  # 312 pages
    assert _total_tokens(RunnerConfig(), device, MODEL, page_size=1) == 5000


def test_an_option_wins_over_what_would_fit() -> None:
    config = RunnerConfig(max_total_tokens=160)
    assert _total_tokens(config, gpu(10**9), MODEL, page_size=16) == 160


@pytest.mark.parametrize("budget", [50_000, 100_000 + 1023 * PER_TOKEN])
def test_too_little_memory_is_an_error_with_the_numbers(budget: int) -> None:
    with pytest.raises(ConfigError) as caught:
        _total_tokens(RunnerConfig(mem_fraction_static=0.5), gpu(budget), MODEL, page_size=16)
    message = str(caught.value)
    assert message.startswith("mem_fraction_static 0.5:")
    for number in (budget, 100_000, max(0, budget - 100_000), PER_TOKEN):
        assert f"{number:,}" in message
    assert "1024 tokens" in message


@pytest.mark.parametrize(
    ("graphs", "options"),
    [(False, {}), (True, {"cuda_graph_max_bs": 0})],
    ids=["disabled", "no size"],
)
def test_nothing_is_captured_where_graphs_are_off(graphs: bool, options: dict) -> None:
    runner = make_runner(replace(make_device(CpuOps()), graphs=graphs))
    assert _capture_graphs(runner, RunnerConfig(**options), lambda _: None) is None
    runner.close()
