"""The tokenizer that a GGUF file describes, in Hugging Face's form.

GGUF names the tokenizer's model ("gpt2" for byte-level BPE, "llama" for SentencePiece) and, for
byte-level BPE, the rule by which text is split before merging (`tokenizer.ggml.pre`). That rule
decides ids ("a\\n\\n12" under plain byte-level BPE is not what SmolLM was trained on), so an
unknown one is an error, never a guess.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers import pre_tokenizers as pre
from tokenizers.models import BPE

from runtime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from runtime.checkpoints.gguf_checkpoint import GgufCheckpoint

# Token types of tokenizer.ggml.token_type.
_CONTROL = 3
_USER_DEFINED = 4

# Splitting rules as their models' own tokenizer.json files publish them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _regex(pattern: str) -> Any:
    return pre.Sequence(
        [
            pre.Split(Regex(pattern), "isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _digits() -> Any:
    return pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": _digits,
    "gpt-2": lambda: pre.ByteLevel(add_prefix_space=False, use_regex=True),
    "llama-bpe": lambda: _regex(_LLAMA3),
    "llama3": lambda: _regex(_LLAMA3),
    "qwen2": lambda: _regex(_QWEN2),
}


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata.

    Args: path: the file, for messages.
    Raises: ModelError: no tokenizer in the file, or of a kind that is not known here.
    """
    kind, tokens = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "tokens"))
    if not tokens:
        raise ModelError(f"{path}: has no tokenizer")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, path)
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata)
    else:
        raise ModelError(f"{path}: tokenizer {kind!r}: must be gpt2 or llama")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            special = token_type == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    if _adds_bos(metadata):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]} $B",
            special_tokens=[(tokens[bos], bos)],
        )
    return tokenizer


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Llama's SentencePiece models begin with BOS unless the file says otherwise."""
    default = metadata["tokenizer.ggml.model"] == "llama"
    wanted = metadata.get("tokenizer.ggml.add_bos_token", default)
    return bool(wanted) and "tokenizer.ggml.bos_token_id" in metadata


def _byte_level(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    rule = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if rule not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(f"{path}: text splitting rule {rule!r}: must be one of {known}")
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges") or []]
    ignore_merges = rule in ("llama-bpe", "llama3")  # whole words of the vocabulary come first
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece BPE: the merges are the ways to join two pieces, best score first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    merges.sort(key=lambda merge: merge[:3])
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    pairs = [merge[3:] for merge in merges]
    tokenizer = Tokenizer(BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def write_tokenizer(checkpoint: GgufCheckpoint, folder: Path) -> None:
    """Puts config.json, generation_config.json, tokenizer.json, tokenizer_config.json and, where
    the file has one, chat_template.jinja into `folder`. Raises: ModelError: see above."""
    metadata = checkpoint.metadata
    build_tokenizer(metadata, checkpoint.path).save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(metadata),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            settings[f"{name}_token"] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    if template:
        settings["chat_template"] = template
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "config.json", checkpoint.config)
    _write_json(folder / "generation_config.json", checkpoint.generation_config)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
