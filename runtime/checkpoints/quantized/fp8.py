"""FP8 checkpoints: 8-bit floats with a float scale for the tensor, each row, or each block.

DeepSeek V3's and Qwen's have `weight_scale_inv` for blocks of `weight_block_size`, others
`weight_scale`; despite the first name both are factors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from runtime.checkpoints.quantized.compressed_tensors import float_codes, spread
from runtime.checkpoints.quantized.stored import StoredWeight, block_size

if TYPE_CHECKING:
    from runtime.checkpoints.quantized.stored import Floats, Reader, Settings


def find_fp8(reader: Reader, settings: Settings) -> dict[str, StoredWeight]:
    """Raises: ModelError: the settings are not of this layout."""
    settings.one_of("fmt", ("e4m3", None))
    settings.one_of("activation_scheme", ("dynamic", "static", None))
    settings.one_of("scale_fmt", ("float", "ue8m0", None))
    key = "weight_block_size"
    block = block_size(settings.values.get(key), f"{settings.where}: {key}")
    found = {}
    for suffix in (".weight_scale_inv", ".weight_scale"):
        for stem in reader.ending(suffix):
            rows, columns = reader.shape(f"{stem}.weight", 2)
            scale = stem + suffix
            parts = (f"{stem}.weight", scale, *reader.present(stem, ".input_scale"))
            where = reader, f"{stem}.weight", scale, (rows, columns), block
            read, codes = partial(_values, *where), partial(float_codes, *where)
            found[f"{stem}.weight"] = StoredWeight((rows, columns), parts, read, codes)
    return found


def _values(
    reader: Reader, name: str, scale: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> Floats:
    values: Floats = reader.floats(name)
    scales = spread(reader, scale, reader.floats(scale), shape, block)
    return values * scales
