"""What a device has when it is opened, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ops.gpu import library
from ops.gpu.library import Chip
from runtime.config import RunnerConfig
from runtime.errors import ConfigError
from runtime.execution.device import Device, open_device
from runtime.execution.weight_form import StoredWeights

TOTAL = 80 << 30


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"cpu_kernels": "torch"}, "native CPU kernels"),
    ],
)
def test_quantization_needs_kernels_that_have_it(options, named):
    config = RunnerConfig(device="cpu", quantization="int8", **options)
    with pytest.raises(ConfigError, match=named):
        open_device(config, StoredWeights(torch.bfloat16), lambda _: None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The card that torch says is there."""
    card = SimpleNamespace(total_memory=TOTAL, capability=(9, 0), shared_memory_per_block_optin=0)
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    for name, fake in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device: card.capability,
        "get_device_properties": lambda device: card,
        "get_device_name": lambda device: "a card",
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return card


def opened(**options) -> Device:
    return open_device(RunnerConfig(**options), StoredWeights(torch.bfloat16))


@pytest.mark.parametrize("fraction", [0.25, 0.88])
def test_a_gpu_may_fill_the_share_of_its_memory_that_the_options_give(gpu, fraction):
    device = opened(mem_fraction_static=fraction)
    assert device.memory_budget_bytes == int(TOTAL * fraction)
    assert device.memory_bytes() == TOTAL


def test_a_gpu_queues_pins_and_captures(gpu):
    device = opened()
    assert (device.torch_device.type, device.ops.name) == ("cuda", "gpu")
    assert (device.queued, device.pinned, device.graphs) == (True, True, True)
    assert not opened(disable_cuda_graph=True).graphs


@pytest.mark.parametrize(
    ("quantization", "kinds", "kept"),
    [(None, ("int4",), "groups"), ("none", ("int4",), None), (None, (), None)],
)
def test_a_gpu_keeps_integers_of_groups_unless_told_not_to(gpu, quantization, kinds, kept):
    stored = StoredWeights(torch.float16, group_kinds=kinds)
    device = open_device(RunnerConfig(quantization=quantization), stored)
    assert device.keeps_codes == kept
    assert device.weights == ("int4 in groups, as the checkpoint has them" if kept else "")


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)]
)
def test_bfloat16_is_taken_where_the_chip_has_it(gpu, capability, dtype):
    gpu.capability = capability
    assert opened().dtype is dtype


@pytest.mark.parametrize(
    ("kib", "capability", "chip"),
    [
        (227, (9, 0), Chip(large_shared=True, warpgroups=True)),
        (227, (10, 0), Chip(large_shared=True, warpgroups=True)),
        (163, (8, 0), Chip(large_shared=True)),
        (99, (8, 6), Chip()),
        (99, (12, 0), Chip()),
        (64, (7, 5), Chip()),
        (None, (8, 9), Chip()),
    ],
    ids=["H100", "B200", "A100", "RTX 30", "RTX 50", "Turing", "not told"],
)
def test_large_tiles_are_for_chips_that_hold_them(gpu, kib, capability, chip):
    gpu.major = capability[0]
    if kib is None:
        del gpu.shared_memory_per_block_optin
    else:
        gpu.shared_memory_per_block_optin = kib << 10
    there: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    library._chip.cache_clear()
    assert library.chip_of(there) == chip
    library._chip.cache_clear()
    assert library.chip_of(torch.empty(1)) == Chip()
