"""What must be right on the device before any speed is measured."""

from __future__ import annotations

import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from ops import reference
from ops.gpu import decode_attention, extend_attention
from ops.gpu.library import Chip
from ops.kv_codes import CODE_DTYPES, encode
from ops.op_set import (
    AttentionBatch,
    AttentionSpec,
    HeadNorm,
    KvScales,
    Penalties,
    SamplingTensors,
)
from runtime.execution.cuda_graph_runner import CudaGraphRunner
from runtime.execution.mixed_graph_runner import MixedGraphRunner
from runtime.execution.packed_step import pack_step
from runtime.request import SamplingParams
from scripts._paged import paged_problem, relative_error
from scripts.gpu.engine import Outcome, make_request, mixed_batch, run_requests, scheduler_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from runtime.execution.device import Device
    from runtime.execution.model_runner import ModelRunner

# Largest difference over the largest value. A rounding to bfloat16 is 2**-9 of a value; the
# probabilities are rounded too before they meet V.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}
# Of log-probabilities whose logits deviate by 3. At Qwen3-0.6B's shape bfloat16 on a CPU is off
# from float32 by 0.05 in the mean square and 0.17 at the most of 100 tokens; two runs in bfloat16
# are off from one another by up to 1.4 times that, and 2,000 tokens are compared.
LOGPROB_TOLERANCE = {torch.bfloat16: 0.35, torch.float32: 1e-3}
INT32_ELEMENTS = 2**31


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Few, since each pair of kernels takes up to ten seconds to compile.

    Args:
        dtype: None: the device's own.
        small: with the tiles of chips that have little shared memory.
        codes: what keys and values are kept as, see `CODE_DTYPES`; None: as they are.
    """

    head_dim: int
    group: int
    page_size: int
    feature: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    small: bool = False
    codes: str | None = None

    @property
    def name(self) -> str:
        kinds = [self.feature, str(self.dtype or "").removeprefix("torch."), "small" * self.small]
        kinds.append(self.codes or "")
        return f"d{self.head_dim} g{self.group} {' '.join(filter(None, kinds))}"


ATTENTION_CASES = [
    AttentionCase(64, 3, 1, "plain"),
    AttentionCase(80, 1, 16, "window", {"window": 100}),
    AttentionCase(96, 8, 1, "soft cap", {"soft_cap": 20.0}),
    AttentionCase(128, 4, 16, "plain"),
    AttentionCase(128, 4, 16, "plain", small=True),
    AttentionCase(128, 8, 16, "sinks", {"sinks": True}),
    AttentionCase(128, 4, 16, "plain", dtype=torch.float16),
    AttentionCase(64, 4, 16, "plain", dtype=torch.float32),
    AttentionCase(64, 24, 16, "window and cap", {"window": 100, "soft_cap": 20.0}),
    AttentionCase(256, 4, 16, "soft cap", {"soft_cap": 20.0}),
    AttentionCase(256, 4, 16, "soft cap", {"soft_cap": 20.0}, small=True),
    AttentionCase(128, 4, 16, "plain", codes="int8"),
    AttentionCase(64, 3, 16, "window", {"window": 100}, codes="fp8"),
]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked: `passed` is None where the device has no room for it."""

    name: str
    passed: bool | None
    detail: str


def _error_check(name: str, error: float, dtype: torch.dtype) -> Check:
    limit = TOLERANCE[dtype]
    return Check(name, error <= limit, f"error {error:.1e}, allowed {limit:.0e}")


@contextmanager
def small_tiles(small: bool) -> Iterator[None]:
    """In the block the kernels take the tiles of a card with little shared memory."""
    with ExitStack() as stack:
        for module in (decode_attention, extend_attention) if small else ():
            stack.enter_context(patch.object(module, "chip_of", lambda _: Chip()))
        yield


def check_attention(device: Device, *, tiny: bool) -> Iterator[Check]:
    """Extend, decode and mixed attention against the reference; NaN where nothing may be read."""
    rows = [(9, 20), (40, 1)] if tiny else [(700, 300), (0, 129), (2500, 1), (15, 2)]
    long = 300 if tiny else 40_000
    for case in ATTENTION_CASES:
        yield from _attention_checks(device, case, rows)
    plain = AttentionCase(128, 4, 16, f"{long} keys")
    yield from _attention_checks(device, plain, [(long, 1), (long - 64, 64)])


def _attention_checks(
    device: Device, case: AttentionCase, rows: list[tuple[int, int]]
) -> Iterator[Check]:
    dtype = case.dtype or device.dtype
    shape: dict[str, Any] = {"head_dim": case.head_dim, "group": case.group}
    shape |= {"page_size": case.page_size, **case.options}
    decoding = [(prefix + new - 1, 1) for prefix, new in rows]
    for name, lengths in (
        ("extend_attention", rows),
        ("decode_attention", decoding),
        ("mixed_attention", decoding + rows),
    ):
        problem = paged_problem(lengths, dtype=dtype, **shape).to(device.torch_device)
        op, truth, batch = getattr(device.ops, name), reference.extend_attention, problem.batch
        if name == "mixed_attention":
            truth, batch = reference.mixed_attention, _decode_rows_apart(batch, len(decoding))
        pools, scales = (problem.k_pool, problem.v_pool), None
        if case.codes is not None:
            coded = [encode(pool, CODE_DTYPES[case.codes]) for pool in pools]
            (codes_k, scales_k), (codes_v, scales_v) = coded
            pools, scales = (codes_k, codes_v), KvScales(scales_k, scales_v)
        arguments = (problem.q, *pools, batch, problem.spec, scales)
        with small_tiles(case.small):
            got = op(*arguments)
        yield _error_check(f"{name} {case.name}", relative_error(got, truth(*arguments)), dtype)


def _decode_rows_apart(batch: AttentionBatch, count: int) -> AttentionBatch:
    """With its first rows, of one token each, as decode rows."""
    decode = replace(
        batch,
        rows=batch.rows[:count],
        kv_lens=batch.kv_lens[:count],
        qo_indptr=batch.qo_indptr[: count + 1],
        max_q_len=1,
    )
    return replace(
        batch,
        rows=batch.rows[count:],
        kv_lens=batch.kv_lens[count:],
        qo_indptr=batch.qo_indptr[count:],
        decode=decode,
    )


def check_large_offsets(device: Device) -> Check:
    """Slots whose element offset does not fit 32 bits: stored, then attended to."""
    name, head_dim = "slots past 2**31 elements", 128
    slots = INT32_ELEMENTS // head_dim + 64
    needed = 3 * slots * head_dim * device.dtype.itemsize
    if device.memory_budget_bytes is None or device.memory_budget_bytes < needed:
        return Check(name, None, f"needs {needed:,} bytes of device memory")
    where: dict[str, Any] = {"device": device.torch_device, "dtype": device.dtype}
    k_pool, v_pool = (torch.zeros(slots, 1, head_dim, **where) for _ in range(2))
    count = 40
    k, v, q = (torch.randn(count, 1, head_dim, **where) for _ in range(3))
    last = torch.arange(slots - count, slots, device=device.torch_device)
    device.ops.store_kv(k, v, k_pool, v_pool, last)
    ints: dict[str, Any] = {"device": device.torch_device, "dtype": torch.int32}
    batch = AttentionBatch(
        block_table=last.int()[None],
        rows=torch.zeros(1, **ints),
        qo_indptr=torch.tensor([0, count], **ints),
        kv_lens=torch.tensor([count], **ints),
        page_size=1,
        max_q_len=count,
        max_kv_len=count,
    )
    arguments = (q, k_pool, v_pool, batch, AttentionSpec(head_dim**-0.5))
    stored = torch.equal(k_pool[-count:], k) and torch.equal(v_pool[-count:], v)
    error = relative_error(
        device.ops.extend_attention(*arguments), reference.extend_attention(*arguments)
    )
    check = _error_check(name, error, device.dtype)
    return Check(name, bool(check.passed) and stored, check.detail)


def check_elementwise(device: Device) -> Iterator[Check]:
    """Norms, rotary and activations against the reference on the same device."""
    ops = device.ops
    where: dict[str, Any] = {"device": device.torch_device, "dtype": device.dtype}
    x, residual = torch.randn(33, 1024, **where), torch.randn(33, 1024, **where)
    weight, qkv = torch.randn(1024, **where), torch.randn(33, 12, 128, **where)
    pairs = {
        "rms_norm": (ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)),
        "rms_norm of heads": (
            ops.rms_norm(qkv[:, :8], weight[:128], 1e-5),
            reference.rms_norm(qkv[:, :8], weight[:128], 1e-5),
        ),
        "add_rms_norm": (
            ops.add_rms_norm(x, residual.clone(), weight, 1e-5),
            reference.add_rms_norm(x, residual.clone(), weight, 1e-5),
        ),
        "silu_and_mul": (ops.silu_and_mul(x), reference.silu_and_mul(x)),
        "gelu_and_mul": (ops.gelu_and_mul(x, tanh=True), reference.gelu_and_mul(x, tanh=True)),
    }
    angles = torch.rand(64, 64, device=device.torch_device) * 6
    rope = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.arange(33, device=device.torch_device)
    for interleaved in (False, True):
        turned = [qkv.clone(), qkv.clone()]
        for op, tensor in zip((ops.rotary, reference.rotary), turned, strict=True):
            op(tensor[:, :8], tensor[:, 8:10], positions, rope, interleaved=interleaved)
        pairs["rotary interleaved" if interleaved else "rotary"] = (turned[0], turned[1])
    norm = HeadNorm(weight[:128], 1e-5)
    pools, queries = torch.zeros(2, 2, 64, 2, 128, **where), []
    for place, pool in (
        (ops.place_heads, pools[0]),
        (reference.ReferenceOps().place_heads, pools[1]),
    ):
        q, k, v = qkv.clone().split((8, 2, 2), dim=1)
        options: dict[str, Any] = {"rope": rope, "interleaved": False}
        q = place(
            q, k, v, pool[0], pool[1], positions, positions, q_norm=norm, k_norm=norm, **options
        )
        queries.append(q)
    pairs["place_heads: q"] = (queries[0], queries[1])
    pairs["place_heads: k and v"] = (pools[0], pools[1])
    for name, (got, expected) in pairs.items():
        yield _error_check(name, relative_error(got, expected), device.dtype)


def check_sampling(device: Device, *, tiny: bool) -> Iterator[Check]:
    """The reference's tokens. exp and log differ in their last bit between implementations, so one
    row in fifty may differ where noise or a threshold decides."""
    rows, vocab = (8, 211) if tiny else (256, 151_936)
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(device.torch_device)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    settings = {
        "greedy": (0.0, 0, 1.0, 0.0, 0.0),
        "temperature": (0.9, 0, 1.0, 0.0, 0.02),
        "top-k": (1.0, 50, 1.0, 0.0, 0.02),
        "top-p": (0.7, 0, 0.9, 0.0, 0.02),
        "top-k, top-p, min-p": (0.8, 20, 0.95, 0.05, 0.02),
    }
    for name, (temperature, top_k, top_p, min_p, allowed) in settings.items():
        full: dict[str, Any] = {"device": device.torch_device}
        s = SamplingTensors(
            temperature=torch.full((rows,), temperature, **full),
            top_k=torch.full((rows,), top_k, dtype=torch.int32, **full),
            top_p=torch.full((rows,), top_p, **full),
            min_p=torch.full((rows,), min_p, **full),
            seed=seeds.to(device.torch_device),
            position=torch.arange(rows, **full),
            all_greedy=temperature == 0,
            any_filter=top_k > 0 or top_p < 1 or min_p > 0,
        )
        yield _sampling_check(device, f"sample {name}", logits, s, allowed)
        if name in ("greedy", "top-k, top-p, min-p"):
            adjusted = _adjusted(s, rows, vocab, device)
            title = f"sample {name} with bias, penalties, bans and masks"
            yield _sampling_check(device, title, logits, adjusted, allowed)


def _sampling_check(
    device: Device, name: str, logits: Tensor, s: SamplingTensors, allowed: float
) -> Check:
    """The tokens, and where penalties count them, the counts."""
    other, p = s, s.penalties
    if p is not None:
        other = replace(s, penalties=replace(p, output_counts=p.output_counts.clone()))
    expected = reference.sample(logits.clone(), other)
    got = device.ops.sample(logits.clone(), s)
    rows = len(got)
    differing = int((got != expected).sum())
    passed, detail = differing <= allowed * rows, f"{differing} of {rows} rows differ"
    if p is not None and other.penalties is not None:
        miscounted = int((p.output_counts != other.penalties.output_counts).sum())
        passed &= miscounted <= 2 * differing
        detail += f", {miscounted} counts"
    return Check(name, passed, detail)


def _adjusted(s: SamplingTensors, rows: int, vocab: int, device: Device) -> SamplingTensors:
    """With everything that changes logits: in every second row, or in a few."""
    where, generator = device.torch_device, torch.Generator().manual_seed(2)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator).to(where)

    def spread(low: float, high: float) -> Tensor:
        return (torch.rand(rows, generator=generator) * (high - low) + low).to(where)

    states = torch.arange(rows, dtype=torch.int32)
    states[1::2] = -1
    penalties = Penalties(
        state_rows=states.to(where),
        repetition=spread(0.8, 1.6),
        presence=spread(-0.5, 1.0),
        frequency=spread(-0.2, 0.5),
        prompt_mask=draw(5, rows, vocab) == 0,
        output_counts=draw(3, rows, vocab).int(),
    )
    words = -(-vocab // 32)
    return replace(
        s,
        bias=(draw(rows, 40), draw(vocab, 40), torch.full((40,), 5.0, device=where)),
        penalties=penalties,
        banned=(draw(rows, 40), draw(vocab, 40)),
        mask_rows=torch.arange(0, rows, 4, device=where),
        mask_bits=draw(2**31, len(range(0, rows, 4)), words).int(),
    )


def fill_decode_rows(runner: ModelRunner, kv_lens: list[int], *, seed: int = 0) -> Tensor:
    """Gives request rows 1, 2, ... pages of random KV and a newest token; their rows [B] int32."""
    where = runner.device.torch_device
    generator = torch.Generator(where).manual_seed(seed)
    for pool in runner.memory.pool.tensors():
        pool.normal_(generator=generator)
    page_size, first = runner.sizes.page_size, 1
    for row, kv_len in enumerate(kv_lens, start=1):
        count = -(-kv_len // page_size)
        pages = torch.arange(first, first + count, dtype=torch.int32, device=where)
        runner.memory.block_table.pages[row, :count] = pages
        first += count
    if first * page_size > runner.info.max_total_tokens:
        raise ValueError(
            f"{sum(kv_lens)} tokens of KV: the pool has {runner.info.max_total_tokens}"
        )
    runner.memory.next_tokens.random_(runner.info.vocab_size, generator=generator)
    return torch.arange(1, len(kv_lens) + 1, dtype=torch.int32, device=where)


@torch.inference_mode()
def check_graphs(runner: ModelRunner) -> Iterator[Check]:
    """A replay equals the eager step at the padded size bit for bit, and writes its slots alone."""
    where = runner.device.torch_device
    graphs, bound = runner.graphs, runner.sizes.context_length
    keys = runner.memory.pool.tensors()[0]
    assert isinstance(graphs, CudaGraphRunner)
    for count in (1, 3, runner.sizes.rows - 1):
        kv_lens = [17 + 5 * i for i in range(count)]
        rows = fill_decode_rows(runner, kv_lens)
        lengths = torch.tensor(kv_lens, dtype=torch.int32, device=where)
        size = graphs.padded_size(count)
        padding = size - count
        padded_rows = torch.cat((rows, rows.new_zeros(padding)))
        padded_lengths = torch.cat((lengths, lengths.new_ones(padding)))
        before = keys.clone()
        eager = runner.decode_logits(padded_rows, padded_lengths, bound)[:count].clone()
        eager_pool = keys.clone()
        keys.copy_(before)
        replayed = graphs.replay(rows, lengths)
        equal = torch.equal(replayed, eager) and torch.equal(keys[1:], eager_pool[1:])
        changed = int((keys != before).flatten(1).any(-1)[1:].sum())
        yield Check(
            f"graph of {size} replays {count} rows",
            equal and changed == count,
            f"logits equal bit for bit: {equal}; {changed} slots written",
        )


@torch.inference_mode()
def check_mixed_graphs(runner: ModelRunner) -> Iterator[Check]:
    """The same of steps with prompts, for several divisions of their tokens."""
    graphs, keys = runner.mixed_graphs, runner.memory.pool.tensors()[0]
    assert isinstance(graphs, MixedGraphRunner)
    most = runner.sizes.rows - 1
    for decoding, tokens in ((1, 9), (min(12, most), 20), (most, 300)):
        shape = graphs.padded_shape(decoding + tokens, decoding + 1)
        if shape is None:
            continue
        fill_decode_rows(runner, [17] * decoding + [tokens])
        ints = torch.from_numpy(pack_step(mixed_batch(tokens, decoding, 17), shape))
        packed = ints.to(runner.device.torch_device)
        before = keys.clone()
        eager = runner.packed_logits(packed, shape)[: decoding + 1].clone()
        eager_pool = keys.clone()
        keys.copy_(before)
        replayed = graphs.replay(packed, shape)[: decoding + 1]
        equal = torch.equal(replayed, eager) and torch.equal(keys[1:], eager_pool[1:])
        changed = int((keys != before).flatten(1).any(-1)[1:].sum())
        yield Check(
            f"graph of {shape.tokens} tokens replays {decoding} decode rows beside {tokens} tokens",
            equal and changed == decoding + tokens,
            f"logits equal bit for bit: {equal}; {changed} slots written",
        )


def _generate(
    runner: ModelRunner, prompts: list[list[int]], new: int, *, overlap: bool, mixed: bool
) -> Outcome:
    sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True, logprobs=2)
    requests = [make_request(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    chunk = max(2 * runner.sizes.page_size, max(map(len, prompts)) // 2)
    scheduler = scheduler_for(runner, chunk=chunk, mixed=mixed)
    return run_requests(scheduler, runner, requests, overlap=overlap)


def _first_difference(base: Outcome, other: Outcome, tolerance: float) -> tuple[bool, str]:
    """Tokens equal until the two best logits are closer than the tolerance."""
    parted = 0
    for name, tokens in base.tokens.items():
        pairs = zip(tokens, other.tokens[name], strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            continue
        parted += 1
        (_, best), (_, second) = base.logprobs[name][at].top[:2]
        if best - second > tolerance:
            return False, f"{name} parts at token {at}, where the best leads by {best - second:.3f}"
    return True, f"{parted} of {len(base.tokens)} requests part, all at a near tie"


def check_modes(runner: ModelRunner, *, tiny: bool) -> Iterator[Check]:
    """Overlap and mixing on and off give the same tokens up to near ties, and under teacher forcing
    (a run's own output prefilled in one chunk) the log-probabilities that decoding gave."""
    draw = random.Random(0)
    vocab, count, new = runner.info.vocab_size, *((2, 3) if tiny else (24, 48))
    lengths = [draw.randint(20, 40) if tiny else draw.randint(100, 700) for _ in range(count)]
    prompts = [[draw.randrange(vocab) for _ in range(length)] for length in lengths]
    tolerance = LOGPROB_TOLERANCE[runner.device.dtype]
    base = _generate(runner, prompts, new, overlap=True, mixed=True)
    for overlap, mixed in ((False, True), (True, False)):
        other = _generate(runner, prompts, new, overlap=overlap, mixed=mixed)
        passed, detail = _first_difference(base, other, tolerance)
        yield Check(f"tokens with {'no overlap' if mixed else 'no mixing'}", passed, detail)
    forced = SamplingParams(max_new_tokens=1, temperature=0.0, prompt_logprobs=0)
    requests = [
        make_request(name, [*prompts[int(name[1:])], *tokens], forced)
        for name, tokens in base.tokens.items()
    ]
    scheduler = scheduler_for(runner, chunk=0, mixed=False)
    again = run_requests(scheduler, runner, requests).prompt_logprobs
    worst = 0.0
    for name, records in base.logprobs.items():
        tail = again[name][-len(records) :]
        for decoded, prefilled in zip(records, tail, strict=True):
            assert prefilled is not None
            worst = max(worst, abs(decoded.logprob - prefilled.logprob))
    detail = f"log-probabilities differ by {worst:.3f} at the most, allowed {tolerance}"
    yield Check("teacher forcing", worst <= tolerance, detail)
