"""Token ids to text, one at a time, such that the pieces join to what decoding all at once gives.

Three ways, by the tokenizer's decoder:
- byte-level BPE: a token is bytes; an incremental UTF-8 decoder holds back a cut character;
- SentencePiece-like with byte fallback: a token is text or one byte; a run of bytes is decided as a
  whole (valid UTF-8, or U+FFFD for each byte), as the library does;
- anything else: the library decodes a window of the last tokens with and without the new one.

Bytes that never become a character show as U+FFFD, streamed and whole alike, since whole answers
are joined from the same pieces. A character whose last bytes a limit cut off does not show at all.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One sequence's way from ids to text."""

    def feed(self, token_id: int) -> str:
        """The text that the token completes; "" while a character is incomplete."""
        ...

    def flush(self, *, cut: bool = False) -> str:
        """What is left at the end of the sequence.

        Args: cut: the end is a limit's, not the model's, so a character that lacks its last bytes
            is left out rather than shown as U+FFFD.
        """
        ...


class ByteDetokenizer:
    """For byte-level tokenizers."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._table = table
        self._decode = _utf8("replace").decode

    def feed(self, token_id: int) -> str:
        return self._decode(self._table[token_id])

    def flush(self, *, cut: bool = False) -> str:
        return "" if cut else self._decode(b"", True)


class PieceDetokenizer:
    """For tokenizers whose tokens are text or, written <0x41>, single bytes.

    Args:
        table: text of a token, or the byte.
        strip: the first character is dropped where it is a blank (nothing visible stands before).
    """

    __slots__ = ("_run", "_strip", "_table")

    def __init__(self, table: Mapping[int, str | int], *, strip: bool) -> None:
        self._table = table
        self._run = bytearray()
        self._strip = strip

    def feed(self, token_id: int) -> str:
        piece = self._table[token_id]
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if not piece:  # a hidden token does not part the bytes around it
            return ""
        text = self._take_run() + piece if self._run else piece
        return self._stripped(text) if self._strip else text

    def flush(self, *, cut: bool = False) -> str:
        if cut:
            decoder = _utf8("replace")
            decoder.decode(self._run)
            incomplete = decoder.getstate()[0]
            del self._run[len(self._run) - len(incomplete) :]
        return self._stripped(self._take_run())

    def _take_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        if not self._strip or not text:
            return text
        self._strip = False
        return text.removeprefix(" ")


class WindowDetokenizer:
    """For any other tokenizer, by its own `decode`.

    Args:
        decode: ids to text.
        hidden: ids that never show.
        prompt_ids: the end of the prompt, so that the first token joins as it would after it.
    """

    __slots__ = ("_decode", "_hidden", "_ids", "_read", "_shown")

    # A character is at most four bytes, so more undecided tokens than that are plain bad bytes.
    _MOST_UNDECIDED = 4
    _CONTEXT = 4

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        hidden: frozenset[int],
        prompt_ids: Sequence[int],
    ) -> None:
        self._decode = decode
        self._hidden = hidden
        tail = [i for i in prompt_ids[-16:] if i not in hidden]
        self._ids = tail[-self._CONTEXT :]
        self._read = len(self._ids)  # tokens whose text is out
        self._shown = decode(self._ids) if self._ids else ""

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        undecided = len(self._ids) - self._read
        if text.endswith("\ufffd") and undecided < self._MOST_UNDECIDED:
            return ""
        return self._release(text)

    def flush(self, *, cut: bool = False) -> str:
        if len(self._ids) == self._read:
            return ""
        text = self._release(self._decode(self._ids))
        return text.rstrip("\ufffd") if cut else text

    def _release(self, text: str) -> str:
        news = text[len(self._shown) :]
        # A token without text of its own (an unknown one) is no context for the next.
        if news:
            self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)
        return news
