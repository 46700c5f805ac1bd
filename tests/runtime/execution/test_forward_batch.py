"""A step's tensors against a recount in plain Python, for each way in which they are made."""

from __future__ import annotations

import random
from array import array
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ops.cpu.op_set import CpuOps
from runtime.execution.forward_batch import (
    ForwardBatch,
    Staging,
    decode_step,
    make_forward_batch,
    make_replay_batch,
)
from runtime.execution.kv_pool import StepMemory
from runtime.execution.model_runner import ModelRunner, ModelStep
from runtime.request import Request, SamplingParams
from runtime.scheduling.schedule_batch import ScheduleBatch
from tests.ops.gpu.tiny_decoder import PAGE_SIZE, VOCAB_SIZE, make_device, make_runner

DEVICE = make_device(CpuOps())


def random_batch(draw: random.Random, kind: str) -> ScheduleBatch:
    """Rows in random order of table rows, pages without order."""
    batch = ScheduleBatch(step=0)
    rows = draw.sample(range(1, 9), draw.randint(2, 8))
    mixed = draw.randint(1, len(rows) - 1)
    batch.num_prefill = {"prefill": len(rows), "mixed": mixed, "decode": 0}[kind]
    pages = draw.sample(range(1, 128), 127)
    for i, row in enumerate(rows):
        prefill = i < batch.num_prefill
        start, new = draw.randrange(9), draw.randint(1, 7) if prefill else 1
        for index in range(-(-(start + new) // PAGE_SIZE)):
            batch.table_rows.append(row)
            batch.table_indices.append(index)
            batch.table_pages.append(pages.pop())
        ids = array("i", draw.choices(range(VOCAB_SIZE), k=new))
        batch.requests.append(Request(f"r{i}", ids, SamplingParams(temperature=0.0), 0.0))
        batch.rows.append(row)
        batch.prefix_lens.append(start)
        batch.extend_lens.append(new)
        if prefill:
            batch.input_ids.extend(ids)
        if not prefill or draw.random() < 0.7:  # the others are middle chunks
            batch.sampled.append(i)
            batch.sample_positions.append(start + new)
            batch.output_counts.append(0)
    return batch


def fresh_memory(seed: int) -> StepMemory:
    runner = make_runner(DEVICE)
    runner.close()
    generator = torch.Generator().manual_seed(seed)
    runner.memory.next_tokens.random_(VOCAB_SIZE, generator=generator)
    return runner.memory


def recount(batch: ScheduleBatch, prompt: list[int], newest: list[int]) -> dict[str, list[int]]:
    """What the tensors must hold, row by row and token by token."""
    table = {
        (row, index): page
        for row, index, page in zip(
            batch.table_rows, batch.table_indices, batch.table_pages, strict=True
        )
    }
    ids, positions, slots, ends, given = [], [], [], [], list(batch.input_ids)
    for i, row in enumerate(batch.rows):
        for position in range(batch.prefix_lens[i], batch.prefix_lens[i] + batch.extend_lens[i]):
            ids.append(given.pop(0) if i < batch.num_prefill else newest[row])
            positions.append(position)
            slots.append(table[row, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
        ends.append(len(ids))
    return {
        "input_ids": ids,
        "positions": positions,
        "slots": slots,
        "logit_tokens": [ends[i] - 1 for i in batch.sampled] + prompt,
        "rows": list(batch.rows),
        "qo_indptr": [0, *ends],
        "kv_lens": [a + b for a, b in zip(batch.prefix_lens, batch.extend_lens, strict=True)],
        "sampled": [batch.rows[i] for i in batch.sampled],
        "sample_positions": list(batch.sample_positions),
    }


def values(forward: ForwardBatch) -> dict[str, list[int]]:
    step, attention = forward.step, forward.step.attention
    found = {name: getattr(step, name) for name in ("input_ids", "positions", "slots")}
    found |= {name: getattr(attention, name) for name in ("rows", "qo_indptr", "kv_lens")}
    found |= {"logit_tokens": step.logit_tokens, "sampled": forward.sampled.rows}
    found |= {"sample_positions": forward.sampled.positions}
    assert all(found[name].dtype == torch.int32 for name in ("rows", "qo_indptr", "kv_lens"))
    others = [tensor for tensor in found.values() if tensor.dtype != torch.int32]
    assert all(tensor.dtype == torch.int64 for tensor in others)
    return {name: tensor.tolist() for name, tensor in found.items()}


@pytest.mark.parametrize("kind", ["prefill", "mixed", "decode"])
@pytest.mark.parametrize("seed", range(6))
def test_tensors_hold_what_the_batch_says(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    batch = random_batch(draw, kind)
    assert batch.kind == kind
    prompt = sorted(draw.sample(range(sum(batch.extend_lens)), draw.randint(0, 2)))
    at = np.array(prompt, dtype=np.int32)
    for make in (
        lambda memory: make_forward_batch(batch, at, Staging(DEVICE), memory),
        lambda memory: make_forward_batch(batch, at, None, memory),
    ):
        memory = fresh_memory(seed)
        forward = make(memory)
        assert values(forward) == recount(batch, prompt, memory.next_tokens.tolist())
        attention = forward.step.attention
        assert (attention.max_q_len, attention.page_size) == (max(batch.extend_lens), PAGE_SIZE)
        assert attention.max_kv_len == max(attention.kv_lens.tolist())
        assert forward.step.caches is memory.pool.caches


@pytest.mark.parametrize("seed", range(6))
def test_a_replayed_step_is_the_same_step(seed: int) -> None:
    """What a graph makes of rows and lengths is what the eager path makes of the batch."""
    batch = random_batch(random.Random(seed), "decode")
    memory = fresh_memory(seed)
    rows, kv_lens, sampled = make_replay_batch(batch, Staging(DEVICE), memory)
    step = decode_step(rows, kv_lens, memory, 256)
    want = recount(batch, [], memory.next_tokens.tolist())
    assert values(ForwardBatch(step, sampled)) == want


class Calls(TorchDispatchMode):
    """Notes every operation that reaches torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class InstantGraphs:
    """Answers every decode step with zeros."""

    def holds(self, rows: int) -> bool:
        return True

    def replay(self, rows: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(rows.shape[0], VOCAB_SIZE)


def test_a_replayed_step_makes_nothing_but_what_the_graph_and_the_sampler_read() -> None:
    runner: ModelRunner = make_runner(DEVICE)
    runner.graphs = InstantGraphs()
    step = ModelStep(runner, random_batch(random.Random(0), "decode"))
    with Calls() as calls:
        step.forward()
    runner.close()
    # Two int64 copies of rows and lengths for the sampler, new pages written, the graph's zeros.
    allowed = {"_to_copy.default": 2, "index_put_.default": 1, "zeros.default": 1}
    views = {"split.Tensor", "split_with_sizes.default", "slice.Tensor", "detach.default"}
    made = [name for name in calls.names if name not in views]
    assert {name: made.count(name) for name in made} == allowed
    assert {field.name for field in fields(step._sampled_rows)} == {"rows", "positions"}
