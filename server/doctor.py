"""`loomserve doctor`: what this machine has, what serving would choose on it and why, and what each
choice would cost."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from runtime.errors import LoomserveError
from server.loading import examine_machine

if TYPE_CHECKING:
    from runtime.examination import Examination
    from server.config import ServerConfig


def run_doctor(config: ServerConfig) -> int:
    """Prints what was found. Returns the exit status: 2 where the model could not be served."""
    try:
        name, found = examine_machine(config)
    except LoomserveError as error:
        print(f"loomserve: {error}", file=sys.stderr)
        return 2
    print("\n".join(report(name, found)))
    return 0


def report(model: str, found: Examination) -> list[str]:
    """The lines that tell what was found for a model of this name."""
    machine = found.machine
    lines = [
        f"machine   {found.cores} cores, {found.memory_bytes / 2**30:.1f} GiB memory,"
        f" {' '.join(found.instructions) or 'no instructions that kernels use'}",
        f"compiler  {found.compiler}",
        f"kernels   {found.device}; this CPU has {', '.join(found.paths) or 'no instruction path'}",
    ]
    if machine is not None:
        lines.append(
            f"limits    {machine.bandwidth / 1e9:.1f} GB/s read,"
            f" {machine.bf16_flops / 1e9:.0f} GFLOP/s for bfloat16 weights"
        )
    lines += [f"model     {model}", f"weights   {found.weights}"]
    if found.costs:
        lines += ["", *_table(found)]
    return lines


def _table(found: Examination) -> list[str]:
    heads = [f"{rows} row{'s' * (rows > 1)}, ms" for rows in found.rows]
    lines = [f"  {'weights':10}{'MB':>8}" + "".join(f"{head:>20}" for head in heads)]
    for cost in found.costs:
        mark = "*" if cost.form == found.chosen else " "
        cells = (
            f"{1e3 * seconds:.1f} ({1e3 * floor:.1f})"
            for seconds, floor in zip(cost.seconds, cost.floors, strict=True)
        )
        lines.append(
            f"{mark} {cost.form:10}{cost.bytes / 1e6:8.0f}"
            + "".join(f"{cell:>20}" for cell in cells)
        )
    lines.append(
        "* chosen. Of a step's linear layers, without the output layer; in brackets what memory and"
        " arithmetic allow."
    )
    return lines
