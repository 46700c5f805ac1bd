"""The graph runner on a CPU: sizes, padding, static buffers, what a replay may change.

`EagerRecorder` runs a recorded step's closure over the same static buffers as a CUDA graph would.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest
import torch

from ops.cpu.op_set import CpuOps
from ops.gpu.op_set import GpuOps
from runtime.execution.cuda_graph_runner import CudaGraphRunner, graph_sizes
from runtime.request import Request, SamplingParams
from runtime.scheduling.schedule_batch import ScheduleBatch
from scripts._eager_recorder import EagerRecorder
from scripts._triton_interpreter import patch_loop_bounds
from tests.ops.gpu.tiny_decoder import PAGE_SIZE, VOCAB_SIZE, make_device, make_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from runtime.execution.model_runner import ModelRunner

patch_loop_bounds()

ROWS = 8
KV_LENS = [1, 4, 5, 30, 64, 17, 100, 2]


@pytest.fixture(
    params=[CpuOps, pytest.param(GpuOps, marks=pytest.mark.slow)], ids=["torch", "triton"]
)
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    """Eight requests in decode: shuffled pages, random KV, newest tokens known."""
    runner = make_runner(make_device(request.param()), rows=ROWS)
    generator = torch.Generator().manual_seed(3)
    for pool in runner.memory.pool.tensors():
        pool.copy_(torch.randn(pool.shape, generator=generator))
    pages = (torch.randperm(127, generator=generator) + 1).tolist()
    for row, kv_len in enumerate(KV_LENS, start=1):
        count = -(-kv_len // PAGE_SIZE)
        runner.memory.block_table.pages[row, :count] = torch.tensor(pages[:count])
        del pages[:count]
    runner.memory.next_tokens.copy_(torch.randint(0, VOCAB_SIZE, (ROWS + 1,), generator=generator))
    yield runner
    runner.close()


def graphs_of(runner: ModelRunner, sizes: list[int]) -> CudaGraphRunner:
    return CudaGraphRunner(EagerRecorder(), runner.decode_logits, sizes, 256, torch.device("cpu"))


def step_inputs(rows: list[int], size: int) -> tuple[Tensor, Tensor]:
    """rows and kv_lens of a decode step of these request rows, padded to `size`."""
    padding = size - len(rows)
    kv_lens = [KV_LENS[row - 1] for row in rows]
    return (
        torch.tensor(rows + [0] * padding, dtype=torch.int32),
        torch.tensor(kv_lens + [1] * padding, dtype=torch.int32),
    )


def replay(graphs: CudaGraphRunner, rows: list[int]) -> Tensor:
    with torch.inference_mode():
        return graphs.replay(*step_inputs(rows, len(rows)))


def pool_of(runner: ModelRunner) -> Tensor:
    """All K and V, [2 * layers, S, HK, D], a copy."""
    return torch.stack(runner.memory.pool.tensors())


def test_sizes_are_the_published_ladder() -> None:
    assert graph_sizes(0) == []
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(24) == [1, 2, 4, 8, 12, 16, 24]
    assert graph_sizes(256) == [1, 2, 4, 8, 12, *range(16, 257, 8)]
    assert graph_sizes(576)[-21:] == [240, 248, 256, *range(272, 512, 16), 512, 544, 576]


def spy_on_decoding(seen: list[tuple[int, int]]) -> Callable[[Tensor, Tensor, int], Tensor]:
    """A decode step that notes its size and bound, and checks that it got padding alone."""

    def decode_logits(rows: Tensor, kv_lens: Tensor, max_kv_len: int) -> Tensor:
        assert rows.tolist() == [0] * len(rows)
        assert kv_lens.tolist() == [1] * len(rows)
        seen.append((len(rows), max_kv_len))
        return torch.zeros(len(rows), 3)

    return decode_logits


def test_sizes_are_recorded_from_the_largest_down_after_two_warm_ups() -> None:
    seen: list[tuple[int, int]] = []
    device = torch.device("cpu")
    CudaGraphRunner(EagerRecorder(), spy_on_decoding(seen), [1, 2, 4], 99, device)
    assert seen == [(4, 99)] * 2 + [(2, 99)] * 2 + [(1, 99)] * 2


def test_a_step_takes_the_smallest_size_that_holds_it() -> None:
    device = torch.device("cpu")
    graphs = CudaGraphRunner(EagerRecorder(), spy_on_decoding([]), [1, 2, 4, 8], 256, device)
    taken = {rows: graphs.padded_size(rows) for rows in range(1, 9)}
    assert taken == {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}
    assert [graphs.holds(rows) for rows in (1, 8, 9)] == [True, True, False]


def test_all_sizes_share_one_output_buffer() -> None:
    """A buffer for each would take gigabytes at large vocabularies."""
    device = torch.device("cpu")
    graphs = CudaGraphRunner(EagerRecorder(), spy_on_decoding([]), [1, 2, 4], 256, device)
    with torch.inference_mode():
        outputs = [replay() for replay in graphs._replays.values()]
    assert [len(output) for output in outputs] == [4, 2, 1]
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == 1


@pytest.mark.parametrize("rows", [[3], [5, 1, 7, 2], [6, 4, 8, 2, 1]], ids=str)
def test_a_replay_equals_the_eager_step_at_the_padded_size(
    rows: list[int], runner: ModelRunner
) -> None:
    """Bit for bit: the live rows' logits, and the whole KV pool afterwards."""
    graphs = graphs_of(runner, [4, 8])
    before = pool_of(runner)
    size = graphs.padded_size(len(rows))
    with torch.inference_mode():
        expected = runner.decode_logits(*step_inputs(rows, size), 256)[: len(rows)].clone()
    expected_pool = pool_of(runner)
    for pool, saved in zip(runner.memory.pool.tensors(), before, strict=True):
        pool.copy_(saved)
    got = replay(graphs, rows)
    assert torch.equal(got, expected)
    assert torch.equal(pool_of(runner)[:, 1:], expected_pool[:, 1:])
    assert not torch.equal(expected_pool, before)


def test_what_padding_holds_changes_nothing(runner: ModelRunner) -> None:
    """Other content of the reserved page, another token of the reserved row, a larger step before."""
    graphs = graphs_of(runner, [8])
    expected = replay(graphs, [6, 4, 8])
    expected = expected.clone()
    for pool in runner.memory.pool.tensors():
        pool[:PAGE_SIZE] = 1e3
    runner.memory.next_tokens[0] = 17
    replay(graphs, [1, 2, 3, 5, 7])
    got = replay(graphs, [6, 4, 8])
    assert torch.equal(got, expected)


def test_a_smaller_replay_leaves_the_slots_of_a_larger_one_alone(runner: ModelRunner) -> None:
    """Padded rows that keep their last step's slots overwrite live KV (sglang 24743)."""
    graphs = graphs_of(runner, [8])
    replay(graphs, list(range(1, 9)))
    before = pool_of(runner)
    live = [2, 3, 5, 6, 7]
    runner.memory.next_tokens.add_(1)  # what the five rows write differs from what stands there
    replay(graphs, live)
    changed = (pool_of(runner) != before).any(-1).any(-1).any(0).nonzero().flatten().tolist()
    rows, kv_lens = step_inputs(live, len(live))
    written = runner.memory.block_table.slots(rows, kv_lens.long() - 1).tolist()
    assert sorted(changed) == sorted([0, *written])


def decode_batch(rows: list[int]) -> ScheduleBatch:
    batch = ScheduleBatch(step=0)
    for i, row in enumerate(rows):
        request = Request(f"r{row}", array("i", [1]), SamplingParams(temperature=0.0), 0.0)
        batch.requests.append(request)
        batch.rows.append(row)
        batch.prefix_lens.append(KV_LENS[row - 1] - 1)
        batch.extend_lens.append(1)
        batch.sampled.append(i)
        batch.sample_positions.append(KV_LENS[row - 1])
        batch.output_counts.append(0)
    return batch


def prefill_batch() -> ScheduleBatch:
    batch = decode_batch([1])
    batch.num_prefill, batch.prefix_lens[0], batch.sample_positions[0] = 1, 0, 1
    batch.input_ids.append(9)
    return batch


class CountingRecorder:
    """Counts the replays of what it records."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        recorded = EagerRecorder().record(step)

        def replayed() -> Tensor:
            self.replays += 1
            return recorded()

        return replayed


def test_only_decode_steps_up_to_the_largest_size_are_replayed(runner: ModelRunner) -> None:
    """And they give the tokens that they give without graphs."""
    steps = [decode_batch([3, 1]), decode_batch([1, 2, 3, 4, 5]), prefill_batch()]
    recorder = CountingRecorder()
    graphs = CudaGraphRunner(recorder, runner.decode_logits, [4], 256, torch.device("cpu"))
    tokens: dict[bool, list[list[int]]] = {}
    newest = runner.memory.next_tokens.clone()
    for replayed in (False, True):
        runner.graphs = graphs if replayed else None
        tokens[replayed] = []
        for batch in steps:
            runner.memory.next_tokens.copy_(newest)
            pending = runner.launch(batch)
            pending.sample(None)
            tokens[replayed].append(pending.result().token_ids)
    assert tokens[True] == tokens[False]
    assert recorder.replays == 1
