"""A step's tensors against a recount in plain Python, for each way in which they are made."""

from __future__ import annotations

import random
from array import array
from dataclasses import fields, replace

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
    upload_step,
)
from runtime.execution.kv_pool import StepMemory
from runtime.execution.model_runner import ModelRunner, ModelStep
from runtime.execution.packed_step import PackedShape, packed_shape, unpack_step
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


def recount(
    batch: ScheduleBatch, prompt: list[int], newest: list[int], *, decode_first: bool
) -> dict[str, list[int]]:
    """What the tensors must hold, row by row and token by token.

    decode_first: the decode rows stand before the prompts.
    """
    order = list(range(len(batch.rows)))
    if decode_first:
        order = order[batch.num_prefill :] + order[: batch.num_prefill]
        prompt = [token + batch.num_decode for token in prompt]
    table = {
        (row, index): page
        for row, index, page in zip(
            batch.table_rows, batch.table_indices, batch.table_pages, strict=True
        )
    }
    ids, positions, slots, ends, given = [], [], [], [], list(batch.input_ids)
    for i in order:
        row = batch.rows[i]
        for position in range(batch.prefix_lens[i], batch.prefix_lens[i] + batch.extend_lens[i]):
            ids.append(given.pop(0) if i < batch.num_prefill else newest[row])
            positions.append(position)
            slots.append(table[row, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
        ends.append(len(ids))
    return {
        "input_ids": ids,
        "positions": positions,
        "slots": slots,
        "logit_tokens": [ends[order.index(i)] - 1 for i in batch.sampled] + prompt,
        "rows": [batch.rows[i] for i in order],
        "qo_indptr": [0, *ends],
        "kv_lens": [batch.prefix_lens[i] + batch.extend_lens[i] for i in order],
        "sampled": [batch.rows[i] for i in batch.sampled],
        "sample_positions": list(batch.sample_positions),
    }


def values(forward: ForwardBatch) -> dict[str, list[int]]:
    """Of all rows together: decode rows that are attended to apart stand first."""
    step, attention = forward.step, forward.step.attention
    if attention.decode is not None:
        head = attention.decode
        assert head.max_q_len == 1
        attention = replace(
            attention,
            rows=torch.cat((head.rows, attention.rows)),
            qo_indptr=torch.cat((head.qo_indptr[:-1], attention.qo_indptr)),
            kv_lens=torch.cat((head.kv_lens, attention.kv_lens)),
        )
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
    for staging in (Staging(DEVICE), None):
        memory = fresh_memory(seed)
        forward = make_forward_batch(batch, at, staging, memory)
        found, newest = values(forward), memory.next_tokens.tolist()
        assert found == recount(batch, prompt, newest, decode_first=staging is not None)
        attention = forward.step.attention
        assert (attention.max_q_len, attention.page_size) == (max(batch.extend_lens), PAGE_SIZE)
        assert attention.max_kv_len == max(found["kv_lens"])
        assert forward.step.caches is memory.pool.caches


@pytest.mark.parametrize("kind", ["prefill", "mixed", "decode"])
@pytest.mark.parametrize("seed", range(6))
def test_a_step_packed_into_a_larger_shape_is_the_same_step_and_padding(
    kind: str, seed: int
) -> None:
    batch = random_batch(random.Random(seed), kind)
    tight, wide = packed_shape(batch), PackedShape(tokens=70, decode_rows=9, prompts=10, logits=11)
    memory = fresh_memory(seed)
    staging = Staging(DEVICE)
    found = []
    for shape in (tight, wide):
        packed, _ = upload_step(batch, shape, staging, memory)
        found.append(unpack_step(packed, shape, memory, max_q_len=70, max_kv_len=256))
    alone, padded = found
    for name, padding in (
        ("input_ids", 0),
        ("positions", 0),
        ("slots", 0),
        ("logit_tokens", 0),
    ):
        values = getattr(alone, name).tolist()
        size = wide.logits if name == "logit_tokens" else wide.tokens
        assert getattr(padded, name).tolist() == values + [padding] * (size - len(values))
    assert padded.attention.decode is not None
    rows, decoding = padded.attention, padded.attention.decode
    count, waiting = batch.num_prefill, batch.num_decode
    assert decoding.rows.tolist() == [*batch.rows[count:], *[0] * (9 - waiting)]
    lengths = [length + 1 for length in batch.prefix_lens[count:]]
    assert decoding.kv_lens.tolist() == [*lengths, *[1] * (9 - waiting)]
    assert rows.rows.tolist() == [*batch.rows[:count], *[0] * (10 - count)]
    ends = np.cumsum([waiting, *batch.extend_lens[:count]]).tolist()
    assert rows.qo_indptr.tolist() == ends + [ends[-1]] * (10 - count)
    lengths = [a + b for a, b in zip(batch.prefix_lens, batch.extend_lens, strict=True)][:count]
    assert rows.kv_lens.tolist() == [*lengths, *[1] * (10 - count)]


@pytest.mark.parametrize("seed", range(6))
def test_a_replayed_step_is_the_same_step(seed: int) -> None:
    """What a graph makes of rows and lengths is what the eager path makes of the batch."""
    batch = random_batch(random.Random(seed), "decode")
    memory = fresh_memory(seed)
    rows, kv_lens, sampled = make_replay_batch(batch, Staging(DEVICE), memory)
    step = decode_step(rows, kv_lens, memory, 256)
    want = recount(batch, [], memory.next_tokens.tolist(), decode_first=True)
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
