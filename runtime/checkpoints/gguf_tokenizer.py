"""The tokenizer that a GGUF file describes, in Hugging Face's form.

GGUF names the tokenizer's model ("gpt2" for byte-level BPE, "llama" for SentencePiece) and, for
byte-level BPE, the rule by which text is split before merging (`tokenizer.ggml.pre`). That rule
decides ids ("a\\n\\n12" under plain byte-level BPE is not what SmolLM was trained on), so an
unknown one is an error, never a guess.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers import pre_tokenizers as pre
from tokenizers.models import BPE

from runtime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from runtime.checkpoints.gguf_checkpoint import GgufCheckpoint
    from runtime.checkpoints.gguf_metadata import GgufMetadata

# Token types of tokenizer.ggml.token_type.
_CONTROL = 3
_USER_DEFINED = 4

# Splitting rules as their models' own tokenizer.json files publish them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Words end before a capital that follows small letters.
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_LETTERS}{_CAPITALS}*{_SMALL}+|{_LETTERS}{_CAPITALS}+{_SMALL}*|\p{{N}}|{_REST}"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    rf"{_LETTERS}{_CAPITALS}*{_SMALL}+{_SHORT_FORMS}|{_LETTERS}{_CAPITALS}+{_SMALL}*{_SHORT_FORMS}"
    rf"|\p{{N}}{{1,3}}|{_REST}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Of words that have capitals, the letters that are written so in DeepSeek V2's tokenizer.
_WITH_CAPITALS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CHINESE = "[一-龥\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_V2 = (
    r"[\r\n]",
    rf"\s?[{_WITH_CAPITALS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CHINESE,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")


def _regex(*patterns: str) -> Any:
    """Text cut by one pattern, what is left in pieces by the next."""
    splits = [pre.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def _digits() -> Any:
    return pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


class _Rule(NamedTuple):
    """How texts are split before merging, and what else goes with a rule.

    Args:
        nfc: texts are composed (Unicode's NFC) first.
        whole_words: a word that is in the vocabulary is one token, whatever the merges say.
        add_bos: prompts begin with BOS where the file does not say whether they do.
    """

    split: Callable[[], Any]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_LLAMA3_RULE = _Rule(lambda: _regex(_LLAMA3), whole_words=True, add_bos=True)
_LLAMA3_SPLIT = _Rule(lambda: _regex(_LLAMA3))
_DIGITS_RULE = _Rule(_digits)
_GPT_2_RULE = _Rule(lambda: pre.ByteLevel(add_prefix_space=False, use_regex=True))
_RULES = {  # by tokenizer.ggml.pre; what goes with them is llama.cpp's (llama-vocab.cpp)
    "smollm": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "command-r": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "codeshell": _DIGITS_RULE,
    "exaone": _DIGITS_RULE,
    "minerva-7b": _DIGITS_RULE,
    "gpt-2": _GPT_2_RULE,
    "olmo": _GPT_2_RULE,
    "mpt": _GPT_2_RULE,
    "dbrx": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "glm4": _LLAMA3_SPLIT,
    "chatglm-bpe": _LLAMA3_SPLIT,
    "tekken": _Rule(lambda: _regex(_TEKKEN), whole_words=True, add_bos=True),
    "gpt-4o": _Rule(lambda: _regex(_GPT_4O)),
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "qwen2": _Rule(lambda: _regex(_QWEN2), nfc=True),
    "deepseek-r1-qwen": _Rule(lambda: _regex(_QWEN2)),
    "deepseek-v3": _Rule(lambda: _regex(*_DEEPSEEK_V3)),
    "deepseek-llm": _Rule(lambda: _regex(*_DEEPSEEK_V2)),
    "deepseek-coder": _Rule(lambda: _regex(*_DEEPSEEK_CODER)),
    "stablelm2": _Rule(lambda: _regex(_QWEN2)),
}


def build_tokenizer(metadata: GgufMetadata) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata.

    Raises: ModelError: no tokenizer in the file, or of a kind that is not known here.
    """
    kind = metadata.text("tokenizer.ggml.model")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{metadata.path}: tokenizer {kind!r}: must be gpt2 or llama")
    if not tokens:
        raise ModelError(f"{metadata.path}: its tokenizer has no tokens")
    types = metadata.numbers("tokenizer.ggml.token_type", len(tokens), [1] * len(tokens))
    try:
        tokenizer = _byte_level(metadata) if kind == "gpt2" else _sentence_piece(metadata)
        for token, token_type in zip(tokens, types, strict=True):
            if token_type in (_CONTROL, _USER_DEFINED):
                special = token_type == _CONTROL
                tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
        _add_ends(tokenizer, metadata, tokens)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{metadata.path}: its tokenizer cannot be built: {error}") from None
    return tokenizer


def adds_bos(metadata: GgufMetadata) -> bool:
    """Whether prompts begin with BOS: as the file says, else as its kind of tokenizer does."""
    rule = _RULES.get(metadata.text("tokenizer.ggml.pre", "gpt-2"))
    is_llama = metadata.raw("tokenizer.ggml.model") == "llama"
    default = is_llama or (rule is not None and rule.add_bos)
    wanted = metadata.flag("tokenizer.ggml.add_bos_token", default)
    return wanted and metadata.token_id("bos") is not None


def _add_ends(tokenizer: Tokenizer, metadata: GgufMetadata, tokens: list[str]) -> None:
    """Makes texts begin with BOS and end with EOS, where the file wants that."""
    bos = metadata.token_id("bos") if adds_bos(metadata) else None
    add_eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
    eos = metadata.token_id("eos") if add_eos else None
    before, after = ([] if i is None else [tokens[i]] for i in (bos, eos))
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(tokens[i], i) for i in {bos, eos} if i is not None],
        )


def _byte_level(metadata: GgufMetadata) -> Tokenizer:
    name = metadata.text("tokenizer.ggml.pre", "gpt-2")
    if name not in _RULES:
        raise ModelError(
            f"{metadata.path}: text splitting rule {name!r}: must be one of {', '.join(_RULES)}"
        )
    rule = _RULES[name]
    tokens = metadata.texts("tokenizer.ggml.tokens")
    merges: list[tuple[str, str]] = []
    for merge in metadata.texts("tokenizer.ggml.merges", []):
        left, blank, right = merge.partition(" ")
        if not blank or " " in right:
            raise ModelError(f"{metadata.path}: merge {merge!r}: must be two tokens and a blank")
        merges.append((left, right))
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.split()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: GgufMetadata) -> Tokenizer:
    """SentencePiece BPE: the merges are the ways to join two pieces, best score first."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    scores = metadata.numbers("tokenizer.ggml.scores", len(tokens))
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    merges.sort(key=lambda merge: merge[:3])
    unknown = tokens[metadata.token_id("unknown") or 0]
    pairs = [merge[3:] for merge in merges]
    tokenizer = Tokenizer(BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def write_tokenizer(checkpoint: GgufCheckpoint, folder: Path) -> None:
    """Puts config.json, generation_config.json, tokenizer.json, tokenizer_config.json and the
    file's chat templates into `folder`. Raises: ModelError: see above."""
    metadata = checkpoint.metadata
    # Not by the library's `save`, whose errors are none of the system's.
    text = build_tokenizer(metadata).to_str(pretty=True)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(metadata),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.token_id(key)
        if index is not None:
            settings[f"{name}_token"] = tokens[index]
    # Tools that are older than chat_template.jinja look for the template here alone.
    if template := metadata.text("tokenizer.chat_template", ""):
        settings["chat_template"] = template
    _write_templates(metadata, folder)
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "config.json", checkpoint.config)
    _write_json(folder / "generation_config.json", checkpoint.generation_config)


def _write_templates(metadata: GgufMetadata, folder: Path) -> None:
    """chat_template.jinja, and further ones where transformers looks for them, by their names."""
    found = {folder / "chat_template.jinja": metadata.text("tokenizer.chat_template", "")}
    for name in metadata.texts("tokenizer.chat_templates", []):
        if re.fullmatch(r"\w+", name):  # it becomes a file's name
            path = folder / "additional_chat_templates" / f"{name}.jinja"
            found[path] = metadata.text(f"tokenizer.chat_template.{name}", "")
    for path, template in found.items():
        if template:
            path.parent.mkdir(exist_ok=True)
            path.write_text(template, encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
