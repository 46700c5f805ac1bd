"""A model's steps under fake CUDA: fake tensors have shapes and devices but no data.

A value that the host would have to wait for (`.item()`, `nonzero`, a boolean index) raises, and so
does an op on tensors of two devices. What passes here can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import subprocess
from array import array
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from ops.coded_weight import GROUP_KINDS
from ops.gpu.op_set import GpuOps
from ops.op_set import Expert, GroupedWeight, PackedEmbedding, Routing
from runtime.execution.device import Device, Fence
from runtime.execution.forward_batch import Staging
from runtime.execution.model_runner import ModelRunner, ModelStep
from runtime.execution.packed_step import PackedShape
from runtime.execution.state_rows import StateRows
from runtime.request import Request, SamplingParams
from runtime.runner import SampleMasks
from runtime.scheduling.schedule_batch import ScheduleBatch
from tests.ops.gpu.tiny_decoder import VOCAB_SIZE, make_device, make_runner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class FakeDevice(Device):
    """Queues work like a GPU, as far as fake tensors go: uploads have a shape and a type, streams
    and events are those of a CPU."""

    def fence(self) -> Fence:
        return make_device(self.ops).fence()

    def stream(self) -> None:
        return None

    def upload(self, values: np.ndarray) -> torch.Tensor:
        dtype = torch.from_numpy(values[:0]).dtype
        return torch.empty(values.shape, dtype=dtype, device=self.torch_device)


class FakeStaging(Staging):
    """`Staging`, whose numpy views need memory that a fake tensor does not have."""

    def __init__(self) -> None: ...

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [torch.empty(len(values), dtype=torch.int32, device="cuda") for values in arrays]


# A CPU build of torch has nothing that guards a CUDA device, so that indexing and `.to` raise before
# they reach the fake mode. On builds with CUDA the fake mode installs this guard itself.
NO_OP_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>

static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static const bool installed = [] {
  constexpr auto cuda = static_cast<size_t>(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[cuda].store(&guard);
  return true;
}();
"""


@pytest.fixture(scope="module", autouse=True)
def device_guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    if torch.cuda._is_compiled():
        return
    folder, torch_folder = tmp_path_factory.mktemp("guard"), Path(torch.__file__).parent
    (folder / "guard.cpp").write_text(NO_OP_GUARD)
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "guard.cpp", "-o", "guard.so"]
    paths = [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10"]
    subprocess.run([*command, *paths], cwd=folder, check=True)
    ctypes.CDLL(str(folder / "guard.so"))


@pytest.fixture(params=[None, torch.float8_e4m3fn], ids=["plain", "fp8"])
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    """Keys and values in the model's type, and as codes."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        device = make_device(GpuOps(), "cuda")
        fields = {name: getattr(device, name) for name in Device.__slots__}
        runner = make_runner(FakeDevice(**fields | {"queued": True, "kv_codes": request.param}))
        runner.staging = FakeStaging()
        yield runner
    runner.close()


PLAIN = SamplingParams(temperature=0.0)
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=20,
    top_p=0.9,
    min_p=0.05,
    seed=-3,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    logit_bias=((5, 1.0), (9, -2.0)),
    min_tokens=4,
    stop_token_ids=frozenset({7}),
    logprobs=3,
    prompt_logprobs=2,
)


def step(kinds: Sequence[tuple[int, int]], sampling: SamplingParams) -> ScheduleBatch:
    """A batch of rows (prefix, new tokens); rows of one token behind a prefix decode."""
    prefill = [row for row in kinds if row[0] == 0 or row[1] > 1]
    rows = prefill + [row for row in kinds if row not in prefill]
    batch = ScheduleBatch(step=0, num_prefill=len(prefill))
    for i, (prefix, new) in enumerate(rows):
        ids = array("i", range(1, prefix + new + 3))
        batch.requests.append(Request(f"r{i}", ids, sampling, arrival_s=0.0))
        batch.rows.append(i + 1)
        batch.prefix_lens.append(prefix)
        batch.extend_lens.append(new)
        if i < len(prefill):
            batch.input_ids.extend(ids[prefix : prefix + new])
        batch.sampled.append(i)
        batch.sample_positions.append(prefix + new)
        batch.output_counts.append(0)
        batch.table_rows.append(i + 1)
        batch.table_indices.append(prefix // 4)
        batch.table_pages.append(2 * i + 1)
    return batch


STEPS = {
    "prefill": [(0, 17), (0, 1)],
    "mixed": [(0, 9), (12, 30), (40, 1), (7, 1)],
    "decode": [(5, 1), (90, 1), (3, 1)],
}


@pytest.mark.parametrize("sampling", [PLAIN, EVERYTHING], ids=["greedy", "everything"])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.sampled(6)
def test_a_step_neither_waits_nor_mixes_devices(
    kind: str, sampling: SamplingParams, runner: ModelRunner
) -> None:
    """From embedding to the sampled token in the device's buffer."""
    batch = step(STEPS[kind], sampling)
    assert batch.kind == kind
    masks = None
    if sampling is EVERYTHING:
        words = (VOCAB_SIZE + 31) // 32
        masks = SampleMasks([1], np.full((1, words), -1, dtype=np.int32))
    model_step = ModelStep(runner, batch)
    model_step.forward()
    model_step.sample(masks)
    sampled = model_step._sampled.token_ids  # on its way to the host
    assert isinstance(sampled, FakeTensor)
    assert (sampled.device.type, sampled.dtype) == ("cpu", torch.int64)
    assert sampled.shape == (len(batch.sampled),)
    assert runner.memory.next_tokens.device.type == "cuda"


def test_what_a_graph_captures_neither_waits_nor_mixes_devices(runner: ModelRunner) -> None:
    rows = torch.zeros(8, dtype=torch.int32, device="cuda")
    logits = runner.decode_logits(rows, torch.ones_like(rows), 256)
    assert logits.shape == (8, VOCAB_SIZE)
    assert (logits.device.type, logits.dtype) == ("cuda", torch.float32)


def test_what_a_mixed_graph_captures_neither_waits_nor_mixes_devices(runner: ModelRunner) -> None:
    shape = PackedShape(tokens=32, decode_rows=8, prompts=8, logits=8)
    packed = torch.zeros(sum(shape.sizes), dtype=torch.int32, device="cuda")
    logits = runner.packed_logits(packed, shape)
    assert logits.shape == (8, VOCAB_SIZE)
    assert (logits.device.type, logits.dtype) == ("cuda", torch.float32)


def test_experts_are_computed_without_a_wait() -> None:
    """Which expert a token goes through is never known to the host."""
    ops, where = GpuOps(), torch.device("cuda")
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = (64, 48), (48, 32), (64,), (48,)
        experts = [
            Expert(*(torch.empty(shape, device=where) for shape in shapes)) for _ in range(8)
        ]
        routing = Routing(3, True, "sigmoid", groups=4, top_groups=2, group_score="top2")
        correction = torch.empty(8, device=where)
        ids, weights = ops.route(torch.empty(9, 8, device=where), routing, correction)
        x = torch.empty(9, 48, device=where)
        out = ops.run_experts(x, ids, weights, ops.pack_experts(experts), "silu")
        assert (out.shape, out.device.type) == ((9, 48), "cuda")


@pytest.mark.parametrize("kind", ["int4", "int8", "nf4", "mxfp4"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_codes_are_packed_and_multiplied_without_a_wait(kind: str, tokens: int) -> None:
    """In a layer, an embedding and experts; few tokens and many."""
    ops, where = GpuOps(), torch.device("cuda")

    def grouped(n: int, k: int) -> GroupedWeight:
        codes, zeros = (
            torch.empty(n, count, dtype=torch.uint8, device=where) for count in (k, k // 32)
        )
        scales = torch.empty(n, k // 32, device=where)
        table = torch.empty(16, device=where) if kind == "nf4" else None
        order = torch.empty(k, dtype=torch.int64, device=where) if kind == "int4" else None
        weight = GroupedWeight(kind, codes, scales, zeros, table, order)
        return weight if kind.startswith("int") else replace(weight, zeros=None)

    with FakeTensorMode(allow_non_fake_inputs=True):
        packed = ops.pack_linear(grouped(96, 544), torch.empty(96, device=where))
        assert packed.codes.nbytes == 96 * 544 * GROUP_KINDS[kind] // 8
        ids = torch.zeros(tokens, dtype=torch.int64, device=where)
        x = ops.embed(ids, PackedEmbedding(packed, "bfloat16"))
        out = ops.linear(x, packed)
        assert (out.shape, out.dtype, out.device.type) == ((tokens, 96), torch.bfloat16, "cuda")
        experts = ops.pack_experts(Expert(grouped(64, 96), grouped(96, 32)) for _ in range(8))
        routed = ops.route(torch.empty(tokens, 8, device=where), Routing(3, True))
        out = ops.run_experts(out, *routed, experts, "silu")
        assert (out.shape, out.device.type) == ((tokens, 96), "cuda")


def test_recurrent_states_go_on_without_a_wait() -> None:
    """Rows that begin, that go on, from their own state and a saved one, and that save theirs."""
    batch = step(STEPS["mixed"], PLAIN)
    batch.state_rows, batch.state_slots = array("i", [1]), array("i", [11])
    batch.save_rows, batch.save_tokens = array("i", [0, 1, 1]), array("i", [8, 8, 24])
    batch.save_slots = array("i", [9, 10, 12])
    ops, where = GpuOps(), torch.device("cuda")
    with FakeTensorMode(allow_non_fake_inputs=True):
        device = make_device(ops, "cuda")
        fields = {name: getattr(device, name) for name in Device.__slots__}
        rows = StateRows(FakeDevice(**fields | {"queued": True})).of(batch, decode_first=True)
        assert not rows.crossing
        x, weight, inputs = (
            torch.empty(shape, device=where) for shape in ((41, 24), (4, 24), (16, 3, 24))
        )
        mixed = ops.causal_conv(x, weight, inputs, rows)
        q, k, v = mixed.view(41, 3, 8).unbind(1)
        q, k, v = (part.view(41, -1, 4) for part in (q, k, v))
        factors, matrices = (torch.empty(shape, device=where) for shape in ((41, 2), (16, 2, 4, 4)))
        out = ops.gated_delta(q, k, v, factors, factors, matrices, rows)
        assert (out.shape, out.device.type) == ((41, 2, 4), "cuda")


def test_the_fake_device_finds_a_wait_and_a_mix() -> None:
    with FakeTensorMode():
        x = torch.ones(3, device="cuda")
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
        with pytest.raises(DynamicOutputShapeException):
            x[x > 0]
        with pytest.raises(RuntimeError, match="device"):
            x + torch.ones(3)
