"""Finds out what a machine has, what is chosen on it for a model, and what each choice costs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from ops.cpu import build
from ops.cpu.forms import FORMS, ROWS, time_forms
from ops.cpu.library import KINDS
from ops.cpu.native import NativeOps
from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.examination import Examination, FormCost
from runtime.execution.build import stored_weights
from runtime.execution.device import open_device
from runtime.execution.machine import measure_machine
from runtime.execution.weight_form import matrix_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runtime.config import RunnerConfig
    from runtime.examination import Machine

_REPEATS = 6


def examine(
    config: RunnerConfig,
    path: Path,
    published_form: str | None,
    progress: Callable[[str], None],
) -> Examination:
    """Opens the device as serving the model at `path` would, and measures. Loads no weights; about
    ten seconds, beside what compiling the kernels takes where they are not there yet.

    Raises: LoomserveError: what serving would raise.
    """
    checkpoint = open_checkpoint(path)
    stored = stored_weights(checkpoint, published_form)
    device = open_device(config, stored, progress)
    machine, costs = None, tuple[FormCost, ...]()
    if isinstance(device.ops, NativeOps) and stored.shapes:
        library = device.ops.library
        progress("measuring memory and arithmetic")
        torch.set_num_threads(library.threads)
        machine = measure_machine(_REPEATS)
        torch.set_num_threads(1)
        progress("measuring each form of the weights")
        times = time_forms(library, stored.shapes, tuple(FORMS))
        scale = matrix_weights(checkpoint.tensors) / sum(n * k for n, k in stored.shapes)
        costs = tuple(
            _cost(device.ops, form, stored.shapes, times[form], scale, machine) for form in FORMS
        )
    known = {flag for needed in build.INSTRUCTION_PATHS.values() for flag in needed}
    return Examination(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=device.memory_bytes(),
        instructions=tuple(sorted(known & build.cpu_flags())),
        paths=tuple(build.available_paths()),
        compiler=_compiler(),
        device=device.description,
        weights=device.weights,
        chosen=device.form,
        rows=ROWS,
        machine=machine,
        costs=costs,
    )


def _cost(
    ops: NativeOps,
    form: str,
    shapes: tuple[tuple[int, int], ...],
    seconds: list[float],
    scale: float,
    machine: Machine,
) -> FormCost:
    packed = scale * sum(ops.library.packed_bytes(KINDS[form], n, k) for n, k in shapes)
    # What a product with a weight of this form takes, in bfloat16 ones: int8 instructions do twice
    # as many of them, float32 ones (of float16 weights, too) half.
    share = {"float32": 2.0, "float16": 2.0, "bfloat16": 1.0}.get(form, 0.5)
    flops = 2 * scale * sum(n * k for n, k in shapes) * share
    return FormCost(
        form,
        int(packed),
        tuple(scale * value for value in seconds),
        tuple(max(packed / machine.bandwidth, rows * flops / machine.bf16_flops) for rows in ROWS),
    )


def _compiler() -> str:
    try:
        return build.find_compiler()
    except build.NoCompiler as error:
        return str(error)
