"""A Hugging Face model folder: config.json and safetensors in one file or in shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.checkpoints.checkpoint import RawTensor, TensorInfo, tensor_info
from runtime.checkpoints.json_file import read_json_object, read_optional_json_object
from runtime.checkpoints.safetensors_file import SafetensorsFile
from runtime.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from ops.coded_weight import CodedMatrix

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class HuggingFaceCheckpoint:
    """A model folder. Where there is an index, it alone says which file each tensor is in: stray
    files and tensors that it does not assign are never read."""

    def __init__(self, path: Path) -> None:
        """Raises: ModelError: no config.json or no weights, or a file of them is damaged."""
        self.path = path
        self.config = read_json_object(path / "config.json")
        self.generation_config = read_optional_json_object(path / "generation_config.json")
        self._files: dict[str, SafetensorsFile] = {}  # by tensor name
        self.tensors: dict[str, TensorInfo] = {}
        if (path / _INDEX).exists():
            self._open_shards()
        elif (path / _SINGLE).exists():
            self._open_single()
        else:
            raise ModelError(f"{path}: has neither {_INDEX} nor {_SINGLE}")

    def _open_single(self) -> None:
        file = SafetensorsFile(self.path / _SINGLE)
        for name, info in file.tensors.items():
            self._files[name] = file
            self.tensors[name] = info

    def _open_shards(self) -> None:
        index = read_json_object(self.path / _INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise ModelError(f"{self.path / _INDEX}: has no weight_map")
        shards: dict[str, SafetensorsFile] = {}
        for name, file_name in index.items():
            if not isinstance(file_name, str) or "/" in file_name:
                raise ModelError(f"{self.path / _INDEX}: {name!r} is in {file_name!r}, not a file")
            if file_name not in shards:
                shards[file_name] = SafetensorsFile(self.path / file_name)
            info = shards[file_name].tensors.get(name)
            if info is None:
                raise ModelError(
                    f"{self.path / file_name}: has no tensor {name!r}, which {_INDEX} puts there"
                )
            self._files[name] = shards[file_name]
            self.tensors[name] = info

    def read(self, name: str) -> RawTensor:
        """See `Checkpoint.read`; the buffer is mapped from the file."""
        tensor_info(self, name)
        return self._files[name].read(name)

    def coded(self, name: str) -> CodedMatrix | None:
        """See `Checkpoint.coded`: a folder's tensors are floats."""
        return None
