"""Tokenizer files that hold anything give a tokenizer, or one sentence that names the file."""

from __future__ import annotations

import json

import pytest

from server.text.tokenizer import Tokenizer
from tests.effort import some
from tests.fakes import byte_tokenizer
from tests.runtime.checkpoints.damage import MISSING, WRONG, outcome

TOKEN = {"content": "<a>", "lstrip": False, "rstrip": False, "single_word": False}
TOKEN |= {"normalized": False, "special": True}
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "added_tokens_decoder": {"258": TOKEN},
    "bos_token": "<|im_start|>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
    "additional_special_tokens": ["<a>"],
    "extra_special_tokens": {"image_token": "<a>"},
    "split_special_tokens": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 512,
    "add_bos_token": False,
}


@pytest.fixture
def folder(tmp_path):
    backend = byte_tokenizer(more=("<a>",)).backend
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def load(folder):
    Tokenizer.load(folder).close()


def changes(content: dict, wrong=WRONG):
    """The content with one key of it, or of an object in it, of every wrong kind in turn."""
    for place in (content, *(v for v in content.values() if isinstance(v, dict))):
        for key, kept in list(place.items()):
            for value in wrong:
                if value is MISSING:
                    del place[key]
                else:
                    place[key] = value
                yield content
                place[key] = kept


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", CONFIG),
        ("special_tokens_map.json", {"eos_token": TOKEN, "additional_special_tokens": ["<a>"]}),
        ("added_tokens.json", {"<a>": 258}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_key_may_hold_anything(folder, name, content):
    for changed in some(changes(content)):
        (folder / name).write_text(json.dumps(changed))
        said = outcome(lambda: load(folder))
        assert said is None or str(folder) in said


def test_each_part_of_tokenizer_json_may_hold_anything(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    refused = 0
    for changed in changes(content, WRONG[::3]):
        path.write_text(json.dumps(changed))
        said = outcome(lambda: load(folder))
        refused += said is not None
        assert said is None or str(path) in said or str(folder) in said
    assert refused > 50


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"],
)
@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"\0" * 9],
    ids=["empty", "list", "cut", "not-utf-8", "deep-list", "deep", "zeros"],
)
def test_files_that_are_no_objects_are_named(folder, name, data):
    (folder / name).write_bytes(data)
    assert name in (outcome(lambda: load(folder)) or "")
