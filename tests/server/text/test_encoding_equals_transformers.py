"""Ids of texts, against transformers' AutoTokenizer reading the same folder.

Small tokenizers of every kind are trained here; each folder names added tokens with every flag, in
every place where model folders name them.
"""

from __future__ import annotations

import itertools
import json
import random

import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

from server.text.tokenizer import Tokenizer

CORPUS = [
    "the river runs through the valley and the rain falls on the river",
    "Rivers, valleys; it's raining! 12 34 567 naïve façade 世界 🙂 don't",
    "def run(x):\n    return x + 1\n\n\tprint(run(12))  # twice",
] * 4
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
PIECES = [
    "the",
    "river",
    "Rain",
    " ",
    "  ",
    "\n",
    "\t",
    ",",
    "12",
    "é",
    "世",
    "🙂",
    "x",
    "don't",
    "▁",
]


def added(name: str, **flags: bool) -> AddedToken:
    return AddedToken(name, **{**dict.fromkeys(FLAGS, False), **flags})


# One token for each combination of the flags; some with letters at their ends, for single_word.
ADDED = [
    added(f"<t{i}>" if i % 2 else f"tok{i}", **dict(zip(FLAGS, values, strict=True)))
    for i, values in enumerate(itertools.product((False, True), repeat=len(FLAGS)))
]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, special_tokens=special)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2's: SentencePiece as BPE, with bytes for what has no token."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(CORPUS[:1] * 9, trainers.BpeTrainer(vocab_size=90))
    state = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *state["vocab"]]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(merge) for merge in state["merges"]]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return with_bos(backend)


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    return with_bos(backend)


def word_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special)
    )
    return with_bos(backend)


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
    )
    return backend


KINDS = [byte_level, byte_fallback, unigram, word_piece]


def in_the_file(backend, folder, config):
    backend.add_tokens(ADDED)
    backend.save(str(folder / "tokenizer.json"))


def in_the_decoder(backend, folder, config):
    backend.save(str(folder / "tokenizer.json"))
    start = backend.get_vocab_size()
    keys = ("content", *FLAGS)
    config["added_tokens_decoder"] = {
        str(start + i): {key: getattr(token, key) for key in keys} for i, token in enumerate(ADDED)
    }


def in_the_decoder_with_other_flags(backend, folder, config):
    in_the_decoder(backend, folder, config)
    backend.add_tokens([added(token.content, lstrip=not token.lstrip) for token in ADDED])
    backend.save(str(folder / "tokenizer.json"))


def in_added_tokens_json(backend, folder, config):
    backend.save(str(folder / "tokenizer.json"))
    names = {token.content: backend.get_vocab_size() + i for i, token in enumerate(ADDED)}
    (folder / "added_tokens.json").write_text(json.dumps(names))
    # Those that are named as special too are special.
    config["additional_special_tokens"] = ["<t1>", "<t3>"]


def in_the_special_tokens_map(backend, folder, config):
    backend.save(str(folder / "tokenizer.json"))
    entry = {"content": "<t5>", "lstrip": True, "rstrip": False, "normalized": False}
    names = {
        "pad_token": {**entry, "single_word": False},
        "additional_special_tokens": ["tok2", "<t7>"],
        "cls_token": "the",
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(names))


def in_the_config(backend, folder, config):
    backend.save(str(folder / "tokenizer.json"))
    config["eos_token"] = "<t1>"
    config["pad_token"] = {"__type": "AddedToken", "content": "<t9>", "rstrip": True}
    config["image_token"] = "<t11>"
    config["additional_special_tokens"] = ["tok4", {"__type": "AddedToken", "content": "<t13>"}]


def in_no_place(backend, folder, config):
    backend.save(str(folder / "tokenizer.json"))


PLACES = [
    in_the_file,
    in_the_decoder,
    in_the_decoder_with_other_flags,
    in_added_tokens_json,
    in_the_special_tokens_map,
    in_the_config,
    in_no_place,
]


def write_folder(folder, backend, place=in_the_file, model_type="llama", **config):
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **config}
    place(backend, folder, settings)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def texts(count: int, seed: int = 3) -> list[str]:
    draw = random.Random(seed)
    pieces = PIECES + [token.content for token in ADDED] + ["<s>", "</s>", "<unk>"]
    return ["".join(draw.choices(pieces, k=draw.randrange(30))) for _ in range(count)]


def assert_equal(folder):
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in texts(300):
        for special in (True, False):
            wanted = theirs(text, add_special_tokens=special).input_ids
            assert ours.encode(text, add_special_tokens=special) == wanted, (text, special)
        assert ours.decode(wanted, skip_special_tokens=False) == theirs.decode(wanted), text
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.sampled(6)
def test_encoding_equals_transformers(tmp_path, make, place):
    assert_equal(write_folder(tmp_path, make(), place))


@pytest.mark.parametrize(
    ("make", "model_type", "settings"),
    [
        pytest.param(byte_fallback, "llama", {"tokenizer_class": "LlamaTokenizer"}, id="llama"),
        pytest.param(
            byte_fallback,
            "mistral",
            {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, "add_prefix_space": True},
            id="mistral-legacy",
        ),
        pytest.param(byte_fallback, "phi3", {"tokenizer_class": "LlamaTokenizer"}, id="phi3"),
        pytest.param(byte_fallback, "gemma2", {"tokenizer_class": "GemmaTokenizer"}, id="gemma"),
        pytest.param(byte_level, "qwen2", {"tokenizer_class": "Qwen2Tokenizer"}, id="qwen"),
        pytest.param(byte_level, "llama", {"tokenizer_class": "LlamaTokenizer"}, id="llama3"),
        pytest.param(byte_level, "granite", {"tokenizer_class": "GPT2Tokenizer"}, id="granite"),
        pytest.param(byte_level, "llama", {"split_special_tokens": True}, id="split-specials"),
        pytest.param(byte_level, "llama", {"add_bos_token": True, "bos_token": "<s>"}, id="bos"),
    ],
)
@pytest.mark.sampled(3)
def test_declared_classes_are_followed(tmp_path, make, model_type, settings):
    assert_equal(write_folder(tmp_path, make(), in_the_file, model_type, **settings))


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_what_training_left_in_the_file_neither_cuts_nor_pads_nor_varies_prompts(tmp_path, make):
    backend = make()
    backend.add_tokens(ADDED)
    clean = tokenizers.Tokenizer.from_str(backend.to_str())
    backend.enable_truncation(8, stride=2)
    backend.enable_padding(length=16, pad_id=1, pad_token="</s>")
    if hasattr(backend.model, "dropout"):
        backend.model.dropout = 0.5
    write_folder(tmp_path, backend, in_no_place)
    ours = Tokenizer.load(tmp_path)
    long, short = " the river" * 100, "x"
    for text in (long, short):
        assert ours.encode(text) == clean.encode(text).ids
