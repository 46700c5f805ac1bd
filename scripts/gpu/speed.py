"""What the device does in a second, beside what it cannot exceed."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from ops.op_set import AttentionBatch, AttentionSpec
from runtime.execution.kv_pool import bytes_per_token
from runtime.request import SamplingParams
from scripts.gpu.correctness import fill_decode_rows
from scripts.gpu.engine import (
    forbidding_waits,
    make_request,
    mixed_batch,
    run_requests,
    scheduler_for,
)
from scripts.gpu.models import linear_parameters, step_weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.execution.device import Device
    from runtime.execution.model_runner import ModelRunner
    from scripts.gpu.models import Model


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured in this run: bytes a second read and written, and multiply-adds times two."""

    copy_bytes_per_s: float
    matmul_flops: float


# Between two marks, since one call alone is measured with what the marks take, and with the clock
# of a device that has just been idle.
_CALLS = 10


def seconds_of(device: Device, call: Callable[[], object], *, repeats: int) -> float:
    """Median device time of a call, after one warm-up; of one call where a CPU tries the script."""
    call()
    times, calls = [], _CALLS if device.queued else 1
    for _ in range(repeats if device.queued else 1):
        start, end = device.fence(), device.fence()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(end.seconds_since(start) / calls)
    return sorted(times)[len(times) // 2]


def measure_limits(device: Device, *, tiny: bool) -> Limits:
    """Copy bandwidth over a tensor beyond any cache; a square product of the model's type."""
    where: dict[str, Any] = {"device": device.torch_device, "dtype": device.dtype}
    size, side = (1 << 20, 128) if tiny else (1 << 30, 8192)
    source, target = torch.zeros(size, **where), torch.empty(size, **where)
    copy = seconds_of(device, lambda: target.copy_(source), repeats=10)
    a, b = torch.randn(side, side, **where), torch.randn(side, side, **where)
    product = seconds_of(device, lambda: a @ b, repeats=10)
    return Limits(2 * source.nbytes / copy, 2 * side**3 / product)


@torch.inference_mode()
def decode_steps(
    runner: ModelRunner, model: Model, limits: Limits, batches: list[int], kv_len: int
) -> list[dict[str, float]]:
    """Device time of replayed decode steps against the batch, beside its two floors.

    The byte floor is weights and KV at the copy bandwidth, the FLOP floor the linear layers at the
    matmul rate. Batches whose KV does not fit the pool are left out.
    """
    dtype = runner.device.dtype
    results = []
    page_size = runner.sizes.page_size
    room = runner.info.max_total_tokens // page_size - 1
    for batch in batches:
        if batch * -(-kv_len // page_size) > room or batch > runner.sizes.rows:
            break
        rows = fill_decode_rows(runner, [kv_len] * batch)
        lengths = torch.full_like(rows, kv_len)
        assert runner.graphs is not None
        replay = partial(runner.graphs.replay, rows, lengths)
        measured = seconds_of(runner.device, replay, repeats=20)
        kv_bytes = batch * kv_len * bytes_per_token(runner.decoder.model, dtype)
        byte_floor = (step_weight_bytes(model, dtype) + kv_bytes) / limits.copy_bytes_per_s
        flop_floor = 2 * batch * linear_parameters(model) / limits.matmul_flops
        results.append(
            {
                "batch": batch,
                "kv_len": kv_len,
                "ms": 1e3 * measured,
                "byte_floor_ms": 1e3 * byte_floor,
                "flop_floor_ms": 1e3 * flop_floor,
                "over_floor": measured / max(byte_floor, flop_floor),
            }
        )
    return results


# Twice the rows must bring so many times the tokens a second: below it their latency buys little.
_WORTH_DOUBLING = 1.25


def rows_that_pay(decode: list[dict[str, float]]) -> int:
    """The most rows, of those that `decode_steps` measured, that bring a quarter more tokens a
    second than half of them do."""
    rate = {int(row["batch"]): row["batch"] / row["ms"] for row in decode}
    best = min(rate)
    while rate.get(2 * best, 0.0) >= _WORTH_DOUBLING * rate[best]:
        best *= 2
    return best


def idle_between_steps(runner: ModelRunner, *, rows: int, new: int) -> dict[str, float]:
    """Share of the decode steps' wall time in which the device had none of a step's work."""
    draw, vocab = random.Random(0), runner.info.vocab_size
    sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    prompts = [[draw.randrange(vocab) for _ in range(16)] for _ in range(rows)]
    shares = {}
    for overlap in (True, False):
        requests = [make_request(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
        scheduler = scheduler_for(runner, chunk=max(32, 16 * rows), mixed=True)
        outcome = run_requests(scheduler, runner, requests, overlap=overlap)
        share = 1 - outcome.tail_device_s / outcome.tail_s
        shares["overlap" if overlap else "synchronous"] = share
    return shares


def served_steps(runner: ModelRunner, *, rows: int, new: int) -> list[dict[str, float | str]]:
    """Milliseconds of a decode step as it is served, by the kind of sampling: of the wall, of the
    device, and of the host to launch it and to let it sample."""
    draw, vocab = random.Random(0), runner.info.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(16)] for _ in range(rows)]
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {"temperature": 0.7},
        "top-p": {"temperature": 0.7, "top_p": 0.9},
        "penalties": {"temperature": 0.7, "presence_penalty": 0.5},
    }
    results: list[dict[str, float | str]] = []
    for name, options in kinds.items():
        sampling = SamplingParams(max_new_tokens=new, ignore_eos=True, **options)
        requests = [
            make_request(f"r{i}", prompt, replace(sampling, seed=i))
            for i, prompt in enumerate(prompts)
        ]
        scheduler = scheduler_for(runner, chunk=max(32, 16 * rows), mixed=True)
        outcome = run_requests(scheduler, runner, requests)
        steps = outcome.tail_steps
        results.append(
            {
                "sampling": name,
                "rows": rows,
                "wall_ms": 1e3 * outcome.tail_s / steps,
                "device_ms": 1e3 * outcome.tail_device_s / steps,
                "host_ms": 1e3 * outcome.host_s / sum(outcome.steps.values()),
            }
        )
    return results


@torch.inference_mode()
def mixed_steps(
    runner: ModelRunner, chunks: list[int], *, rows: int, kv_len: int
) -> list[dict[str, float]]:
    """Milliseconds of the host to launch a step with a piece of a prompt beside decode rows, and of
    the device to compute it: the median of five, after one."""
    results = []
    for chunk in chunks:
        fill_decode_rows(runner, [kv_len] * rows + [chunk])
        host, device = [], []
        for _ in range(6):
            batch = mixed_batch(chunk, rows, kv_len)
            start = time.perf_counter()
            with forbidding_waits(runner.device):
                launched = runner.launch(batch)
                launched.sample(None)
            elapsed = time.perf_counter() - start
            device.append(launched.result().device_s)
            host.append(max(elapsed, launched.queueing_s))  # a thread queues what is not captured
        host_s, device_s = (sorted(times[1:])[2] for times in (host, device))
        results.append(
            {
                "chunk": chunk,
                "rows": rows,
                "host_ms": 1e3 * host_s,
                "device_ms": 1e3 * device_s,
            }
        )
    return results


def extend_attention_rates(
    device: Device, *, new: int, prefixes: list[int], heads: int, kv_heads: int, head_dim: int
) -> list[dict[str, float | None]]:
    """TFLOP/s of extend attention over pages of 16 in random order, beside torch's flash kernel on
    the same keys gathered beforehand (the gather is not counted)."""
    results: list[dict[str, float | None]] = []
    where: dict[str, Any] = {"device": device.torch_device, "dtype": device.dtype}
    for prefix in prefixes:
        kv_len = prefix + new
        pages = -(-kv_len // 16)
        order = torch.randperm(pages, device=device.torch_device)
        k_pool, v_pool = (torch.randn(pages * 16, kv_heads, head_dim, **where) for _ in range(2))
        q = torch.randn(new, heads, head_dim, **where)
        ints: dict[str, Any] = {"device": device.torch_device, "dtype": torch.int32}
        batch = AttentionBatch(
            block_table=order.int()[None],
            rows=torch.zeros(1, **ints),
            qo_indptr=torch.tensor([0, new], **ints),
            kv_lens=torch.tensor([kv_len], **ints),
            page_size=16,
            max_q_len=new,
            max_kv_len=kv_len,
        )
        spec = AttentionSpec(head_dim**-0.5)
        flops = 4 * heads * head_dim * (new * prefix + new * (new + 1) / 2)
        ours = seconds_of(
            device,
            partial(device.ops.extend_attention, q, k_pool, v_pool, batch, spec),
            repeats=10,
        )
        slots = (order[:, None] * 16 + torch.arange(16, device=device.torch_device)).flatten()
        gathered = [pool[slots[:kv_len]].transpose(0, 1)[None] for pool in (k_pool, v_pool)]
        theirs = _flash_seconds(device, q.transpose(0, 1)[None], *gathered)
        results.append(
            {
                "prefix": prefix,
                "new": new,
                "tflops": flops / ours / 1e12,
                "sdpa_tflops": None if theirs is None else flops / theirs / 1e12,
                "of_sdpa": None if theirs is None else theirs / ours,
            }
        )
    return results


def _flash_seconds(
    device: Device, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> float | None:
    """Time of torch's flash attention, None where this build or device has none."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).contiguous() for x in (k, v))
    mask = causal_lower_right(q.shape[2], k.shape[2])
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return seconds_of(
                device,
                lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
                repeats=10,
            )
    except RuntimeError:
        return None


def offline_throughput(
    runner: ModelRunner, *, requests: int, low: int, high: int, chunk: int
) -> dict[str, float]:
    """Output tokens a second: all requests at once, input and output lengths uniform in low..high,
    seed 0, no prefix cache."""
    draw, vocab = random.Random(0), runner.info.vocab_size
    made = []
    for i in range(requests):
        prompt = [draw.randrange(vocab) for _ in range(draw.randint(low, high))]
        sampling = SamplingParams(
            max_new_tokens=draw.randint(low, high), temperature=0.6, seed=i, ignore_eos=True
        )
        made.append(make_request(f"r{i}", prompt, sampling))
    scheduler = scheduler_for(runner, chunk=chunk, mixed=True)
    start = time.perf_counter()
    outcome = run_requests(scheduler, runner, made)
    seconds = time.perf_counter() - start
    tokens = sum(map(len, outcome.tokens.values()))
    return {
        "requests": requests,
        "input_tokens": sum(len(r.input_ids) for r in made),
        "output_tokens": tokens,
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds,
        "device_busy": outcome.device_s / seconds,
    }
