"""Files that hold anything: whatever is wrong with them, only a ModelError leaves the readers.

Bytes are changed at random, and values in every way of `damage.WRONG`.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import struct

import pytest
from gguf import GGMLQuantizationType as Kind

from runtime.checkpoints import gguf_split
from runtime.checkpoints.gguf_checkpoint import GgufCheckpoint
from runtime.checkpoints.gguf_file import GgufFile
from runtime.checkpoints.gguf_tokenizer import build_tokenizer, write_tokenizer
from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.checkpoints.safetensors_file import SafetensorsFile
from tests.effort import tries
from tests.runtime.checkpoints.damage import MISSING, WRONG, outcome
from tests.runtime.checkpoints.tiny_models import make_llama, write_folder, write_gguf
from tests.runtime.models.read_model import read_model
from tests.values import present


def gguf_value(value) -> bytes | None:
    """A value with its type, in the smallest form that holds it; None where GGUF has none."""

    def typed(item) -> tuple[int, bytes] | None:
        if type(item) is bool:
            return 7, bytes([item])
        if type(item) is int:
            for number, code in ((4, "I"), (10, "Q"), (11, "q")):
                low, high = (
                    (-(2**63), 2**63) if code == "q" else (0, 2 ** (8 * struct.calcsize(code)))
                )
                if low <= item < high:
                    return number, struct.pack("<" + code, item)
        if type(item) is float:
            return 12, struct.pack("<d", item)
        if type(item) is str:
            return 8, struct.pack("<Q", len(item.encode())) + item.encode()
        return None

    if not isinstance(value, list):
        found = typed(value)
        return None if found is None else struct.pack("<I", found[0]) + found[1]
    items = [item for item in map(typed, value) if item is not None]
    if len(items) < len(value) or len({item[0] for item in items}) > 1:
        return None
    kind = items[0][0] if items else 4
    return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(item[1] for item in items)


class Gguf:
    """The parts of a file, to be put together again with other metadata."""

    def __init__(self, path) -> None:
        file = GgufFile(path)
        self.metadata = file.metadata
        data = path.read_bytes()
        # The descriptions of the tensors begin with the first one's name.
        name = file.tensors[0].name.encode()
        self.count = len(file.tensors)
        begin = data.index(struct.pack("<Q", len(name)) + name)
        last = file.tensors[-1].name.encode()
        end = data.index(struct.pack("<Q", len(last)) + last) + 8 + len(last)
        end += 4 + 8 * len(file.tensors[-1].shape) + 4 + 8
        self.heads = data[begin:end]
        self.tensors = data[math.ceil(end / 32) * 32 :]

    def write(self, path, metadata) -> bool:
        """False where a value cannot be written."""
        parts = []
        for key, value in metadata.items():
            typed = gguf_value(value)
            if typed is None:
                return False
            parts.append(struct.pack("<Q", len(key)) + key.encode() + typed)
        head = b"GGUF" + struct.pack("<IQQ", 3, self.count, len(parts))
        head += b"".join(parts) + self.heads
        alignment = metadata.get("general.alignment", 32)
        alignment = alignment if type(alignment) is int and 0 < alignment < 4096 else 32
        path.write_bytes(head + b"\0" * (-len(head) % alignment) + self.tensors)
        return True


def read_all_of_a_gguf(path, folder):
    checkpoint = GgufCheckpoint(path)
    for name in checkpoint.tensors:
        checkpoint.read(name)
    folder.mkdir(exist_ok=True)
    write_tokenizer(checkpoint, folder)
    read_model(checkpoint.config)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    return Gguf(write_gguf(make_llama(), tmp_path_factory.mktemp("gguf") / "m.gguf", Kind.F16))


MORE_KEYS = {
    "general.alignment": 32,
    "split.count": 1,
    "llama.attention.key_length": 16,
    "llama.attention.sliding_window": 64,
    "llama.rope.dimension_count": 16,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 2.0,
    "llama.rope.scaling.original_context_length": 128,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.eot_token_id": 0,
    "tokenizer.ggml.eom_token_id": 0,
    "tokenizer.ggml.add_eos_token": True,
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.ggml.scores": [0.0] * 262,
}


def test_gguf_metadata_of_any_kind(gguf, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    base = {**gguf.metadata, **MORE_KEYS}
    gguf.write(path, base)
    assert outcome(lambda: read_all_of_a_gguf(path, tmp_path / "out")) is None
    file = GgufFile(path)
    monkeypatch.setattr(gguf_split, "GgufFile", lambda path: file)  # it is read once only

    def read():
        checkpoint = GgufCheckpoint(path)
        for name in checkpoint.tensors:
            checkpoint.read(name)
        build_tokenizer(checkpoint.metadata)
        read_model(checkpoint.config)

    refused = 0
    for model, key, value in itertools.product(("gpt2", "llama"), base, WRONG):
        if model == "llama" and not key.startswith("tokenizer."):
            continue
        file.metadata = {**base, "tokenizer.ggml.model": model, key: value}
        if value is MISSING:
            del file.metadata[key]
        message = outcome(read)
        refused += message is not None
        # The launcher puts the file's name before what is said of its config.
        assert message is None or message.startswith((str(path), "config.json: "))
    assert refused > 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"llama.attention.head_count": 0}, "head_count is 0; it must", id="heads-0"),
        pytest.param({"llama.attention.head_count": 7}, "do not make 7 heads", id="heads-7"),
        pytest.param({"llama.attention.head_count_kv": 3}, "do not make 3 heads", id="kv-heads"),
        pytest.param({"llama.block_count": 2**31 - 1}, "tensors of 2 layers", id="layers"),
        pytest.param({"tokenizer.ggml.eos_token_id": 2**32 - 1}, "from 0 to 261", id="end-id"),
        pytest.param({"tokenizer.ggml.token_type": [1] * 9}, "list of 262 numbers", id="types"),
        pytest.param({"tokenizer.ggml.merges": ["a"]}, "merge 'a': must be two", id="merge-of-one"),
        pytest.param({"tokenizer.ggml.merges": ["a b c"]}, "must be two tokens", id="merge-of-3"),
        pytest.param({"tokenizer.ggml.merges": ["é é"]}, "cannot be built", id="unknown-merge"),
        pytest.param({"tokenizer.chat_template": 5}, "must be a text", id="template"),
        pytest.param({"general.architecture": 5}, "must be a text", id="architecture"),
        pytest.param({"general.alignment": 24}, "no power of two", id="alignment"),
    ],
)
def test_damaged_gguf_metadata_is_named(gguf, tmp_path, change, message):
    path = tmp_path / "model.gguf"
    gguf.write(path, {**gguf.metadata, **change})
    said = outcome(lambda: read_all_of_a_gguf(path, tmp_path / "out"))
    assert said is not None
    assert message in said


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param((64, 0, 1, 0), "is empty", id="zero-dimension"),
        pytest.param((64, 262, 999, 0), "of unknown type 999", id="type"),
        pytest.param((64, 262, 1, 2**64 - 32), "ends beyond the file's", id="offset-before-zero"),
        pytest.param((2**40, 2**40, 1, 0), "ends beyond the file's", id="huge"),
        pytest.param((63, 262, 8, 0), "no multiple of 32", id="rows-of-blocks"),
    ],
)
def test_damaged_descriptions_of_tensors_are_named(gguf, tmp_path, values, message):
    path = tmp_path / "model.gguf"
    inner, outer, kind, offset = values
    name = b"token_embd.weight"
    at = gguf.heads.index(name) + len(name) + 4
    gguf_heads = gguf.heads
    try:
        new = struct.pack("<QQIQ", inner, outer, kind, offset)
        gguf.heads = gguf_heads[:at] + new + gguf_heads[at + len(new) :]
        gguf.write(path, gguf.metadata)
    finally:
        gguf.heads = gguf_heads
    said = outcome(lambda: GgufCheckpoint(path))
    assert said is not None
    assert "token_embd.weight" in said
    assert message in said


def test_gguf_bytes_changed_at_random(gguf, tmp_path):
    path = tmp_path / "model.gguf"
    gguf.write(path, gguf.metadata)
    whole = path.read_bytes()
    header = len(whole) - len(gguf.tensors)
    draw = random.Random(5)
    said: list[str | None] = []
    for _ in range(tries(300)):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(header)] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
        path.write_bytes(data[: draw.choice((len(data), len(data), draw.randrange(len(data))))])
        said.append(outcome(lambda: read_all_of_a_gguf(path, tmp_path / "out")))
    # Some changes do no harm; of the others each is told in words of its own.
    assert 0 < said.count(None) < tries(300) / 3
    assert len(set(said)) > tries(300) / 3


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": ["F32"], "shape": [3], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 1e999]},
        {"dtype": "F32", "shape": [3.0], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [-3], "data_offsets": [12, 0]},
        {"dtype": "F32", "shape": [True, 3], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": 3, "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 6, 12]},
        {"dtype": "F32", "shape": "333", "data_offsets": "012"},
        {"dtype": "F32", "shape": [2**63, 2**63], "data_offsets": [0, 2**128]},
        {"dtype": "F32"},
        None,
        "F32",
        [],
    ],
    ids=str,
)
def test_safetensors_entries_of_any_kind(tmp_path, entry):
    path = tmp_path / "model.safetensors"

    def said_of(entry) -> str | None:
        header = json.dumps({"a": entry}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
        return outcome(lambda: SafetensorsFile(path).read("a"))

    assert said_of({"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}) is None
    assert "tensor 'a'" in present(said_of(entry))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 10_000,
        '{"a": "\ud800"}',
        "\0",
    ],
    ids=["empty", "list", "null", "cut", "deep-list", "deep", "long-number", "surrogate", "nul"],
)
def test_texts_that_are_no_objects(tmp_path, name, text):
    write_folder(make_llama(), tmp_path)
    data = text.encode("utf-8", "surrogatepass")
    if name == "model.safetensors":
        data = len(data).to_bytes(8, "little") + data
    (tmp_path / name).write_bytes(data)
    said = outcome(lambda: open_checkpoint(tmp_path))
    if said is None:  # an object in which nothing is asked for is none of ours to refuse
        assert text.startswith('{"a": "')
    else:
        assert name in said
