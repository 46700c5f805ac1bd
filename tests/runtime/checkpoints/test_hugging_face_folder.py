"""Model folders: one file, shards, and what must not be read from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtime.checkpoints.checkpoint import RawTensor, TensorInfo
from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.checkpoints.safetensors_file import SafetensorsFile, write_safetensors
from runtime.errors import ModelError
from tests.runtime.checkpoints.tiny_models import make_llama, tensors_of, write_folder

INDEX = "model.safetensors.index.json"


def read_all(checkpoint) -> dict[str, torch.Tensor]:
    raws = {name: checkpoint.read(name) for name in checkpoint.tensors}
    return {
        name: torch.frombuffer(raw.buffer, dtype=getattr(torch, raw.dtype)).view(raw.shape)
        for name, raw in raws.items()
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return set(left) == set(right) and all(torch.equal(left[n], right[n]) for n in left)


def write_shards(folder, tensors):
    """Every other tensor in the second shard, as the index says."""
    names = list(tensors)
    files = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


@pytest.fixture
def folder(tmp_path):
    model = make_llama()
    write_folder(model, tmp_path)
    return tmp_path, tensors_of(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_single_file_gives_what_was_saved(tmp_path, dtype):
    model = make_llama()
    checkpoint = open_checkpoint(write_folder(model, tmp_path, dtype))
    assert same(
        read_all(checkpoint),
        {n: t.to(dtype) if t.ndim == 2 else t for n, t in tensors_of(model).items()},
    )
    assert checkpoint.config["num_hidden_layers"] == 2
    assert checkpoint.generation_config == {}


def test_shards_are_joined_by_the_index_and_stray_files_are_never_read(folder):
    path, tensors = folder
    files = write_shards(path, tensors)
    # A stray single file and a leftover tensor in a shard, both with other values.
    wrong = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
    save_file(wrong, path / "model.safetensors")
    first = sorted(set(files.values()))[0]
    elsewhere = next(name for name, file in files.items() if file != first)
    shard = {name: tensors[name] for name, file in files.items() if file == first}
    save_file({**shard, elsewhere: wrong[elsewhere]}, path / first)

    assert same(read_all(open_checkpoint(path)), tensors)


def test_own_head_is_not_replaced_by_the_embedding_in_either_order(folder):
    path, tensors = folder
    for names in (list(tensors), list(reversed(tensors))):
        infos = {n: TensorInfo(tuple(tensors[n].shape), "float32") for n in names}
        raws = (
            RawTensor(infos[n].shape, "float32", tensors[n].numpy().data.cast("B")) for n in names
        )
        write_safetensors(path / "model.safetensors", infos, raws)
        read = read_all(open_checkpoint(path))
        assert torch.equal(read["lm_head.weight"], tensors["lm_head.weight"])
        assert torch.equal(read["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
        assert not torch.equal(read["lm_head.weight"], read["model.embed_tokens.weight"])


def test_a_tensor_that_the_index_promises_and_the_shard_lacks_is_named(folder):
    path, tensors = folder
    files = write_shards(path, tensors)
    index = {"weight_map": {**files, "model.extra": next(iter(files.values()))}}
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"has no tensor 'model\.extra', which .*index"):
        open_checkpoint(path)


def test_a_missing_shard_is_named(folder):
    path, tensors = folder
    write_shards(path, tensors)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: cannot be read"):
        open_checkpoint(path)


def test_an_index_cannot_lead_out_of_the_folder(folder):
    path, _ = folder
    (path / INDEX).write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match=r"\.\./elsewhere\.safetensors"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        pytest.param("config.json", r"has no config\.json", id="no-config"),
        pytest.param("model.safetensors", r"has neither .*index.* nor model\.s", id="no-weights"),
    ],
)
def test_an_incomplete_folder_is_refused(folder, remove, message):
    path, _ = folder
    (path / remove).unlink()
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)


def test_an_unknown_tensor_is_refused_by_name(folder):
    path, _ = folder
    with pytest.raises(ModelError, match=r"has no tensor 'model\.nothing'"):
        open_checkpoint(path).read("model.nothing")


@pytest.mark.parametrize("keep", [0, 4, 100, -10], ids=["empty", "no-length", "header", "values"])
def test_a_file_cut_short_is_refused(folder, keep):
    path, _ = folder
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: "):
        open_checkpoint(path)


def test_a_header_whose_sizes_do_not_match_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(ModelError, match=r"needs 12 bytes, the header gives it 8"):
        SafetensorsFile(path)


def test_writing_to_a_tensor_never_reaches_the_file(folder):
    path, tensors = folder
    read_all(open_checkpoint(path))["model.norm.weight"].fill_(9.0)
    assert same(read_all(open_checkpoint(path)), tensors)


@pytest.mark.parametrize("start", ["", "https://huggingface.co/", "hf://"])
def test_a_name_of_the_hub_is_explained(start):
    with pytest.raises(ModelError, match=r"org/a-model: no such folder .*hf download org/a-model "):
        open_checkpoint(Path(f"{start}org/a-model"))


def test_what_can_be_no_name_of_the_hub_is_just_not_there():
    for path in ("missing", "a/b/c", "./org/a-model/", "/no/where"):
        with pytest.raises(ModelError, match=r"no such folder or file$"):
            open_checkpoint(Path(path).absolute())


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system has no /proc")
def test_a_tensor_that_was_copied_leaves_memory_and_can_be_read_again(tmp_path):
    path, count = tmp_path / "model.safetensors", 4 << 20
    values = np.arange(count, dtype=np.float32)
    tensor = RawTensor((count,), "float32", values.data.cast("B"))
    write_safetensors(path, {"a": TensorInfo((count,), "float32")}, [tensor])
    file = SafetensorsFile(path)

    def resident_kib():
        areas = Path("/proc/self/smaps").read_text().split(str(path))[1:]
        return sum(int(area.split("Rss:")[1].split()[0]) for area in areas)

    raw = file.read("a")
    assert np.array_equal(np.frombuffer(raw.buffer, np.float32), values)
    assert resident_kib() > count * 4 // 1024 * 0.9
    raw.release()
    assert resident_kib() < 1024
    assert np.array_equal(np.frombuffer(file.read("a").buffer, np.float32), values)
