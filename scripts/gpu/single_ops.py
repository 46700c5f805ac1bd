"""Single ops at a Llama-3.1-8B's shape, each beside the time its bytes take at copy bandwidth."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ops.op_set import SamplingTensors
from runtime.execution.cuda_graph_runner import CudaRecorder
from scripts._eager_recorder import EagerRecorder
from scripts._paged import paged_problem
from scripts.gpu.speed import Limits, seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from runtime.execution.device import Device

_CALLS = 20  # in one graph, so that the host's launches are not what is measured


def call_seconds(device: Device, call: Callable[[], Tensor], calls: int) -> float:
    """Device time of one call, replayed `calls` times in a row."""

    def several() -> Tensor:
        for _ in range(calls - 1):
            call()
        return call()

    recorder = CudaRecorder(device.torch_device) if device.graphs else EagerRecorder()
    return seconds_of(device, recorder.record(several), repeats=10) / calls


def _sampling(device: Device, rows: int, *, temperature: float, filtered: bool) -> SamplingTensors:
    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device.torch_device)

    return SamplingTensors(
        temperature=full(temperature),
        top_k=full(50 if filtered else 0, torch.int32),
        top_p=full(0.9 if filtered else 1.0),
        min_p=full(0.0),
        seed=full(1, torch.int64),
        position=full(1, torch.int64),
        all_greedy=temperature == 0,
        any_filter=filtered,
    )


def _ops(
    device: Device, rows: int, hidden: int, vocab: int, kv_len: int
) -> Iterator[tuple[str, Callable[[], Tensor], int]]:
    """(name, call, bytes that it must move)."""
    ops = device.ops
    where: dict[str, Any] = {"device": device.torch_device, "dtype": device.dtype}
    size = device.dtype.itemsize
    x, residual = torch.randn(rows, hidden, **where), torch.zeros(rows, hidden, **where)
    weight, gate_up = torch.ones(hidden, **where), torch.randn(rows, 2 * hidden, **where)
    row_bytes = rows * hidden * size
    yield "rms_norm", lambda: ops.rms_norm(x, weight, 1e-5), 2 * row_bytes
    yield "add_rms_norm", lambda: ops.add_rms_norm(x, residual, weight, 1e-5), 4 * row_bytes
    yield "silu_and_mul", lambda: ops.silu_and_mul(gate_up), 3 * row_bytes
    qkv = torch.randn(rows, 48, 128, **where)
    rope = torch.ones(64, 128, device=device.torch_device)
    positions = torch.zeros(rows, dtype=torch.int64, device=device.torch_device)

    def rotary() -> Tensor:
        ops.rotary(qkv[:, :32], qkv[:, 32:40], positions, rope, interleaved=False)
        return qkv

    yield "rotary", rotary, 2 * rows * 40 * 128 * size
    pools = torch.zeros(2, rows, 8, 128, **where)
    slots = torch.arange(rows, device=device.torch_device)
    q, k, v = qkv.split((32, 8, 8), dim=1)

    def place_heads() -> Tensor:
        return ops.place_heads(
            q, k, v, pools[0], pools[1], positions, slots,
            q_norm=None, k_norm=None, rope=rope, interleaved=False,
        )  # fmt: skip

    yield "place_heads", place_heads, 2 * rows * 48 * 128 * size
    problem = paged_problem(
        [(kv_len - 1, 1)] * rows, head_dim=128, group=4, kv_heads=8, dtype=device.dtype
    ).to(device.torch_device)
    kv_bytes = 2 * rows * kv_len * 8 * 128 * size
    yield (
        f"decode_attention, {kv_len} keys",
        lambda: ops.decode_attention(*problem.arguments()),
        kv_bytes,
    )
    logits = torch.randn(rows, vocab, device=device.torch_device)
    for name, temperature, filtered in (
        ("greedy", 0.0, False),
        ("temperature", 0.7, False),
        ("top-k and top-p", 0.7, True),
    ):
        s = _sampling(device, rows, temperature=temperature, filtered=filtered)
        yield f"sample {name}", partial(ops.sample, logits, s), logits.nbytes


def single_ops(device: Device, limits: Limits, *, tiny: bool) -> list[dict[str, float | str]]:
    """Microseconds of each op for 1 and for 64 rows, and of moving its bytes."""
    results: list[dict[str, float | str]] = []
    for rows in (1,) if tiny else (1, 64):
        sizes = (64, 211, 20) if tiny else (4096, 128_256, 1024)
        for name, call, moved in _ops(device, rows, *sizes):
            seconds = call_seconds(device, call, 1 if tiny else _CALLS)
            results.append(
                {
                    "op": name,
                    "rows": rows,
                    "us": 1e6 * seconds,
                    "byte_floor_us": 1e6 * moved / limits.copy_bytes_per_s,
                }
            )
    return results
