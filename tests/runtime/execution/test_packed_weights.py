"""Packed weights in a file: mapped by later starts, never taken for others, never needed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.cpu import build
from runtime.checkpoints import hugging_face, pack_file
from runtime.execution import packed_weights
from tests.cache import cache_folder
from tests.runtime.checkpoints.quantized_formats import write_quantized
from tests.runtime.models.tiny_models import Probe, make_model, open_runner, random_tokens

TOKENS = random_tokens(21)

pytestmark = pytest.mark.skipif(
    not build.available_paths(), reason="this CPU has no native instruction path"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A folder of the test's own, but for the kernels, in which small models have files too."""
    monkeypatch.setattr(packed_weights, "LEAST_WEIGHTS", 0)
    folder = tmp_path / "cache"
    folder.mkdir()
    kernels = cache_folder() / build.FOLDER
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / build.FOLDER).symlink_to(kernels)
    return folder


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    make_model(folder, "llama", tie_word_embeddings=True)
    return folder


def logits(folder: Path, cache: Path, **options: Any) -> torch.Tensor:
    runner = open_runner(folder, cache_dir=str(cache), **options)
    (got,) = Probe(runner).step({1: (0, TOKENS)})
    runner.close()
    return got


def files(cache: Path) -> list[Path]:
    return sorted((cache / packed_weights.FOLDER).glob("[!.]*/weights"))


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the tensors that are read of checkpoints."""
    names: list[str] = []
    read = hugging_face.HuggingFaceCheckpoint.read

    def noted(self: Any, name: str) -> Any:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(hugging_face.HuggingFaceCheckpoint, "read", noted)
    return names


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_later_start_reads_no_tensor_and_computes_the_same(options, model, cache, reads):
    want = logits(model, cache, packed_cache_gb=0.0, **options)
    assert not files(cache)
    assert torch.equal(logits(model, cache, **options), want)
    (file,) = files(cache)
    state = file.stat()
    reads.clear()
    for _ in range(2):
        assert torch.equal(logits(model, cache, **options), want)
    assert reads == []
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (state.st_ino, state.st_mtime_ns)


@pytest.mark.parametrize("form", ["fp8-tensor", "nf4"])
def test_codes_of_floats_stay_so_in_the_file(form, tmp_path, cache, reads):
    folder = tmp_path / form
    write_quantized(form, folder)
    want = logits(folder, cache, packed_cache_gb=0.0)
    assert torch.equal(logits(folder, cache), want)
    reads.clear()
    assert torch.equal(logits(folder, cache), want)
    # The choice of a form looks at scales and at what describes the codes.
    assert not [name for name in reads if name.endswith(".weight")]


def test_weights_of_float16_stay_so_in_the_file(tmp_path, cache, reads):
    folder = tmp_path / "half"
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = make_model(folder, "qwen3_moe", **experts)
    model.half().save_pretrained(folder)
    first = logits(folder, cache)
    reads.clear()
    assert torch.equal(logits(folder, cache), first)
    assert not reads


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8},  # norms with an offset
    "qwen2": {},  # biases
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 6,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_weight_is_kept(family, tmp_path, cache, reads):
    folder = tmp_path / "model"
    make_model(folder, family, **FAMILIES[family])
    want = logits(folder, cache, packed_cache_gb=0.0, dtype="bfloat16")
    assert torch.equal(logits(folder, cache, dtype="bfloat16"), want)
    assert files(cache)
    reads.clear()
    assert torch.equal(logits(folder, cache, dtype="bfloat16"), want)
    assert reads == []


def test_the_file_is_mapped_and_not_copied_where_processes_share(model, cache):
    logits(model, cache, share_weights=True)
    runner = open_runner(model, cache_dir=str(cache), share_weights=True)
    (file,) = files(cache)
    areas = Path("/proc/self/maps").read_text().splitlines()
    begin, end = next(
        (int(part, 16) for part in line.split()[0].split("-"))
        for line in areas
        if line.endswith(str(file))
    )
    weights = runner.decoder.model
    inside = [weights.embedding, weights.lm_head.panels, weights.final_norm.weight]
    mixers: list[Any] = [block.mixer for block in weights.blocks[1::2]]
    inside += [mixer.down.panels for mixer in mixers]
    assert all(begin <= tensor.data_ptr() < end for tensor in inside)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in inside)
    runner.close()


@pytest.mark.parametrize("large", [False, True])
def test_weights_are_copied_where_the_system_would_keep_them_on_small_pages(
    large, model, cache, monkeypatch
):
    monkeypatch.setattr(packed_weights, "on_large_pages", lambda *_: large)
    monkeypatch.setattr(packed_weights, "_memory_has_large_pages", lambda: True)
    want = logits(model, cache)
    runner = open_runner(model, cache_dir=str(cache))
    (file,) = files(cache)
    assert (str(file) in Path("/proc/self/maps").read_text()) is large
    (got,) = Probe(runner).step({1: (0, TOKENS)})
    assert torch.equal(got, want)
    runner.close()


def test_a_checkpoint_that_was_changed_is_packed_anew(model, cache):
    """Even one whose size and time of change are what they were."""
    before = logits(model, cache)
    path = model / "model.safetensors"
    state = path.stat()
    data = bytearray(path.read_bytes())
    data[-20_001] ^= 0x01  # a low bit of a weight's exponent or fraction
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (state.st_size, state.st_mtime_ns)
    after = logits(model, cache)
    assert not torch.equal(after, before)
    assert torch.equal(after, logits(model, cache, packed_cache_gb=0.0))
    assert len(files(cache)) == 2


def test_what_else_a_file_depends_on_makes_another(model, cache, monkeypatch):
    for options in KINDS.values():
        logits(model, cache, **options)
    assert len(files(cache)) == 4
    monkeypatch.setattr(packed_weights, "code_digest", lambda: "of a later version")
    logits(model, cache)
    assert len(files(cache)) == 5
    config = model / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    logits(model, cache)
    assert len(files(cache)) == 6


@pytest.mark.parametrize("share", [True, False])
def test_a_damaged_file_is_packed_anew(share, model, cache, caplog, monkeypatch):
    monkeypatch.setattr(packed_weights, "_memory_has_large_pages", lambda: True)
    monkeypatch.setattr(packed_weights, "on_large_pages", lambda *_: False)
    want = logits(model, cache)
    (file,) = files(cache)
    good = file.read_bytes()
    tensors = pack_file.PackFile(file, key_of(good)).tensors
    places = [0, 9, *(tensor.offset + tensor.nbytes // 2 for tensor in tensors[::9]), len(good) - 5]
    for place in places:
        data = bytearray(good)
        data[place] ^= 0x40
        file.write_bytes(data)
        caplog.clear()
        assert torch.equal(logits(model, cache, share_weights=share), want)
        assert "packed anew" in caplog.text
        assert file.read_bytes() == good
    for size in (0, 64, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:size])
        assert torch.equal(logits(model, cache, share_weights=share), want)
        assert file.read_bytes() == good


def key_of(data: bytes) -> str:
    text = data[data.rindex(b'{"key":"') :]
    return text[8 : text.index(b'"', 8)].decode()


LIES: dict[str, tuple[str, Any]] = {
    "rows": ("n", 1 << 20),
    "columns": ("k", 32),
    "negative": ("k", -1),
    "word": ("n", "many"),
    "kind": ("kind", "int4"),
    "unknown-kind": ("kind", "other"),
    "no-panels": ("panels", None),
    "tensor-that-is-not-there": ("panels", {"tensor": 9}),
    "tensor-of-another-shape": ("bias", {"tensor": 0}),
    "unknown-part": ("other", 1),
    "type": ("type", "experts"),
    "unknown-type": ("type", "other"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.sampled(4)
def test_a_file_that_lies_about_a_weight_is_packed_anew(lie, model, cache, monkeypatch, caplog):
    """One whose index is whole, and says what cannot be."""
    want = logits(model, cache)
    add = pack_file.PackWriter.add

    def lying(self: Any, name: str, entry: Any) -> None:
        if "down_proj" in name and not any("down_proj" in one for one in self._entries):
            what, value = lie
            inside = entry["value"] if what == "type" else entry["value"]["parts"]
            inside[what] = value
        add(self, name, entry)

    (file,) = files(cache)
    file.unlink()
    file.parent.rmdir()
    with monkeypatch.context() as patched:
        patched.setattr(pack_file.PackWriter, "add", lying)
        assert torch.equal(logits(model, cache), want)  # none can be had at this start
        assert "packed anew" in caplog.text
    assert torch.equal(logits(model, cache), want)
    caplog.clear()
    assert torch.equal(logits(model, cache), want)
    assert caplog.text == ""


def test_a_full_disk_costs_nothing_but_time(model, cache, monkeypatch, caplog):
    want = logits(model, cache, packed_cache_gb=0.0)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    assert torch.equal(logits(model, cache), want)
    assert "weights are packed at every start" in caplog.text
    assert "No space left on device" in caplog.text
    folders = [path for path in (cache / packed_weights.FOLDER).iterdir() if path.is_dir()]
    assert folders == []  # half a file least of all


def test_a_disk_that_is_nearly_full_is_left_alone(model, cache, monkeypatch, caplog):
    usage = shutil.disk_usage(cache)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    logits(model, cache)
    assert "0.0 GiB are free" in caplog.text
    assert not files(cache)


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(model, cache, caplog):
    (cache / packed_weights.FOLDER).write_text("a file")
    logits(model, cache)
    assert "weights are packed at every start" in caplog.text


def test_what_was_used_longest_ago_goes(model, cache, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    logits(model, cache)
    (first,) = files(cache)
    size = first.stat().st_size
    room = 2.5 * size / 2**30  # two files of float32
    logits(model, cache, context_length=64)  # of the same file
    others = []
    for seed in (1, 2):
        folder = tmp_path / f"other-{seed}"
        make_model(folder, "llama", tie_word_embeddings=True, seed=seed)
        others.append(folder)
    logits(others[0], cache, packed_cache_gb=room)
    (second,) = set(files(cache)) - {first}
    os.utime(first.parent, (1, 1))
    logits(model, cache, packed_cache_gb=room)  # used once more
    os.utime(second.parent, (2, 2))
    logits(others[1], cache, packed_cache_gb=room)
    left = files(cache)
    assert len(left) == 2
    assert first in left
    assert second not in left
    logits(others[0], cache, packed_cache_gb=0.5 * size / 2**30)
    assert "packed_cache_gb" in caplog.text
    assert files(cache) == left


def test_what_a_killed_process_left_goes_after_a_day(model, cache):
    left = cache / packed_weights.FOLDER / ".another-model.partial-x"
    left.mkdir(parents=True)
    (left / "weights").write_bytes(b"half")
    logits(model, cache)
    assert left.exists()  # it may be at work
    os.utime(left, (1, 1))
    logits(model, cache, quantization="int8")
    assert not left.exists()


def test_small_models_and_those_of_other_ops_have_no_file(model, cache, monkeypatch):
    logits(model, cache, cpu_kernels="torch")
    monkeypatch.setattr(packed_weights, "LEAST_WEIGHTS", 1 << 24)
    logits(model, cache)
    assert not files(cache)
