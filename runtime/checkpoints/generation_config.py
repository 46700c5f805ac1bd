"""What a model's generation_config.json says of sampling.

`do_sample` is not read: published files leave it at its default, false, beside the temperature that
the model is meant for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.checkpoints.json_file import read_json_object, read_optional_json_object
from runtime.errors import ModelError, shown

if TYPE_CHECKING:
    from pathlib import Path

_FILE = "generation_config.json"
# By key: integers only, the least and the largest value. As a request's fields may be.
_SETTINGS = {
    "temperature": (False, 0.0, 1000.0),
    "top_p": (False, 0.0, 1.0),
    "top_k": (True, -1, 2**31 - 1),
    "min_p": (False, 0.0, 1.0),
    "repetition_penalty": (False, 0.001, 1000.0),
    "max_new_tokens": (True, 1, 2**31 - 1),
}


def read_sampling(folder: Path, *, required: bool = False) -> dict[str, Any]:
    """The sampling settings in a folder's generation_config.json by name, those that it has.

    Args: required: the file must be there; else there are no settings without one.
    Raises: ModelError: it cannot be read, or a setting is not of the right type and in range.
    """
    path = folder / _FILE
    content = read_json_object(path) if required else read_optional_json_object(path)
    found = {}
    for name, (whole, low, high) in _SETTINGS.items():
        value = content.get(name)
        if value is None:
            continue
        if type(value) not in ((int,) if whole else (int, float)) or not low <= value <= high:
            kind = "an integer" if whole else "a number"
            raise ModelError(
                f"{path}: {name} is {shown(value)}; it must be {kind} from {low:g} to {high:.10g}"
            )
        found[name] = value if whole else float(value)
    return found
