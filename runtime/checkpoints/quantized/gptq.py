"""GPTQ and AWQ checkpoints: integers with a scale and a zero for each group of inputs.

    weight[n, k] = scales[g(k), n] * (q[k, n] - zeros[g(k), n])

GPTQ (AutoGPTQ, GPTQModel) packs q along the inputs; g(k) is `g_idx`, which act-order permutes; the
first form of the format stores zero - 1. AWQ (AutoAWQ's "gemm" form) packs q along the outputs, the
eight columns of a word in the order 0, 2, 4, 6, 1, 3, 5, 7; its groups are neighbours.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ops.coded_weight import GroupedMatrix
from runtime.checkpoints.quantized.stored import StoredWeight, in_groups, unpacked

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from runtime.checkpoints.quantized.stored import Floats, Reader, Settings

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the nibbles of a word, from the lowest


def find_gptq(reader: Reader, settings: Settings) -> dict[str, StoredWeight]:
    """Raises: ModelError: the settings are not of this layout."""
    settings.refuse("dynamic", "is_marlin_format")
    bits = settings.one_of("bits", (4, 8))
    settings.one_of("pack_dtype", ("int32",), "int32")
    form = settings.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    group = settings.integer("group_size", -1)
    found = {}
    for stem in reader.ending(".qweight"):
        words, outputs = reader.shape(f"{stem}.qweight", 2)
        parts = (".qweight", ".qzeros", ".scales", ".g_idx")
        shape = outputs, words * 32 // bits
        read = partial(_gptq, reader, stem, shape, bits, group, 1 if form == "gptq" else 0)
        codes = partial(_gptq_codes, reader, stem, shape, bits, group, 1 if form == "gptq" else 0)
        present = reader.present(stem, *parts)
        found[f"{stem}.weight"] = StoredWeight(shape, present, read, codes)
    return found


def _gptq(
    reader: Reader, stem: str, shape: tuple[int, int], bits: int, group: int, add: int
) -> Floats:
    index, scales, zeros = _gptq_groups(reader, stem, shape, bits, group, add)
    values = unpacked(reader.integers(f"{stem}.qweight", "int32"), bits, 0)
    return _scaled(values, scales, zeros, index)


def _gptq_codes(
    reader: Reader, stem: str, shape: tuple[int, int], bits: int, group: int, add: int
) -> GroupedMatrix | None:
    """None where groups differ in size."""
    index, scales, zeros = _gptq_groups(reader, stem, shape, bits, group, add)

    def read(first: int, last: int) -> NDArray[Any]:
        words = reader.integers(f"{stem}.qweight", "int32")[:, first:last]
        return unpacked(words, bits, 0).T

    return in_groups(bits, scales.T, zeros.T.astype(np.uint8), index, read)


def _gptq_groups(
    reader: Reader, stem: str, shape: tuple[int, int], bits: int, group: int, add: int
) -> tuple[NDArray[Any], Floats, NDArray[np.int32]]:
    """The group of each input, and the groups' scales and zeros [groups, outputs]."""
    outputs, inputs = shape
    scales = reader.floats(f"{stem}.scales")
    groups = len(scales)
    if f"{stem}.g_idx" in reader.names:
        index = reader.integers(f"{stem}.g_idx", "int32", (inputs,))
    else:
        index = np.arange(inputs) // (group if group > 0 else inputs)
    if index.min() < 0 or index.max() >= groups:
        raise reader.wrong(f"{stem}.g_idx", f"groups up to {index.max()}", f"{groups} of them")
    width = (groups, outputs * bits // 32)
    zeros = unpacked(reader.integers(f"{stem}.qzeros", "int32", width), bits, 1)
    zeros = (zeros + add) & (2**bits - 1)
    return index, reader.floats(f"{stem}.scales", (groups, outputs)), zeros


def find_awq(reader: Reader, settings: Settings) -> dict[str, StoredWeight]:
    """Raises: ModelError: the settings are not of this layout."""
    bits = settings.one_of("bits", (4,))
    settings.one_of("zero_point", (True,), True)
    if isinstance(settings.values.get("version"), str):
        settings.one_of("version", ("gemm", "GEMM"))
    found = {}
    for stem in reader.ending(".qweight"):
        inputs, words = reader.shape(f"{stem}.qweight", 2)
        parts = reader.present(stem, ".qweight", ".qzeros", ".scales")
        shape = words * 32 // bits, inputs
        read, codes = partial(_awq, reader, stem, shape), partial(_awq_codes, reader, stem, shape)
        found[f"{stem}.weight"] = StoredWeight(shape, parts, read, codes)
    return found


def _awq(reader: Reader, stem: str, shape: tuple[int, int]) -> Floats:
    scales, zeros = _awq_groups(reader, stem, shape)
    values = _in_order(reader.integers(f"{stem}.qweight", "int32"))
    return _scaled(values, scales, zeros, np.arange(shape[1]) // (shape[1] // len(scales)))


def _awq_codes(reader: Reader, stem: str, shape: tuple[int, int]) -> GroupedMatrix:
    scales, zeros = _awq_groups(reader, stem, shape)

    def read(first: int, last: int) -> NDArray[Any]:
        words = slice(first // 8, -(-last // 8))
        whole = _in_order(reader.integers(f"{stem}.qweight", "int32")[:, words])
        return whole.T[first % 8 :][: last - first]

    return GroupedMatrix("int4", *shape, scales.T, zeros.T.astype(np.uint8), read)


def _awq_groups(
    reader: Reader, stem: str, shape: tuple[int, int]
) -> tuple[Floats, NDArray[np.int32]]:
    """Scales and zeros [groups, outputs]."""
    outputs, inputs = shape
    groups, _ = reader.shape(f"{stem}.scales", 2)
    if inputs % groups:
        raise reader.wrong(f"{stem}.scales", f"{groups} groups", f"a divisor of {inputs}")
    words = reader.integers(f"{stem}.qzeros", "int32", (groups, outputs // 8))
    return reader.floats(f"{stem}.scales", (groups, outputs)), _in_order(words)


def _in_order(words: NDArray[np.int32]) -> NDArray[np.int32]:
    nibbles = unpacked(words, 4, 1).reshape(len(words), -1, 8)
    ordered = np.empty_like(nibbles)
    ordered[..., _AWQ_COLUMNS] = nibbles
    return ordered.reshape(len(words), -1)


def _scaled(
    values: NDArray[np.int32],
    scales: Floats,
    zeros: NDArray[np.int32],
    group_of_input: NDArray[Any],
) -> Floats:
    """[outputs, inputs] of values [inputs, outputs], scales and zeros [groups, outputs]."""
    centered = (values - zeros[group_of_input]).astype(np.float32)
    values_by_input: Floats = centered * scales[group_of_input]
    return values_by_input.T
