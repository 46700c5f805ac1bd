"""A GGUF model in several files, as llama-gguf-split writes them: NAME-00001-of-00003.gguf, ...

The first file has the metadata, every one its number, and the tensors are spread over them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from runtime.checkpoints.gguf_file import GgufFile, GgufTensor
from runtime.errors import ModelError, shown

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def read_gguf(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    """Metadata and tensors of the model whose only or first file this is.

    Raises: ModelError: it is not the first, another is missing, or they do not belong together.
    """
    first = GgufFile(path)
    count, number = first.metadata.get("split.count", 1), first.metadata.get("split.no", 0)
    if type(count) is not int or not 0 <= count < 100_000:
        raise ModelError(f"{path}: split.count is {shown(count)}; it must be a number of files")
    if count < 2:
        return first.metadata, first.tensors
    named = _NAME.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise ModelError(
            f"{path}: is one of {count} parts, whose names must end in -00001-of-{count:05}.gguf"
        )
    if number != 0 or int(named[2]) != 1:
        start = path.with_name(f"{named[1]}-00001-of-{count:05}.gguf")
        raise ModelError(f"{path}: is not the first of {count} parts; name {start}")
    tensors = list(first.tensors)
    for i in range(1, count):
        part = GgufFile(path.with_name(f"{named[1]}-{i + 1:05}-of-{count:05}.gguf"))
        given = part.metadata.get("split.no"), part.metadata.get("split.count")
        if given != (i, count):
            raise ModelError(
                f"{part.path}: says that it is part {shown(given[0])} of {shown(given[1])},"
                f" counted from 0; {i} of {count} is wanted"
            )
        tensors += part.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors) or len({tensor.name for tensor in tensors}) < len(tensors):
        raise ModelError(
            f"{path}: its parts hold {len(tensors)} tensors, the first says {shown(total)}"
        )
    return first.metadata, tensors
