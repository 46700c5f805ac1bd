"""In which form a model's linear layers are kept, and why.

Weights stay as the checkpoint has them: kernels read them faster than anything wider, since a step
of few rows is bound by their bytes. That holds for float16 as well, though activations beyond its
65504 are kept in bfloat16. Where weights are values of a quantization already (the embedded model's
are), that form holds them in a quarter of bfloat16's bytes, but its inputs are rounded to int8 and
its arithmetic is another: it is taken where it was measured to be no slower, from one row to a
chunk of a prompt. Which is faster depends on the machine's instructions, so nothing but a
measurement can tell; it is made once and remembered beside the compiled kernels.

A GPU has one form for integers in groups: its kernels round nothing that floats would not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ops.cpu.forms import ROWS, remembered_times

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from runtime.checkpoints.checkpoint import TensorInfo
    from runtime.config import RunnerConfig

# Layers that are measured: few enough to take no time, enough to leave the inner caches.
_MEASURED_LAYERS, _ENOUGH_WEIGHTS = 2, 16_000_000
# Two measurements of the same thing differ by so much on a machine with other work.
_NOISE = 1.03


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A checkpoint's weights.

    Args:
        dtype: their type.
        form: the quantization whose values they are; None: of none.
        shapes: [n, k] of the linear layers of its first layers.
        kinds: of `ops.coded_weight`, of the matrices that the file holds as integers.
        group_kinds: of those that it holds in groups of neighbours.
    """

    dtype: torch.dtype
    form: str | None = None
    shapes: tuple[tuple[int, int], ...] = ()
    kinds: tuple[str, ...] = ()
    group_kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightForm:
    """A choice: what `OpSet.pack_linear` is told, and the form with its reason in words.

    Args:
        keeps_codes: matrices that are integers in the file stay so.
        keeps_floats: see `runtime.execution.device.Device`.
    """

    quantization: str | None
    words: str
    keeps_codes: bool = False
    keeps_floats: bool = False


def layer_shapes(tensors: Mapping[str, TensorInfo]) -> tuple[tuple[int, int], ...]:
    """The matrices of a checkpoint's first layers, as many as are measured: without experts, of
    which a step reads some."""
    shapes: list[tuple[int, int]] = []
    layers = {layer for _, layer in _matrices(tensors)}
    for wanted in sorted(layers)[:_MEASURED_LAYERS]:
        shapes += [shape for shape, layer in _matrices(tensors) if layer == wanted]
        if sum(n * k for n, k in shapes) >= _ENOUGH_WEIGHTS:
            break
    return tuple(shapes)


def matrix_weights(tensors: Mapping[str, TensorInfo]) -> int:
    """Weights of the matrices of all layers, of the kinds that `layer_shapes` counts."""
    return sum(n * k for (n, k), _ in _matrices(tensors))


def _matrices(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[tuple[int, int], int]]:
    """Shape and layer of each."""
    for name, info in tensors.items():
        found = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
        if found and len(info.shape) == 2 and ".experts." not in name:
            yield (info.shape[0], info.shape[1]), int(found[1])


def choose_form(
    config: RunnerConfig, stored: StoredWeights, dtype: str, library: Path | None
) -> WeightForm:
    """The form of a CPU's weights.

    Args:
        dtype: of weights that are kept in no type of their own, chosen already.
        library: the file of the native kernels; None where plain torch runs.
    """
    asked = config.quantization
    if asked not in (None, "none"):
        return WeightForm(asked, f"{asked}, as asked for")
    native = library is not None
    keeps_floats = native and config.dtype == "auto"
    if keeps_floats and stored.dtype is torch.float16:
        dtype = "float16"
    if asked == "none" or config.dtype != "auto":
        return WeightForm(None, f"{dtype}, as asked for", keeps_floats=keeps_floats)
    if stored.kinds and native:
        words = f"{', '.join(stored.kinds)}, as the file has them"
        return WeightForm(None, words, keeps_codes=True, keeps_floats=True)
    words = f"{dtype}, {_why(dtype, stored.dtype, native=native)}"
    plain = WeightForm(None, words, keeps_floats=keeps_floats)
    if stored.form is None or library is None or not stored.shapes:
        return plain
    times = remembered_times(library, stored.shapes, (dtype, stored.form))
    shares = [mine / other for mine, other in zip(times[stored.form], times[dtype], strict=True)]
    measured = ", ".join(f"{share:.2f} at {rows}" for share, rows in zip(shares, ROWS, strict=True))
    measured = f"of {dtype}'s time it takes, by rows of a step, {measured}"
    if max(shares) > _NOISE:
        return WeightForm(
            None,
            f"{dtype}, since {stored.form} is not always faster here: {measured}",
            keeps_floats=True,
        )
    return WeightForm(stored.form, f"{stored.form}, what the file holds and no slower: {measured}")


def group_form(config: RunnerConfig, stored: StoredWeights) -> WeightForm:
    """The form of a GPU's weights; without words where there is no choice."""
    if not stored.group_kinds or config.quantization == "none":
        return WeightForm(None, "")
    kinds = ", ".join(stored.group_kinds)
    return WeightForm(None, f"{kinds} in groups, as the checkpoint has them", True)


def _why(dtype: str, stored: torch.dtype, *, native: bool) -> str:
    if getattr(torch, dtype) is stored:
        return "as the checkpoint has them"
    if not native and dtype == "float32":
        return "since plain torch has no fast bfloat16 here"
    return f"for the checkpoint's {str(stored).removeprefix('torch.')}"
