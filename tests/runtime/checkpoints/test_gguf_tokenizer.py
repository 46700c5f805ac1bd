"""The tokenizer of a GGUF file splits text by the rule that the file names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from transformers import AutoTokenizer

from runtime.checkpoints import gguf_checkpoint, gguf_split
from runtime.checkpoints.gguf_checkpoint import GgufCheckpoint
from runtime.checkpoints.gguf_file import GgufFile
from runtime.checkpoints.gguf_metadata import GgufMetadata
from runtime.checkpoints.gguf_tokenizer import build_tokenizer, write_tokenizer
from runtime.checkpoints.model_folder import model_folder
from runtime.errors import ModelError
from tests.runtime.checkpoints.tiny_models import (
    MERGES,
    SPECIAL,
    TEMPLATE,
    TOKENS,
    make_llama,
    write_gguf,
)

FILE = Path("model.gguf")
ADD_BOS, BOS, EOS = (
    f"tokenizer.ggml.{key}" for key in ("add_bos_token", "bos_token_id", "eos_token_id")
)


def byte_level(rule: str, **more):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in TOKENS],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": TOKENS.index("<|start|>"),
    }
    return build_tokenizer(GgufMetadata(FILE, {**metadata, **more}))


WORDS = "HelloWorld's don'T ABc 12345 a1"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # As the patterns of the models' own tokenizer.json files split it.
        ("tekken", "Hello|World|'s|Ġdon|'T|ĠABc|Ġ|1|2|3|4|5|Ġa|1"),
        ("gpt-4o", "Hello|World's|Ġdon'T|ĠABc|Ġ|123|45|Ġa|1"),
        ("dbrx", "HelloWorld|'s|Ġdon|'T|ĠABc|Ġ|123|45|Ġa|1"),
        ("glm4", "HelloWorld|'s|Ġdon|'T|ĠABc|Ġ|123|45|Ġa|1"),
        ("deepseek-r1-qwen", "HelloWorld|'s|Ġdon|'T|ĠABc|Ġ|1|2|3|4|5|Ġa|1"),
        ("olmo", "HelloWorld|'s|Ġdon|'|T|ĠABc|Ġ12345|Ġa|1"),
        ("refact", "HelloWorld|'s|Ġdon|'|T|ĠABc|Ġ|1|2|3|4|5|Ġa|1"),
        ("command-r", "HelloWorld|'s|Ġdon|'|T|ĠABc|Ġ|1|2|3|4|5|Ġa|1"),
        ("deepseek-v3", "HelloWorld|'s|Ġdon|'T|ĠABc|Ġ|123|45|Ġa|1"),
        ("deepseek-llm", "HelloWorld|'|s|Ġdon|'|T|ĠABc|Ġ|12345|Ġa|1"),
        ("deepseek-coder", "HelloWorld|'|s|Ġdon|'|T|ĠABc|Ġ|1|2|3|4|5|Ġa|1"),
    ],
)
def test_words_are_split_by_the_rule(rule: str, expected: str) -> None:
    split = byte_level(rule).pre_tokenizer.pre_tokenize_str(WORDS)
    assert [piece for piece, _ in split] == expected.split("|")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("deepseek-v3", ["x", ".foo", " ", "世界ひら", "!\n\n", " ", " y"]),
        ("deepseek-llm", ["x", ".", "foo", " ", "世界ひら", "!", "\n", "\n", " ", " y"]),
    ],
)
def test_deepseek_cuts_chinese_and_signs(rule: str, expected: list[str]) -> None:
    text = "x.foo 世界ひら!\n\n  y"
    split = byte_level(rule).pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in split] == expected


def pieces(tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text).tokens


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        # Digits stand alone first, so the blanks before them are a run of their own.
        pytest.param("smollm", "a\n\n12", ["a", "ĊĊ", "1", "2"], id="smollm-newlines"),
        pytest.param("smollm", "a  1", ["a", "ĠĠ", "1"], id="smollm-blanks"),
        # GPT-2's rule leaves the last blank to what follows, and keeps digits together.
        pytest.param("gpt-2", "a\n\n12", ["a", "Ċ", "Ċ", "12"], id="gpt2-newlines"),
        pytest.param("gpt-2", "a  1", ["a", "Ġ", "Ġ", "1"], id="gpt2-blanks"),
        # Llama 3 keeps up to three digits together, Qwen 2 none; both keep line ends together.
        pytest.param("llama-bpe", "a\n\n12", ["a", "ĊĊ", "12"], id="llama3-newlines"),
        pytest.param("llama-bpe", "9912", ["9", "9", "1", "2"], id="llama3-digits"),
        pytest.param("qwen2", "a\n\n12", ["a", "ĊĊ", "1", "2"], id="qwen2-newlines"),
    ],
)
def test_text_is_split_by_the_named_rule(rule, text, expected):
    assert pieces(byte_level(rule, **{ADD_BOS: False}), text) == expected


@pytest.mark.parametrize("rule", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_decoding_gives_the_text_back(rule):
    tokenizer = byte_level(rule)
    for text in ("hi  there\n\n12", " leading", "héllo 世界 🙂", "\t tab\r\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_are_found_in_text_and_skipped_when_decoding():
    tokenizer = byte_level("smollm")
    encoding = tokenizer.encode("hi<|end|>hi")
    assert encoding.tokens == ["hi", "<|end|>", "hi"]
    assert tokenizer.decode(encoding.ids) == "hihi"
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == "hi<|end|>hi"


@pytest.mark.parametrize(
    ("rule", "default"),
    [("smollm", False), ("gpt-2", False), ("qwen2", False), ("llama-bpe", True), ("llama3", True)],
)
def test_begin_token_is_added_as_the_file_says_or_else_as_its_rule_does(rule, default):
    """The rules' defaults are llama.cpp's."""
    assert pieces(byte_level(rule), "hi") == ["<|start|>"] * default + ["hi"]
    assert pieces(byte_level(rule, **{ADD_BOS: True}), "hi") == ["<|start|>", "hi"]
    assert pieces(byte_level(rule, **{ADD_BOS: False}), "hi") == ["hi"]
    assert pieces(byte_level(rule, **{BOS: None}), "hi") == ["hi"]  # there is none to add


def test_end_token_is_added_where_the_file_says_so():
    more = {"tokenizer.ggml.add_eos_token": True, EOS: TOKENS.index("<|end|>")}
    assert pieces(byte_level("smollm", **more), "hi") == ["hi", "<|end|>"]
    assert pieces(byte_level("llama-bpe", **more), "hi") == ["<|start|>", "hi", "<|end|>"]


def test_texts_are_composed_where_the_models_own_tokenizer_does_so():
    assert pieces(byte_level("qwen2"), "e\u0301") == pieces(byte_level("qwen2"), "é")
    assert pieces(byte_level("smollm"), "e\u0301") != pieces(byte_level("smollm"), "é")


def test_an_unknown_splitting_rule_is_refused():
    with pytest.raises(ModelError, match=r"rule 'mystery': must be one of smollm, refact,"):
        byte_level("mystery")


def sentence_piece(**more):
    """Scores are ranks, as SentencePiece's BPE gives them: the larger is merged first."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    merged = ["▁a", "ab", "▁ab", "▁abc", "bc"]
    tokens += [*merged, "▁", "a", "b", "c"]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
    }
    return build_tokenizer(GgufMetadata(FILE, {**metadata, **more}))


def test_sentencepiece_merges_by_score():
    # "▁abc": ▁+a (best score) gives ▁a, then ▁a+b, then ▁ab+c; "abc" inside a word: a+b first.
    assert pieces(sentence_piece(), "abc") == ["<s>", "▁abc"]
    assert pieces(sentence_piece(), "cabc") == ["<s>", "▁", "c", "ab", "c"]


def test_sentencepiece_falls_back_to_bytes_and_decodes_to_the_text():
    tokenizer = sentence_piece(**{"tokenizer.ggml.add_bos_token": False})
    assert pieces(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("abc ab", "é 世", "a  b"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_models_have_the_usual_ids_where_the_file_names_none():
    assert pieces(sentence_piece(**{BOS: None}), "bc") == ["<s>", "▁", "bc"]


def test_sentencepiece_prefix_blank_can_be_off():
    tokenizer = sentence_piece(**{"tokenizer.ggml.add_space_prefix": False})
    assert pieces(tokenizer, "bc") == ["<s>", "bc"]
    assert tokenizer.decode(tokenizer.encode(" bc").ids) == " bc"


def test_files_are_written_once_and_read_by_transformers(tmp_path):
    file = write_gguf(make_llama(), tmp_path / "model.gguf", Kind.F16)
    messages: list[str] = []
    folder = model_folder(file, tmp_path / "cache", messages.append)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert tokenizer("hi\n\n12").input_ids == [TOKENS.index(t) for t in ("hi", "ĊĊ", "1", "2")]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    assert tokenizer.pad_token == "<|end|>"
    assert tokenizer.model_max_length == 256
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|start|>hi<|end|>"
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == TEMPLATE, "where older tools look for it"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == TOKENS.index("<|end|>")
    assert messages == ["reading the tokenizer of model.gguf"]
    assert model_folder(file, tmp_path / "cache", messages.append) == folder
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("named", "last", "ends"),
    [
        pytest.param({"eos": 0}, ["<|x|>", "<|eot_id|>"], [0, 263], id="llama-3"),
        pytest.param({"eos": 0}, ["<|im_end|>", "<|endoftext|>"], [0, 262, 263], id="chatml"),
        pytest.param({"eos": 262, "eot": 263}, ["<|im_end|>", "<|y|>"], [262, 263], id="eot-key"),
        pytest.param({"eom": 1}, ["<|x|>", "<|y|>"], [1], id="eom-key-only"),
        pytest.param({}, ["<|x|>", "<|y|>"], None, id="none"),
        pytest.param({"eos": 262}, ["<|return|>", "<|call|>", "<|end|>"], [262, 263], id="gpt-oss"),
    ],
)
def test_a_generation_ends_by_the_named_ids_and_by_known_ends_of_turns(
    tmp_path, monkeypatch, named, last, ends
):
    file = write_gguf(make_llama(), tmp_path / "model.gguf", Kind.F16)
    read = GgufFile(file)
    for name in ("eos", "eot", "eom"):
        read.metadata.pop(f"tokenizer.ggml.{name}_token_id", None)
    read.metadata |= {f"tokenizer.ggml.{name}_token_id": i for name, i in named.items()}
    read.metadata["tokenizer.ggml.tokens"] = [*TOKENS[:260], "<|a|>", "<|b|>", *last]
    monkeypatch.setattr(gguf_split, "GgufFile", lambda path: read)
    found = gguf_checkpoint.GgufCheckpoint(file).generation_config.get("eos_token_id")
    assert found == (ends[0] if ends is not None and len(ends) == 1 else ends)


def test_a_file_may_have_several_chat_templates(tmp_path):
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    file = write_gguf(make_llama(), tmp_path / "model.gguf", Kind.F16, template=templates)
    tokenizer = AutoTokenizer.from_pretrained(model_folder(file, tmp_path, lambda message: None))
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "D"
    assert tokenizer.apply_chat_template(chat, tools=[{}], tokenize=False) == "T"


def test_a_folder_is_its_own_model_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(tmp_path, tmp_path / "cache", print) == tmp_path


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"]
)
def test_a_full_disk_is_the_system_s_own_error(tmp_path, name):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("the system has no device that is always full")
    checkpoint = GgufCheckpoint(write_gguf(make_llama(), tmp_path / "m.gguf", Kind.F16))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(full)
    with pytest.raises(OSError, match="No space left"):
        write_tokenizer(checkpoint, tmp_path / "out")
