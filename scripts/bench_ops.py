#!/usr/bin/env python3
"""What each CPU operation costs beside its floor: the bytes it must read or the operations it must
do, at limits measured in the same run.

Shapes are SmolLM2-135M's, weights random. The linear layers of a step are run one after the other
over all layers, so that weights come from memory, as they do in service. An operation on data that
fits the caches is compared with memory bandwidth all the same, so its ratio can be below 1.

    linear     all linear layers of a step, by number of rows and kind of weight
    attention  one layer's attention: decode rows, and a chunk of a prompt behind cached tokens
    small      norms, rotary positions, KV store and activation, one layer's worth for 128 rows
    sample     one token for each of 1 and 16 rows
    step       a whole step in one call: decode rows, a chunk, a chunk beside decode rows

int8 products count as half a bfloat16 one, float32 as two (what the instructions do at best). One
thread is timed by its own processor time, which other load on the machine changes least.
Usage: python scripts/bench_ops.py [PART ...] [--threads N] [--path avx512_bf16|...]
Each part ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from ops.blocks.attention import Attention
from ops.blocks.block import Block, DecoderStep, Norm
from ops.blocks.dense_mlp import DenseMlp
from ops.cpu.load import CpuOptions, load_cpu_ops
from ops.decoder import DecoderModel
from ops.op_set import AttentionSpec, SamplingTensors
from runtime.examination import Machine
from runtime.execution.kv_pool import KVPool
from runtime.execution.machine import measure_machine
from scripts._paged import paged_batch
from server.args import parse_args

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, INNER = 49152, 576, 30, 9, 3, 64, 1536
PAGE = 16
LINEARS = [((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM)]
LINEARS += [(2 * INNER, HIDDEN), (HIDDEN, INNER)]
WEIGHTS = LAYERS * sum(n * k for n, k in LINEARS) + VOCAB * HIDDEN
# Bytes of a weight with its scales, and bfloat16 operations that one of its products takes.
KINDS = {None: (2.0, 1.0), "int8": (1.0625, 0.5), "int4": (0.625, 0.5), "float32": (4.0, 2.0)}
SPEC = AttentionSpec(DIM**-0.5)


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    median_ms: float
    best_ms: float
    floor_ms: float
    bound: str

    def line(self) -> str:
        ratio = self.median_ms / self.floor_ms
        return (
            f"{self.name:44}{self.median_ms:9.3f}{self.best_ms:9.3f}"
            f"{self.floor_ms:9.3f} {self.bound:10}{ratio:7.2f}"
        )


class Bench:
    def __init__(
        self,
        ops: Any,
        machine: Machine,
        seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.ops, self.machine, self.seconds, self.clock = ops, machine, seconds, clock
        self.rand = torch.Generator().manual_seed(0)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rand).to(dtype)

    def time(self, name: str, run: Callable[[], Any], bytes_: float, flops: float) -> Result:
        """Median and best over about `seconds`, after a warm-up."""
        run()
        times: list[float] = []
        while sum(times) < self.seconds or len(times) < 3:
            start = self.clock()
            run()
            times.append(self.clock() - start)
        of_bytes, of_flops = bytes_ / self.machine.bandwidth, flops / self.machine.bf16_flops
        bound = "memory" if of_bytes >= of_flops else "arithmetic"
        floor = max(of_bytes, of_flops)
        return Result(name, statistics.median(times) * 1e3, min(times) * 1e3, floor * 1e3, bound)


def linear(b: Bench) -> Iterator[Result]:
    for kind, (weight_bytes, cost) in KINDS.items():
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        quantization = None if kind == "float32" else kind
        shapes = LINEARS * LAYERS + [(VOCAB, HIDDEN)]
        packed = [
            (b.ops.pack_linear(b.randn(n, k, dtype=dtype), quantization=quantization), k)
            for n, k in shapes
        ]
        for rows in (1, 8, 16, 64, 128):
            inputs = {k: b.randn(rows, k, dtype=dtype) for _, k in shapes}

            def run(packed: Any = packed, inputs: Any = inputs) -> None:
                for layer, k in packed:
                    b.ops.linear(inputs[k], layer)

            name = f"linear {kind or 'bfloat16'} rows {rows}"
            yield b.time(name, run, weight_bytes * WEIGHTS, cost * 2 * rows * WEIGHTS)


def attention_work(rows: list[tuple[int, int]]) -> tuple[float, float]:
    """Bytes of keys and values read once, and operations, of one layer."""
    keys = sum(kv for kv, _ in rows)
    pairs = sum(new * (kv - new) + new * (new + 1) / 2 for kv, new in rows)
    return keys * 2 * KV_HEADS * DIM * 2, pairs * 4 * HEADS * DIM


def attention(b: Bench) -> Iterator[Result]:
    cases = {"decode 1 x 1500": [(1500, 1)], "decode 16 x 200": [(200, 1)] * 16}
    cases |= {"decode 64 x 500": [(500, 1)] * 64}
    cases |= {"chunk 128 at 0": [(128, 128)], "chunk 128 at 1372": [(1500, 128)]}
    for name, rows in cases.items():
        batch, _, slots, size = paged_batch(rows, PAGE)
        # As many pools as a model has layers: a layer's keys are not in the cache when it runs.
        pools = [(b.randn(size, KV_HEADS, DIM), b.randn(size, KV_HEADS, DIM)) for _ in range(8)]
        q = b.randn(len(slots), HEADS, DIM)

        def run(q: Any = q, pools: Any = pools, batch: Any = batch) -> None:
            for k, v in pools:
                b.ops.extend_attention(q, k, v, batch, SPEC)

        bytes_, flops = attention_work(rows)
        yield b.time(f"attention {name}, 8 layers", run, 8 * bytes_, 8 * flops)


def small(b: Bench) -> Iterator[Result]:
    rows = 128
    x, residual, gate_up = b.randn(rows, HIDDEN), b.randn(rows, HIDDEN), b.randn(rows, 2 * INNER)
    weight, positions = b.randn(HIDDEN), torch.arange(rows)
    qkv = b.randn(rows, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    rope = b.randn(rows, DIM, dtype=torch.float32)
    pool, slots = b.randn(256, KV_HEADS, DIM), torch.arange(rows) + PAGE
    ops = b.ops
    calls: list[tuple[str, Callable[[], Any], float]] = [
        ("rms_norm", lambda: ops.rms_norm(x, weight, 1e-5), 2 * x.nbytes),
        ("add_rms_norm", lambda: ops.add_rms_norm(x, residual, weight, 1e-5), 4 * x.nbytes),
        ("rotary", lambda: ops.rotary(q, k, positions, rope, interleaved=False), 1.6 * qkv.nbytes),
        ("store_kv", lambda: ops.store_kv(k, v, pool, pool.clone(), slots), 0.8 * qkv.nbytes),
        ("silu_and_mul", lambda: ops.silu_and_mul(gate_up), 1.5 * gate_up.nbytes),
    ]
    for name, run, bytes_ in calls:
        yield b.time(f"{name}, {rows} rows", run, bytes_, 0.0)


def sampling(rows: int, temperature: float, top_p: float) -> SamplingTensors:
    return SamplingTensors(
        temperature=torch.full((rows,), temperature),
        top_k=torch.zeros(rows, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        min_p=torch.zeros(rows),
        seed=torch.arange(rows),
        position=torch.arange(rows),
        all_greedy=temperature == 0,
        any_filter=top_p < 1,
    )


def sample(b: Bench) -> Iterator[Result]:
    for rows in (1, 16):
        logits = b.randn(rows, VOCAB, dtype=torch.float32) * 3
        for name, temperature, top_p in (("greedy", 0, 1), ("softmax", 1, 1), ("top-p", 1, 0.9)):
            s = sampling(rows, float(temperature), float(top_p))
            # The logits may be overwritten, so each run gets a copy; it is part of the time.
            run = lambda s=s, logits=logits: b.ops.sample(logits.clone(), s)  # noqa: E731
            yield b.time(f"sample {name} rows {rows}", run, 3 * logits.nbytes, 0.0)


def build_model(b: Bench, quantization: str | None) -> DecoderModel:
    angles = torch.arange(4096)[:, None] * 1e5 ** (-torch.arange(DIM // 2) / (DIM // 2))
    rope = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    ones = torch.ones(HIDDEN)
    embedding = b.randn(VOCAB, HIDDEN)
    head = b.ops.pack_linear(embedding, quantization="int8" if quantization else None)
    eps = 1e-5

    def layer() -> tuple[Block, ...]:
        qkv, o, gate_up, down = (
            b.ops.pack_linear(b.randn(n, k) * k**-0.5, quantization=quantization)
            for n, k in LINEARS
        )
        attention = Attention(
            heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, qkv=qkv, o=o, spec=SPEC, rope=rope
        )
        mlp = DenseMlp(intermediate_size=INNER, gate_up=gate_up, down=down, activation="silu")
        return tuple(Block(mixer=mixer, norm=Norm(ones, eps)) for mixer in (attention, mlp))

    return DecoderModel(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        embedding=embedding,
        layers=tuple(layer() for _ in range(LAYERS)),
        final_norm=Norm(ones, eps),
        lm_head=head,
    )


def step(b: Bench) -> Iterator[Result]:
    cases = {"1 x 200": [(200, 1)], "16 x 200": [(200, 1)] * 16}
    cases |= {"chunk 128": [(128, 128)], "chunk 120 + 8 x 200": [(120, 120), *[(200, 1)] * 8]}
    for quantization in (None, "int8", "int4"):
        model = build_model(b, quantization)
        decoder = b.ops.compile(model)
        if decoder is None:
            return  # plain torch runs op by op
        pool = KVPool(model, 32768, device=torch.device("cpu"), dtype=torch.bfloat16)
        for name, rows in cases.items():
            batch, positions, slots, _ = paged_batch(rows, PAGE)
            ids = torch.randint(0, VOCAB, (len(slots),), generator=b.rand)
            last = batch.qo_indptr[1:].long() - 1
            weight_bytes, cost = KINDS[quantization]
            of_keys, of_pairs = attention_work(rows)
            flops = cost * 2 * ((WEIGHTS - VOCAB * HIDDEN) * len(ids) + VOCAB * HIDDEN * len(rows))
            yield b.time(
                f"step {quantization or 'bfloat16'} {name}",
                partial(decoder, DecoderStep(ids, positions, slots, batch, last, pool.caches)),
                weight_bytes * WEIGHTS + LAYERS * of_keys,
                flops + LAYERS * of_pairs,
            )


PARTS = {f.__name__: f for f in (linear, attention, small, sample, step)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all of them")
    parser.add_argument("--kernels", default="auto", choices=("auto", "native", "torch"))
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--path", help="instruction path; default: the best of this CPU")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each line")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)  # the limits are theirs
    machine = measure_machine(path=args.path)
    options = CpuOptions(
        parse_args([]).runner.cache_folder, args.kernels, args.threads, path=args.path
    )
    ops, kernels = load_cpu_ops(options, print)
    if kernels.startswith("native"):
        torch.set_num_threads(1)  # its threads would take the cores from the kernels'
    print(f"{kernels}; {machine.bandwidth / 1e9:.1f} GB/s read,", end=" ")
    print(f"{machine.bf16_flops / 1e12:.3f} TFLOP/s bfloat16, torch {torch.__version__}")
    print(f"{'':44}{'median':>9}{'best':>9}{'floor':>9} {'bound by':10}{'ratio':>7}   (ms)")
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    bench = Bench(ops, machine, args.seconds, clock)
    for part in args.parts or PARTS:
        results = []
        with torch.inference_mode():
            for result in PARTS[part](bench):
                print(result.line(), flush=True)
                results.append(asdict(result))
        about = {"part": part, "kernels": kernels, "cpu": platform.processor() or "unknown"}
        print(json.dumps(about | asdict(machine) | {"results": results}))


if __name__ == "__main__":
    main()
