"""The model's tokenizer: text to ids, conversations to ids, ids to text.

Built on the `tokenizers` library alone; `tokenizer_files` says when transformers reads a folder.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tokenizers import normalizers

from runtime.checkpoints.json_file import read_optional_json_object
from runtime.errors import ContextTooLong, InvalidRequest
from server.text.chat_template import ChatTemplate, template_sources
from server.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    PieceDetokenizer,
    WindowDetokenizer,
)
from server.text.lanes import Lanes
from server.text.least_tokens import LeastTokens, TokenLimit
from server.text.special_names import SpecialNames
from server.text.tokenizer_files import load_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import tokenizers

    from server.text.chat_template import Message

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A tokenizer with its chat template.

    Args:
        backend: the library's object.
        chat_template: None where the model has none.
        eos_token_id: the tokenizer's own end of a sequence, beside those that the model's configs
            name.

    Attributes:
        vocab_size: one more than the largest id.
        special_ids: ids of special tokens, which answers do not show.
        lanes: threads in which long texts are worked on, by whomever.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = {token.content: i for i, token in added.items()}
        self._unknown: dict[int, str] = {}  # tokens that the model has no embedding for
        # Those that are read within words only belong to no template.
        names = {t.content: i for i, t in added.items() if t.special and not t.single_word}
        self._special_names = SpecialNames(backend, names) if names else None
        self.lanes = Lanes("text")
        self._kind = _decoder_kind(backend)
        self._least = _least_tokens(backend, vocabulary, bytewise=self._kind == "bytes")
        self._hidden_ids = self.special_ids  # not in the text, unless a request wants them
        self._bytes = _Table(lambda i: _token_bytes(backend, i))
        self._shown_bytes = _Table(lambda i: b"" if i in self._hidden_ids else self._bytes[i])
        self._pieces = _Table(lambda i: _token_piece(backend, i))
        self._shown_pieces = _Table(lambda i: "" if i in self._hidden_ids else self._pieces[i])

    @classmethod
    def load(cls, folder: Path, template_file: Path | None = None) -> Tokenizer:
        """The tokenizer of a model in Hugging Face layout.

        Raises: ModelError: no tokenizer there, or one that cannot be read.
        """
        config = read_optional_json_object(folder / "tokenizer_config.json")
        backend, special = load_backend(folder, config)
        sources = template_sources(folder, config, template_file)
        template = ChatTemplate(sources, special) if sources else None
        ids = {name: backend.token_to_id(token) for name, token in special.items()}
        return cls(
            backend,
            chat_template=template,
            bos_token_id=ids.get("bos_token"),
            eos_token_id=ids.get("eos_token"),
        )

    def limit_ids(self, rows: int) -> None:
        """Refuses, from now on, text that holds a token beyond the model's embedding.

        Files name more tokens than the model has been given (a [PAD] that was added without
        resizing, Gemma 3's image token); in a prompt such an id would fail the whole step.

        Args: rows: of the embedding.
        """
        if self.vocab_size > rows:
            vocabulary = self.backend.get_vocab(with_added_tokens=True)
            self._unknown = {i: token for token, i in vocabulary.items() if i >= rows}
            self.bos_token_id = None if self.bos_token_id in self._unknown else self.bos_token_id

    def allow_special_in_content(self) -> None:
        """Reads, from now on, names of special tokens in what clients write as these tokens."""
        self._special_names = None

    def prepare(self) -> None:
        """Makes ready what would hold up others if it were made for the first that needs it.

        Raises: ModelError: names of special tokens cannot be told apart from these.
        """
        if self._special_names is not None and self.chat_template is not None:
            _ = self._special_names.backend

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        most: TokenLimit | None = None,
    ) -> list[int]:
        """Ids of a text, on the calling thread; see `encode_all`."""
        return self.encode_all(
            [text], add_special_tokens=add_special_tokens, param=param, most=most
        )[0]

    def encode_all(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        most: TokenLimit | None = None,
    ) -> list[list[int]]:
        """Ids of texts, on the calling thread, which gives up the interpreter meanwhile.

        Args:
            param: the request's field that holds the texts, for messages.
            most: tokens that a text may have; what is seen to be longer is not tokenized.

        Raises: InvalidRequest: a text cannot be tokenized, or holds a token that the model's
            embedding has no row for. ContextTooLong.
        """
        self._check_least(texts, param, most)
        return self._encoded(self.backend, texts, add_special_tokens, param, most)

    def _check_least(self, texts: Sequence[str], param: str, most: TokenLimit | None) -> None:
        """Raises: ContextTooLong: seen without tokenizing."""
        if most is not None:
            for text in texts:
                if len(text) > most.tokens and self._least.exceed(text, most.tokens):
                    raise _too_long(param, f"{len(text)} characters", most)

    def _encoded(
        self,
        backend: tokenizers.Tokenizer,
        texts: Sequence[str],
        add_special_tokens: bool,
        param: str,
        most: TokenLimit | None,
    ) -> list[list[int]]:
        # The batch call gives up the GIL while it works; `encode` does not (measured: 0.7 s).
        try:
            batch = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises bare Exception
            raise InvalidRequest(f"{param}: cannot be tokenized: {error}", param=param) from None
        for encoding in batch:
            if most is not None and len(encoding) > most.tokens:
                raise _too_long(param, f"{len(encoding)} tokens", most)
        found: list[list[int]] = [encoding.ids for encoding in batch]
        if self._unknown:
            for ids in found:
                self._check_known(ids, param)
        return found

    def _check_known(self, ids: Sequence[int], param: str) -> None:
        for token_id in ids:
            if token_id in self._unknown:
                raise InvalidRequest(
                    f"{param}: holds {self._unknown[token_id]!r}, token {token_id} of the"
                    f" tokenizer, which this model does not have: its tokens end at"
                    f" {min(self._unknown) - 1}",
                    param=param,
                )

    def encode_chat(
        self, messages: Sequence[Message], *, most: TokenLimit | None = None, **options: Any
    ) -> list[int]:
        """Ids of a conversation, on the calling thread. Options are those of `ChatTemplate.render`.

        The template's special tokens are these; their names in what clients wrote are plain text
        (see special_names.py), unless `allow_special_in_content` was called.

        Raises: InvalidRequest: the model has no chat template, or it refuses the messages.
            ContextTooLong: see `encode_all`.
        """
        text = self.render_chat(messages, **options)
        self._check_least([text], "messages", most)
        backend, names = self.backend, self._special_names
        if names is not None:
            apart = names.tell_apart(text, messages, options, self.render_chat)
            if apart is not None:
                text, backend = apart, names.backend
        # Templates write their own special tokens.
        return self._encoded(backend, [text], False, "messages", most)[0]

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt text of a conversation; see `encode_chat`."""
        if self.chat_template is None:
            raise InvalidRequest(
                "messages: this model has no chat template, so it cannot chat; use"
                " /v1/completions, or start the server with --chat-template FILE",
                param="messages",
                code="no_chat_template",
            )
        return self.chat_template.render(messages, **options)

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """A new sequence's detokenizer; prompt_ids stand before its first token."""
        if self._kind == "bytes":
            return ByteDetokenizer(self._shown_bytes if skip_special_tokens else self._bytes)
        hidden = self._hidden_ids if skip_special_tokens else frozenset()
        if self._kind == "pieces":
            return PieceDetokenizer(
                self._shown_pieces if skip_special_tokens else self._pieces,
                strip=all(i in hidden for i in prompt_ids),
            )
        return WindowDetokenizer(
            lambda ids: self.backend.decode(ids, skip_special_tokens=False), hidden, prompt_ids
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        state = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([*map(state.feed, ids), state.flush()])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; special tokens' are their names."""
        if self._kind == "bytes":
            return bytes(self._bytes[token_id])
        if self._kind == "pieces":
            piece = self._pieces[token_id]
            return bytes([piece]) if isinstance(piece, int) else str(piece).encode()
        return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def special_id(self, text: str) -> int | None:
        """The id of the added token that is exactly this text, if the model has one."""
        token_id = self._added_ids.get(text)
        return None if token_id in self._unknown else token_id

    def special_tokens(self) -> dict[str, int]:
        """The text of each special token, with its id."""
        return {text: i for text, i in self._added_ids.items() if i in self.special_ids}

    def show_special(self, texts: Iterable[str]) -> None:
        """Counts special tokens as text from now on: marks that parsers look for."""
        self._hidden_ids -= {self._added_ids[text] for text in texts if text in self._added_ids}
        self._shown_bytes.clear()
        self._shown_pieces.clear()

    def to_json(self) -> str:
        """The tokenizer in the library's own form, for others that tokenize as it does."""
        text: str = self.backend.to_str()
        return text

    def close(self) -> None:
        """Ends its threads."""
        self.lanes.close()


def _too_long(param: str, length: str, most: TokenLimit) -> ContextTooLong:
    return ContextTooLong(f"{most.told}; {param} has {length}.", param=param)


def _least_tokens(
    backend: tokenizers.Tokenizer, vocabulary: dict[str, int], *, bytewise: bool
) -> LeastTokens:
    """The bound that holds for this tokenizer."""
    composes = isinstance(backend.normalizer, normalizers.NFC)
    strips = any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values())
    known = bytewise and not strips and (backend.normalizer is None or composes)
    return LeastTokens(
        (_token_bytes(backend, i) for i in vocabulary.values()) if known else None,
        longest=max(map(len, vocabulary), default=1),
        ascii_only=composes,
    )


class _Table(dict[int, Any]):
    """Values by token id, made when first asked for."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> Any:
        value = self[token_id] = self._make(token_id)
        return value


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_alphabet()


def _token_bytes(backend: tokenizers.Tokenizer, token_id: int) -> bytes:
    token = backend.id_to_token(token_id)
    if token is None:  # a padded row of the vocabulary
        return b""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # an added token with characters outside the alphabet is literal text
        return token.encode()


def _token_piece(backend: tokenizers.Tokenizer, token_id: int) -> str | int:
    token = backend.id_to_token(token_id)
    if token is None:
        return ""
    byte = _BYTE_TOKEN.fullmatch(token)
    return int(byte[1], 16) if byte else token.replace("\u2581", " ")


def _decoder_kind(backend: tokenizers.Tokenizer) -> str:
    """Which detokenizer does what the tokenizer's own decoder does."""
    if backend.decoder is None:
        return "window"
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return "bytes"
    sentence_piece = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    return "pieces" if parts == sentence_piece else "window"
