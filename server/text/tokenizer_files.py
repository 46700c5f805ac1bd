"""What the files of a model folder say about its tokenizer.

`tokenizer.json` alone is read by the `tokenizers` library in milliseconds. Where the other files
add to it (added tokens that only they name) or a class is declared that builds another tokenizer
from its vocabulary, transformers puts the parts together: exactly what models were published
with, at the price of a second for its import.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import tokenizers

from runtime.checkpoints.json_file import read_optional_json_object
from runtime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# Classes that take tokenizer.json as it is; others rebuild what it says in their own way.
_PLAIN_CLASSES = ("", "PreTrainedTokenizer", "TokenizersBackend")
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# What files with a vocabulary are called, whatever the tokenizer's class.
_VOCABULARIES = ("tokenizer.json", "tekken.json", "*vocab*", "*.model", "*.tiktoken")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def load_backend(
    folder: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The library's tokenizer, and the texts of its special tokens by name (bos_token, ...).

    Args: config: of tokenizer_config.json.
    Raises: ModelError: there is no tokenizer, or one that cannot be read.
    """
    names = read_optional_json_object(folder / "special_tokens_map.json")
    named = {**names, **config}
    path = folder / "tokenizer.json"
    backend = _from_file(path) if path.is_file() else None
    if backend is not None and _is_plain(config) and _has_all(backend, folder, config, names):
        special = {name: text for name in _NAMES if (text := _text_of(named.get(name)))}
    else:
        backend, special = _by_transformers(folder, config)
    # Left from training, where texts were cut and padded to one length and split at random.
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None
    return backend, special


def _from_file(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: cannot be read: {error}") from None


def _is_plain(config: Mapping[str, Any]) -> bool:
    declared = config.get("tokenizer_class") or ""
    plain = isinstance(declared, str) and declared.removesuffix("Fast") in _PLAIN_CLASSES
    return plain and not config.get("split_special_tokens")


def _has_all(
    backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], names: Mapping[str, Any]
) -> bool:
    """Whether every token that the other files name is an added token of tokenizer.json."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder")
    for entry in decoder.values() if isinstance(decoder, dict) else ():
        token = known.get(_text_of(entry) or "")
        if token is None or any(getattr(token, flag) != entry.get(flag) for flag in _FLAGS):
            return False
    named = {*_named(config), *_named(names)}
    return named.union(read_optional_json_object(folder / "added_tokens.json")) <= known.keys()


def _named(settings: Mapping[str, Any]) -> Iterator[str]:
    """Texts of the tokens that settings name: bos_token, image_token, extra_special_tokens, ..."""
    for key, value in settings.items():
        values = [value] if key.endswith("_token") else []
        if key in ("additional_special_tokens", "extra_special_tokens"):
            values = list(value.values()) if isinstance(value, dict) else value
            values = values if isinstance(values, list) else []
        for one in values:
            if text := _text_of(one):
                yield text


def _text_of(token: Any) -> str | None:
    """The text of a token that is written as such, or as an object of text and flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _by_transformers(
    folder: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    if not any(path.is_file() for name in _VOCABULARIES for path in folder.glob(name)):
        # Of some classes transformers would make an empty tokenizer without a word.
        raise ModelError(
            f"{folder}: has no tokenizer.json, and no other file of a tokenizer (vocab.json,"
            " tokenizer.model, ...)"
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        # A file without a declared class is read as it is, not as the model's type suggests.
        if _is_plain(config) and (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
        loaded = Loader.from_pretrained(str(folder), trust_remote_code=False)
        backend = loaded.backend_tokenizer
    except Exception as error:  # whatever its many readers raise
        missing = "" if (folder / "tokenizer.json").is_file() else " (there is no tokenizer.json)"
        raise ModelError(
            f"{folder}: holds no tokenizer that can be read{missing}: {_first_line(error)}"
        ) from None
    special = {name: str(text) for name in _NAMES if (text := getattr(loaded, name, None))}
    return backend, special


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
