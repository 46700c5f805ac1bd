#!/usr/bin/env python3
"""Five situations that users of a CPU server meet, on any OpenAI-compatible server.

    scripts/bench_cpu.py --serve --runs 3            # starts loomserve itself, once per run
    scripts/bench_cpu.py --serve --path avx2         # with the kernels of an older processor
    scripts/bench_cpu.py --base-url http://127.0.0.1:8080 --model NAME

| name | what happens |
|---|---|
| s1 single | 1 client, 6 requests one after the other, 128 prompt tokens, 128 output tokens |
| s2 batch | 16 clients, 64 requests, 64 to 256 prompt tokens, 64 output tokens |
| s3 interfere | 8 streams of 256 tokens; after 32 tokens each, four 1,500-token prompts arrive |
| s4 prefix | 8 clients, 32 requests that share 1,024 tokens and add 32, 16 output tokens |
| s5 overload | 200 requests at once, 32 prompt tokens, 16 output tokens |

Absolute times do not travel between machines, so each headline figure is also given as a ratio to
a floor measured in the same run: what reading the weights at this machine's memory bandwidth, or
its matrix products at their peak, would take if nothing else cost time. With --serve it is that of
the form of weights that the server has chosen (int8 products count as half a bfloat16 one), else of
bfloat16; with --path avx2 the arithmetic is that of float32 products in AVX2. The model's size is
SmolLM2-135M's unless options say otherwise. --shape serves random weights in the shape of a larger
model, made on first use in the cache folder (up to 3.4 GB), with the floors of that size:
`--shape qwen3-0.6b -- --quantization int8`.

Greedy, `ignore_eos`, one token per word and chunk. Runs differ in seed, so that no run meets the
prefix cache of another; the table shows medians over the runs with the smallest and largest value.
The last line is JSON. What TTFT, ITL and TPOT mean stands in server/bench/answer.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.config import RunnerConfig
from runtime.examination import Machine
from runtime.execution.machine import measure_machine
from scripts._floors import Floors, ModelSize
from scripts._scenarios import SCENARIOS
from scripts._shapes import SHAPES, shape_folder, size_of
from server.bench.answer import Answer
from server.bench.client import ask, first_model, open_session
from server.bench.run import closed_loop
from server.bench.target import Target
from server.bench.words import random_words

ROOT = Path(__file__).resolve().parent.parent
# A server as if the processor had this instruction path alone.
ON_PATH = """
import runpy
from ops.cpu import build
build.available_paths = lambda: [{path!r}]
runpy.run_module("server", run_name="__main__", alter_sys=True)
"""
GREEDY = {"temperature": 0, "ignore_eos": True}

# The figures of the table: scenario, path into its record, unit.
HEADLINES = [
    ("s1", "tpot_ms.p50", "ms"),
    ("s1", "ttft_ms.p50", "ms"),
    ("s1", "floor_ratios.tpot_p50", "x floor"),
    ("s1", "floor_ratios.ttft_p50", "x floor"),
    ("s2", "output_tokens_per_s", "tokens/s"),
    ("s2", "wall_s", "s"),
    ("s2", "ttft_ms.p50", "ms"),
    ("s2", "itl_ms.max", "ms"),
    ("s2", "floor_ratios.wall", "x floor"),
    ("s3", "gap_before_ms.p50", "ms"),
    ("s3", "gap_during_ms.p99", "ms"),
    ("s3", "gap_during_ms.max", "ms"),
    ("s3", "long_ttft_ms.max", "ms"),
    ("s3", "wall_s", "s"),
    ("s3", "floor_ratios.long_ttft_max", "x floor"),
    ("s4", "output_tokens_per_s", "tokens/s"),
    ("s4", "wall_s", "s"),
    ("s4", "first_ttft_ms.p50", "ms"),
    ("s4", "floor_ratios.wall", "x floor"),
    ("s5", "output_tokens_per_s", "tokens/s"),
    ("s5", "wall_s", "s"),
    ("s5", "ttft_ms.p50", "ms"),
    ("s5", "floor_ratios.wall", "x floor"),
]


async def run_scenarios(
    target: Target, keys: list[str], seed: int, floors: Floors
) -> dict[str, Any]:
    """A warm-up, then the scenarios in order. Returns: by key, the record of each."""
    results: dict[str, Any] = {}
    async with open_session(target) as session:
        if not target.model:
            target = replace(target, model=await first_model(session, target))

        async def ask_(prompt: str, max_tokens: int, **more: Any) -> Answer:
            return await ask(session, target, prompt, max_tokens, **more)

        rng = random.Random(f"warm-up/{seed}")
        await closed_loop([partial(ask_, random_words(rng, n), 8) for n in (16, 64, 200, 300)], 2)
        for key in keys:
            name, scenario = SCENARIOS[key]
            results[key] = await scenario(ask_, random.Random(f"{key}/{seed}"), floors)
            wall, rate = results[key]["wall_s"], results[key]["output_tokens_per_s"]
            line = f"seed {seed}: {key} {name}: {wall:.1f} s, {rate:.1f} output tokens/s"
            print(line, file=sys.stderr, flush=True)
    return results


@contextmanager
def loomserve(options: list[str], path: str | None) -> Iterator[tuple[Target, dict[str, Any]]]:
    """A server of this tree on a free port, told to end afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    start = time.perf_counter()
    entry = ["-c", ON_PATH.format(path=path)] if path else ["-m", "server"]
    command = [sys.executable, *entry, "--port", str(port), *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(process, url)
        yield (
            Target(url, "", extra=GREEDY),
            {
                "seconds_to_ready": round(time.perf_counter() - start, 2),
                "pid": process.pid,
            },
        )
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    while True:
        if process.poll() is not None:
            sys.exit(f"the server ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.05)


def form_served(url: str) -> str:
    """The form of the weights, as loomserve tells."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=5) as answer:
        return str(json.load(answer)["runner"]["weights"])


def memory_mib(pid: int) -> float | None:
    """Proportional set size of a process; None where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return round(sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024, 1)


def run_once(options: argparse.Namespace, seed: int, floors: Floors) -> dict[str, Any]:
    if not options.serve:
        target = Target(options.base_url, options.model, options.endpoint, GREEDY)
        results = asyncio.run(run_scenarios(target, options.scenarios, seed, floors))
        pid = options.server_pid
        return {"seed": seed, "results": results, "memory_mib": memory_mib(pid) if pid else None}
    with loomserve(options.server_options, options.path) as (target, started):
        target = replace(target, endpoint=options.endpoint)
        form = form_served(target.base_url)
        floors = replace(floors, size=floors.size.in_form(form))
        results = asyncio.run(run_scenarios(target, options.scenarios, seed, floors))
        memory = memory_mib(started["pid"])
    return {
        "seed": seed,
        "results": results,
        "memory_mib": memory,
        "weights": form,
        "seconds_to_ready": started["seconds_to_ready"],
    }


def figure(run: dict[str, Any], key: str, path: str) -> float | None:
    value: Any = run["results"].get(key)
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, float | int) else None


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: the median of the runs, and their smallest and largest value."""
    lines = ["| scenario | figure | median | range | unit |", "|---|---|---|---|---|"]

    def add(name: str, what: str, values: list[float | None], unit: str) -> None:
        known = [value for value in values if value is not None]
        if known:
            median, low, high = statistics.median(known), min(known), max(known)
            lines.append(f"| {name} | {what} | {median:.4g} | {low:.4g} to {high:.4g} | {unit} |")

    for key, path, unit in HEADLINES:
        name = f"{key} {SCENARIOS[key][0]}"
        add(name, path.replace("_ms", ""), [figure(run, key, path) for run in runs], unit)
    add("start", "seconds_to_ready", [run.get("seconds_to_ready") for run in runs], "s")
    add("memory", "after the run", [run["memory_mib"] for run in runs], "MiB")
    errors = [r["errors"] for run in runs for r in run["results"].values() if r["errors"]]
    short = sum(r["short_answers"] for run in runs for r in run["results"].values())
    if errors:
        lines.append(f"\nFailed requests: {errors}")
    if short:
        lines.append(f"\n{short} answers were shorter than asked for: rates are not comparable.")
    return "\n".join(lines)


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="a server that is running")
    add("--serve", action="store_true", help="start loomserve for each run instead")
    add("--model", default="", help="else the first that /v1/models lists")
    add("--shape", choices=SHAPES, help="serve random weights of this shape (with --serve)")
    add("--path", help="instruction path of the kernels, else the best (with --serve)")
    add("--endpoint", choices=("completions", "chat"), default="completions")
    add("--scenarios", default="s1,s2,s3,s4,s5", help="comma-separated")
    add("--runs", type=int, default=1, help="with seeds from --seed on")
    add("--seed", type=int, default=1)
    add("--server-pid", type=int, help="process whose memory is told (with --base-url)")
    for name, default in asdict(ModelSize()).items():
        add(f"--{name.replace('_', '-')}", type=float, default=default, help="of the model")
    add("server_options", nargs="*", metavar="OPTION", help="after --: loomserve's (with --serve)")
    options = parser.parse_args(argv)
    options.scenarios = options.scenarios.split(",")
    unknown = [key for key in options.scenarios if key not in SCENARIOS]
    if unknown:
        parser.error(f"--scenarios {','.join(unknown)}: must be of {', '.join(SCENARIOS)}")
    for name in ("shape", "path"):
        if getattr(options, name) and not options.serve:
            parser.error(f"--{name}: needs --serve")
    return options


def main(argv: list[str]) -> int:
    """Returns the exit status: 1 where a request failed, 2 where no server answers."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended too
    size = ModelSize(**{name: getattr(options, name) for name in asdict(ModelSize())})
    if options.shape:
        size = size_of(SHAPES[options.shape])
        folder = shape_folder(options.shape, RunnerConfig().cache_folder)
        options.server_options = ["--model", str(folder), *options.server_options]
    machine = Machine(0.0, 0.0)
    runs = []
    try:
        for seed in range(options.seed, options.seed + options.runs):
            machine = machine.best_of(measure_machine(path=options.path))
            runs.append(run_once(options, seed, Floors(machine, size)))
    except aiohttp.ClientError as error:
        print(f"{options.base_url}: {error}", file=sys.stderr)
        return 2
    description = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "bandwidth_gb_s": round(machine.bandwidth / 1e9, 1),
        "bf16_tflop_s": round(machine.bf16_flops / 1e12, 3),
        "server_options": options.server_options,
        "path": options.path,
    }
    print(
        f"{description['processor']}, {description['cores']} cores:"
        f" {description['bandwidth_gb_s']} GB/s, {description['bf16_tflop_s']} TFLOP/s (bfloat16)\n"
    )
    forms = sorted({run["weights"] for run in runs if "weights" in run})
    if forms:
        print(f"weights: {', '.join(forms)}\n")
    print(table(runs))
    print(json.dumps({**description, "model_size": asdict(size), "runs": runs}))
    failed = any(r["errors"] for run in runs for r in run["results"].values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
