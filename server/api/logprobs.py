"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from runtime.request import TokenLogprobs
    from server.text.detokenizer import Detokenizer
    from server.text.tokenizer import Tokenizer

# JSON has no infinity; this stands for the probability of what cannot happen.
LOWEST = -9999.0


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, LOWEST)


class JsonList:
    """A list that is written out as it grows, so that a long one does not hold up everybody at its
    end."""

    __slots__ = ("_written",)

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def extend(self, items: list[Any]) -> None:
        if items:
            self._written.append(orjson.dumps(items)[1:-1])

    def json(self) -> orjson.Fragment:
        """All of it, as a value for orjson to write."""
        return orjson.Fragment(b"[" + b",".join(self._written) + b"]")


def chat_logprobs(entries: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """A chat's `logprobs.content`. Alternatives are a list, so equal texts stay apart."""
    content = []
    for entry in entries:
        shown = _chat_entry(entry.token_id, entry.logprob, tokenizer)
        shown["top_logprobs"] = [_chat_entry(i, value, tokenizer) for i, value in entry.top]
        content.append(shown)
    return content


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": finite(logprob),
        "bytes": list(raw),
    }


def token_name(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as text. Part of a character is written `bytes:\\xf0\\x9f`, as OpenAI does."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobs:
    """`choices[].logprobs` of one completion, token after token.

    Args:
        detokenizer: of its own; gives the offsets of tokens in the text.
        offset: characters before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._offset = offset

    def add(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], *, top: int
    ) -> dict[str, Any]:
        """The logprobs object of further tokens.

        Args: entries: parallel to token_ids; None where a token has no probability (a prompt's
            first one). top: alternatives that were asked for.
        """
        tokens, values, alternatives, offsets = [], [], [], []
        for token_id, entry in zip(token_ids, entries, strict=True):
            tokens.append(token_name(token_id, self._tokenizer))
            values.append(None if entry is None else finite(entry.logprob))
            alternatives.append(None if entry is None else self._alternatives(entry))
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.feed(token_id))
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": alternatives if top else None,
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        """The log-probabilities by text, the chosen token included. Two ids of one text both stay:
        the second is named by its id."""
        found: dict[str, float] = {}
        for token_id, logprob in entry.top:
            name = token_name(token_id, self._tokenizer)
            found[f"token_id:{token_id}" if name in found else name] = finite(logprob)
        if all(token_id != entry.token_id for token_id, _ in entry.top):
            name = token_name(entry.token_id, self._tokenizer)
            found[f"token_id:{entry.token_id}" if name in found else name] = finite(entry.logprob)
        return found


class MergedLogprobs:
    """Consecutive logprobs objects of a completion, which become one."""

    def __init__(self) -> None:
        self._lists: dict[str, JsonList | None] = {}

    def add(self, part: dict[str, Any]) -> None:
        for key, items in part.items():
            merged = self._lists.setdefault(key, None if items is None else JsonList())
            if merged is not None:
                merged.extend(items)

    def json(self) -> dict[str, Any] | None:
        """The one that they are; None where there was none."""
        if not self._lists:
            return None
        return {key: None if one is None else one.json() for key, one in self._lists.items()}
