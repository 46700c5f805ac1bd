"""How long the linear layers of a model take in each form that weights can have, measured."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from ops.cpu.library import Library
from ops.cpu.native import NativeOps
from ops.cpu.remembered import keep, place_of, recall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

# By name, the quantization and the type that a weight is packed from.
FORMS = {
    "float32": (None, torch.float32),
    "bfloat16": (None, torch.bfloat16),
    "float16": (None, torch.float16),
    "int8": ("int8", torch.bfloat16),
    "int4": ("int4", torch.bfloat16),
}
# One stream, several, and a chunk of a prompt: memory rules the first, arithmetic the last.
ROWS = (1, 16, 128)
_ROUNDS = 10


def time_forms(
    library: Library,
    shapes: Sequence[tuple[int, int]],
    forms: Sequence[str],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of one pass over linear layers of random weights, for each of `ROWS`.

    The forms take turns and the best of several rounds counts.

    Args:
        shapes: [n, k] of the layers; more than the caches hold, where memory is to be felt.
        forms: keys of `FORMS`.
        clock: in seconds.
    """
    ops = NativeOps(library)  # its weights' memory is given back as a whole
    rand = torch.Generator().manual_seed(0)
    inputs = {
        rows: {k: torch.randn(rows, k, generator=rand) for k in {k for _, k in shapes}}
        for rows in ROWS
    }
    packed = {form: _packed(ops, shapes, form, rand) for form in forms}
    best = {form: [float("inf")] * len(ROWS) for form in forms}
    with torch.inference_mode():
        for _ in range(_ROUNDS):
            for i, rows in enumerate(ROWS):
                for form, layers in packed.items():
                    start = clock()
                    for layer in layers:
                        ops.linear(inputs[rows][layer.k], layer)
                    best[form][i] = min(best[form][i], clock() - start)
    return best


def remembered_times(
    library: Path, shapes: Sequence[tuple[int, int]], forms: Sequence[str]
) -> dict[str, list[float]]:
    """`time_forms` on one thread, by its own processor time, so that whatever else runs on the
    machine changes little. Measured once and kept beside the library: what follows from it is the
    same from start to start."""
    path = place_of(library, "form-times", list(map(list, shapes)), list(forms))
    times = recall(path)
    try:
        return {form: [float(seconds) for seconds in times[form]] for form in forms}
    except (ValueError, TypeError, KeyError):
        pass
    found = time_forms(Library(library, threads=1), shapes, forms, time.thread_time)
    keep(path, found)
    return found


def _packed(
    ops: NativeOps, shapes: Sequence[tuple[int, int]], form: str, rand: torch.Generator
) -> list[Any]:
    quantization, dtype = FORMS[form]
    return [
        ops.pack_linear(torch.randn(n, k, generator=rand).to(dtype), quantization=quantization)
        for n, k in shapes
    ]
