"""Captured steps with prompts, on a CPU: over random sequences of steps of all kinds they compute
what the eager steps do, and write what those write."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ops.cpu.op_set import CpuOps
from ops.gpu.op_set import GpuOps
from runtime.config import SchedulerConfig
from runtime.execution.graph_capture import GraphPlan, capture_graphs
from runtime.execution.mixed_graph_runner import MixedGraphRunner, mixed_shapes
from runtime.execution.model_runner import ModelRunner, ModelStep
from runtime.execution.packed_step import PackedShape, empty_step
from runtime.request import SamplingParams
from runtime.scheduling.scheduler import Scheduler
from scripts._eager_recorder import EagerRecorder
from scripts._triton_interpreter import patch_loop_bounds
from tests.ops.gpu.tiny_decoder import (
    PAGE_SIZE,
    VOCAB_SIZE,
    QueuedDevice,
    make_device,
    make_queued_device,
    make_runner,
)
from tests.runtime.execution.drivers import request, run
from tests.runtime.execution.test_forward_batch import random_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from runtime.scheduling.schedule_batch import ScheduleBatch

patch_loop_bounds()

ROWS = 6
# Steps of up to 3 decode rows and of up to 14 tokens in 4 rows are captured; others run eagerly.
PLAN = GraphPlan([1, 3], [PackedShape(6, 2, 2, 2), PackedShape(14, 4, 4, 4)])


def test_shapes_are_of_every_number_of_tokens_with_a_few_numbers_of_rows() -> None:
    assert mixed_shapes(0, 8) == mixed_shapes(1024, 0) == []
    assert mixed_shapes(20, 4) == [PackedShape(20, 4, 4, 4)]
    assert mixed_shapes(70, 40) == [
        PackedShape(tokens, rows, rows, rows)
        for tokens, rows in ((32, 16), (32, 32), (64, 16), (64, 40), (70, 16), (70, 40))
    ]
    largest = mixed_shapes(1024, 256)
    assert largest[-1] == PackedShape(1024, 256, 256, 256)
    tokens = {shape.tokens for shape in largest}
    assert tokens == {32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024}
    assert len(largest) == 31


def test_a_step_takes_the_smallest_shape_that_holds_it() -> None:
    graphs = object.__new__(MixedGraphRunner)
    graphs.shapes = mixed_shapes(256, 64)
    for tokens in range(1, 257):
        for rows in range(1, min(tokens, 64) + 1):
            shape = graphs.padded_shape(tokens, rows)
            holding = [s for s in graphs.shapes if s.tokens >= tokens and s.prompts >= rows]
            assert shape == min(holding)
    assert graphs.padded_shape(257, 1) is None
    assert graphs.padded_shape(200, 65) is None


@pytest.fixture(params=[CpuOps, pytest.param(GpuOps, marks=pytest.mark.slow)])
def device(request: pytest.FixtureRequest) -> QueuedDevice:
    return make_queued_device(request.param())


class EagerAtPaddedSize:
    """The same steps at the same padded sizes, each over tensors of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def holds(self, rows: int) -> bool:
        return rows <= PLAN.decode_sizes[-1]

    def padded_shape(self, tokens: int, rows: int) -> PackedShape | None:
        holding = [s for s in PLAN.shapes if s.tokens >= tokens and s.prompts >= rows]
        return min(holding, default=None)

    def replay(self, first: Tensor, second: Tensor | PackedShape) -> Tensor:
        if isinstance(second, PackedShape):
            return self._runner.packed_logits(first.clone(), second)
        count = len(first)
        size = min(size for size in PLAN.decode_sizes if size >= count)
        rows, kv_lens = first.new_zeros(size), second.new_ones(size)
        rows[:count], kv_lens[:count] = first, second
        bound = self._runner.sizes.context_length
        return self._runner.decode_logits(rows, kv_lens, bound)[:count]


class Watched:
    """Notes every step of a runner: its batch, its logits, and how they were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[ScheduleBatch] = []
        self.logits: list[Tensor] = []
        self.paths: Counter[str] = Counter()
        sample = ModelStep.sample

        def noted(step: ModelStep, masks: Any) -> None:
            self.batches.append(step._batch)
            self.logits.append(step._logits.clone())
            sample(step, masks)

        monkeypatch.setattr(ModelStep, "sample", noted)
        for name in ("_replayed_logits", "_replayed_mixed_logits", "_eager_logits"):
            self._count(name, monkeypatch)

    def _count(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(ModelStep, name)

        def counted(*arguments: Any) -> Tensor:
            self.paths[name] += 1
            result: Tensor = original(*arguments)
            return result

        monkeypatch.setattr(ModelStep, name, counted)

    def forget(self) -> None:
        self.batches, self.logits, self.paths = [], [], Counter()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def generate(runner: ModelRunner, seed: int) -> dict[str, list[int]]:
    """Requests of random lengths, cut into chunks of 12: steps of every kind and size."""
    draw = random.Random(seed)
    scheduler = Scheduler(
        SchedulerConfig(
            capacity_tokens=512,
            context_length=256,
            page_size=PAGE_SIZE,
            max_running_requests=ROWS,
            chunked_prefill_size=12,
        )
    )
    requests = [
        request(
            f"{i}",
            draw.choices(range(1, VOCAB_SIZE), k=draw.choice((1, 2, 5, 9, 23))),
            SamplingParams(max_new_tokens=draw.randint(1, 12), temperature=0.0, ignore_eos=True),
        )
        for i in range(9)
    ]
    outputs = run(scheduler, runner, requests).outputs
    return {name: generated.token_ids for name, generated in outputs.items()}


@pytest.fixture
def runner(device: QueuedDevice) -> Iterator[ModelRunner]:
    runner = make_runner(device, rows=ROWS)
    yield runner
    runner.close()


def repeat(runner: ModelRunner, batches: list[ScheduleBatch]) -> None:
    for batch in batches:
        step = runner.launch(batch)
        step.sample(None)
        step.result()


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_all_kinds_equal_the_eager_ones_at_the_padded_size(
    seed: int, runner: ModelRunner, device: QueuedDevice, watched: Watched
) -> None:
    """Bit for bit: every step's logits, and all KV that a request owns at the end."""
    capture_graphs(runner, PLAN, EagerRecorder())
    tokens = generate(runner, seed)
    batches, logits, paths = watched.batches, watched.logits, watched.paths
    assert min(paths.values()) >= 2
    assert len(paths) == 3, "decode graphs, mixed graphs and eager steps take turns"
    kinds = Counter(batch.kind for batch in batches)
    assert kinds["mixed"] >= 3

    watched.forget()
    other = make_runner(device, rows=ROWS)
    other.graphs = other.mixed_graphs = EagerAtPaddedSize(other)
    repeat(other, batches)
    assert watched.paths == paths
    for got, want in zip(logits, watched.logits, strict=True):
        assert torch.equal(got, want)
    pools = zip(runner.memory.pool.tensors(), other.memory.pool.tensors(), strict=True)
    assert all(torch.equal(a[PAGE_SIZE:], b[PAGE_SIZE:]) for a, b in pools)
    assert torch.equal(runner.memory.next_tokens[1:], other.memory.next_tokens[1:])
    other.close()

    watched.forget()
    plain = make_runner(make_device(CpuOps()), rows=ROWS)  # in the batch's own order, no padding
    assert generate(plain, seed) == tokens
    assert watched.paths == {"_eager_logits": len(batches)}
    for got, want in zip(logits, watched.logits, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    plain.close()


def test_what_padding_holds_changes_nothing(runner: ModelRunner, watched: Watched) -> None:
    """A NaN in the reserved page, another token of the reserved row, a larger step before."""
    capture_graphs(runner, PLAN, EagerRecorder())
    generate(runner, 5)
    batches, logits = watched.batches, watched.logits
    pools = [pool.clone() for pool in runner.memory.pool.tensors()]
    watched.forget()
    for pool in runner.memory.pool.tensors():
        pool.zero_()
        pool[:PAGE_SIZE] = float("nan")
    runner.memory.next_tokens[0] = 17
    repeat(runner, batches)
    for got, want in zip(watched.logits, logits, strict=True):
        assert torch.equal(got, want)
    for pool, before in zip(runner.memory.pool.tensors(), pools, strict=True):
        assert torch.equal(pool[PAGE_SIZE:], before[PAGE_SIZE:])


def test_capturing_touches_the_reserved_page_alone(runner: ModelRunner) -> None:
    runner.memory.next_tokens[1:] = 7
    capture_graphs(runner, PLAN, EagerRecorder())
    for pool in runner.memory.pool.tensors():
        assert torch.any(pool[:1])
        assert not torch.any(pool[1:])
    assert runner.memory.next_tokens[1:].tolist() == [7] * ROWS


def test_steps_are_captured_from_the_largest_down_over_padding() -> None:
    seen: list[tuple[str, int]] = []

    class Runner:
        device = make_device(CpuOps())
        sizes = make_runner(device).sizes
        graphs = mixed_graphs = None

        def packed_logits(self, packed: Tensor, shape: PackedShape) -> Tensor:
            if len(seen) < 4:
                assert packed.tolist() == empty_step(shape).tolist()
            seen.append(("mixed", shape.tokens))
            return torch.zeros(shape.logits, 3)

        def decode_logits(self, rows: Tensor, kv_lens: Tensor, bound: int) -> Tensor:
            assert (rows.tolist(), set(kv_lens.tolist())) == ([0] * len(rows), {1})
            seen.append(("decode", len(rows)))
            return torch.ones(len(rows), 3)

    runner: Any = Runner()
    capture_graphs(runner, PLAN, EagerRecorder())
    twice = [("mixed", 14), ("mixed", 6), ("decode", 3), ("decode", 1)]
    assert seen == [step for step in twice for _ in range(2)]
    replays = [*runner.mixed_graphs._replays.values(), *runner.graphs._replays.values()]
    with torch.inference_mode():
        outputs = [replay() for replay in replays]
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == 1


class Calls(TorchDispatchMode):
    """Counts what would be launched: operations that compute or copy."""

    FREE = ("view", "split", "slice", "select", "detach", "empty", "unbind", "alias", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.__name__
        if name.startswith("index_select") or not name.startswith(self.FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class CountingDevice(QueuedDevice):
    uploads = 0

    def upload(self, values: Any) -> Tensor:
        CountingDevice.uploads += 1  # a copy on a GPU; on a CPU it is none
        return super().upload(values)


class InstantGraphs:
    """Holds every step with prompts, and answers it with zeros."""

    replays = 0

    def padded_shape(self, tokens: int, rows: int) -> PackedShape:
        return PackedShape(64, 8, 8, 8)

    def replay(self, packed: Tensor, shape: PackedShape) -> Tensor:
        assert packed.shape == (sum(shape.sizes),)
        InstantGraphs.replays += 1
        return torch.zeros(shape.logits, VOCAB_SIZE)


def test_a_mixed_step_is_one_replay_and_few_small_calls() -> None:
    """Counted from the launch to the tokens on their way to the host, for a step that ends prompts
    and needs new pages. The copy over the static ints is the graph runner's (not in `InstantGraphs`,
    whose zeros are not in a replay), and an index of 32 bits costs a conversion."""
    device = make_queued_device(GpuOps())
    fields = {name: getattr(device, name) for name in QueuedDevice.__slots__}
    runner = make_runner(CountingDevice(**fields))
    runner.mixed_graphs = InstantGraphs()
    batch = random_batch(random.Random(1), "mixed")
    assert batch.table_rows
    assert any(row < batch.num_prefill for row in batch.sampled)
    step = ModelStep(runner, batch)
    with Calls() as calls:
        step.forward()
        step.sample(None)
    runner.close()
    to_device, to_static_ints, index_conversions, zeros = 1, 1, 2, 1
    made = len(calls.names) + CountingDevice.uploads - zeros
    made += to_device + to_static_ints + index_conversions
    assert InstantGraphs.replays == 1
    assert made <= 30, (made, calls.names)
