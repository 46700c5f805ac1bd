#!/usr/bin/env python3
"""Checks and measures the GPU path on this machine: first what must be right, then how fast it is.

    python scripts/gpu_check.py                    # one GPU, nothing to download
    python scripts/gpu_check.py --device cpu --tiny    # tries the script itself, in an interpreter

It is meant to take under six minutes: after 330 s what is not yet measured is left out, and named.
No GPU has run it yet.

Models are of published shapes (Qwen3-0.6B, Llama-3.1-8B) with random weights. Correctness: every
op that has a kernel, and what keeps recurrent states, against the float32 reference, the start of a
server's runner from a checkpoint, replayed graphs bit-equal to eager steps, the same tokens with
overlap and mixing on and off; torch raises where launching a step waits for the device. Speed:
decode steps against the batch beside the floors that this GPU's measured copy bandwidth and matmul
rate set, served steps by kind of sampling, mixed steps' host time beside the device's, idle time
between steps, extend attention beside torch's flash kernel, and 256 requests offline. A table comes
last, everything goes to a JSON file.

Needs torch, Triton and numpy, and for the start of a runner safetensors and gguf; no server. Exits
0 when all checks passed, 1 when one failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.gpu.table import table

SPEED_BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
TIME_BUDGET_S = 330.0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few repeats")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: needs --tiny, the interpreter is 10,000 times too slow")
    return options


class Report:
    """Collects results; prints each when it is known.

    Args: budget_s: when nothing more is measured; an interpreter takes the time that it takes.
    """

    def __init__(self, description: dict[str, str], budget_s: float = math.inf) -> None:
        self.started = time.monotonic()
        self._budget_s = budget_s
        self.results: dict[str, Any] = {"machine": description, "checks": [], "models": {}}

    def check(self, checks: Any) -> None:
        for check in checks:
            self.results["checks"].append(asdict(check))
            word = {True: "ok", False: "FAILED", None: "skipped"}[check.passed]
            print(f"{word:8} {check.name}: {check.detail}", flush=True)

    def note(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    @property
    def late(self) -> bool:
        return time.monotonic() - self.started > self._budget_s

    def measure(self, parts: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        """What the parts tell, by their names; not those for which no time is left."""
        results = {}
        for name, part in parts.items():
            if self.late:
                self.note(f"{name} is left out: no time left")
            else:
                results[name] = part()
        return results

    @property
    def failed(self) -> list[str]:
        return [c["name"] for c in self.results["checks"] if c["passed"] is False]


def run(options: argparse.Namespace) -> Report:
    """All checks, then all measurements. What needs a GPU is imported here, behind the exit."""
    import torch
    import triton

    from scripts.gpu import correctness, experts, integers, memory, models, speed
    from scripts.gpu.single_ops import single_ops

    tiny = options.tiny
    device = models.open_target(options.device)
    report = Report(
        {
            "device": device.description,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "dtype": str(device.dtype),
        },
        TIME_BUDGET_S if device.queued else math.inf,
    )
    with torch.inference_mode():
        report.check(correctness.check_attention(device, tiny=tiny))
        report.check([correctness.check_large_offsets(device)])
        report.check(correctness.check_elementwise(device))
        report.check(memory.check_kv_codes(device))
        report.check(memory.check_recurrent(device, tiny=tiny))
        report.check(correctness.check_sampling(device, tiny=tiny))
        report.check(experts.check_experts(device, tiny=tiny))
        report.check(integers.check_integers(device, tiny=tiny))
    report.check(build_checks(device, tiny=tiny))
    gc.collect()
    with torch.inference_mode():
        limits = speed.measure_limits(device, tiny=tiny)
        report.results["limits"] = asdict(limits)
        report.note("single ops, experts, integers, extend attention")
        parts: dict[str, Callable[[], Any]] = {
            "ops": partial(single_ops, device, limits, tiny=tiny),
            "experts": partial(experts.expert_rates, device, limits, tiny=tiny),
            "integers": partial(integers.integer_rates, device, limits, tiny=tiny),
            "extend_attention": partial(
                speed.extend_attention_rates,
                device,
                new=16 if tiny else 2048,
                prefixes=[0, 40] if tiny else [0, 2048, 8192, 30_720],
                heads=4 if tiny else 32,
                kv_heads=1 if tiny else 8,
                head_dim=64 if tiny else 128,
            ),
        }
        report.results |= report.measure(parts)
    for model in (models.TINY,) if tiny else (models.QWEN, models.LLAMA):
        gc.collect()  # the graphs of the model before refer to their runner in a circle
        if report.late or not models.fits(device, model):
            report.note(f"{model.name} is left out: no {'time' if report.late else 'memory'} left")
            continue
        report.results["models"][model.name] = measure_model(report, device, model, limits, tiny)
    return report


def build_checks(device: Any, *, tiny: bool) -> Any:
    """Those of `build_runner`, whose readers of checkpoints need packages that a machine which only
    checks its GPU may lack."""
    from scripts.gpu.correctness import Check

    try:
        from scripts.gpu.build import check_build
    except ModuleNotFoundError as error:
        return [Check("build_runner", None, f"{error.name} is not installed")]
    return check_build(device, tiny=tiny)


def measure_model(report: Report, device: Any, model: Any, limits: Any, tiny: bool) -> Any:
    from scripts.gpu import correctness, models, speed

    report.note(f"{model.name}: weights and graphs")
    rows, tokens = (4, 512) if tiny else (512, 540_000)
    runner = models.open_runner(device, model, rows=rows, tokens=tokens)
    report.note(f"{model.name}: {runner.info.max_total_tokens} tokens of KV")
    report.check(correctness.check_graphs(runner))
    report.check(correctness.check_mixed_graphs(runner))
    report.check(correctness.check_modes(runner, tiny=tiny))
    report.note(f"{model.name}: speed")
    parts: dict[str, Callable[[], Any]] = {
        "decode": partial(
            speed.decode_steps,
            runner,
            model,
            limits,
            [1, 2, 4] if tiny else SPEED_BATCHES,
            20 if tiny else 1024,
        ),
        "idle": partial(
            speed.idle_between_steps, runner, rows=2 if tiny else 64, new=4 if tiny else 128
        ),
        "served": partial(
            speed.served_steps, runner, rows=2 if tiny else 64, new=4 if tiny else 64
        ),
        "mixed": partial(
            speed.mixed_steps,
            runner,
            [8] if tiny else [64, 256, 1024, 4096],
            rows=2 if tiny else 32,
            kv_len=20 if tiny else 512,
        ),
        "offline": partial(
            speed.offline_throughput,
            runner,
            requests=3 if tiny else 256,
            low=2 if tiny else 100,
            high=5 if tiny else 1024,
            chunk=32 if tiny else 8192,
        ),
    }
    result = report.measure(parts)
    if "decode" in result:
        result["rows_that_pay"] = speed.rows_that_pay(result["decode"])
    runner.close()
    return result


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    interpreter = ExitStack()
    if options.device == "cpu":
        # Before Triton is imported, whose library reads it at import.
        os.environ["TRITON_INTERPRET"] = "1"
        # exp of a large number is inf, and 1 / inf the right 0; numpy, which interprets, warns.
        warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)
        from scripts._triton_interpreter import patch_loop_bounds, products_rounded_once

        patch_loop_bounds()
        interpreter.enter_context(products_rounded_once())
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device on this machine, so there is nothing to check")
        return 2
    with interpreter:
        report = run(options)
    options.json.write_text(json.dumps(report.results, indent=1))
    print(table(report.results))
    print(f"\nall results: {options.json}; {time.monotonic() - report.started:.0f} s")
    if report.failed:
        print(f"FAILED: {', '.join(report.failed)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
