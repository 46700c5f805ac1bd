"""Workloads in files of others.

- sharegpt: a JSON list of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt",
  "value": ...}, ...]}. What a human says is asked; the answer may have as many tokens as the
  recorded one is thought to have, at four characters each. No times.
- azure: CSV with the columns TIMESTAMP,ContextTokens,GeneratedTokens, as in
  github.com/Azure/AzurePublicDataset. Texts are random words.
- mooncake: a JSON object a line with timestamp (ms), input_length, output_length and hash_ids, as
  in github.com/kvcache-ai/Mooncake. A hash id stands for a block of 512 tokens: the same id is the
  same words, so that prompts share the prefixes which the trace says they share.
"""

from __future__ import annotations

import csv
import json
import random
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from runtime.errors import ConfigError, shown
from server.bench.turns import Conversation, Turn
from server.bench.words import random_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Reader = Callable[[Path, int, int], Iterator[Conversation]]

MOONCAKE_BLOCK = 512
CHARACTERS_PER_TOKEN = 4
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOST_TOKENS = 10_000_000  # of one prompt or answer; more is a slip


def read_sharegpt(path: Path, most_turns: int, seed: int) -> Iterator[Conversation]:
    """At most `most_turns` turns of each conversation. Raises: ConfigError."""
    try:
        entries = json.loads(_text(path))
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error})") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: must be a list of conversations")
    for number, entry in enumerate(entries):
        where = f"{path}: [{number}]"
        said = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(said, list):
            raise ConfigError(f"{where}: must have a list under 'conversations'")
        turns = list(_sharegpt_turns(said, where))[:most_turns]
        if turns:
            yield Conversation(tuple(turns))


def _sharegpt_turns(said: list[Any], where: str) -> Iterator[Turn]:
    """What humans said that was answered."""
    asked: str | None = None
    for part in said:
        if not isinstance(part, dict) or not isinstance(part.get("value"), str):
            raise ConfigError(f"{where}: a part of a conversation must have a text under 'value'")
        if part.get("from") in ("human", "user"):
            asked = part["value"]
        elif part.get("from") in ("gpt", "assistant", "chatgpt", "bing", "bard") and asked:
            tokens = -(-len(asked) // CHARACTERS_PER_TOKEN)
            yield Turn(asked, max(1, -(-len(part["value"]) // CHARACTERS_PER_TOKEN)), tokens)
            asked = None


def read_azure(path: Path, most_turns: int, seed: int) -> Iterator[Conversation]:
    """Raises: ConfigError, with the line."""
    rng = random.Random(f"azure/{seed}")
    rows = csv.DictReader(_text(path).splitlines())
    missing = [name for name in AZURE_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path}: has no column {missing[0]}")
    first: datetime | None = None
    for row in rows:
        where = f"{path}:{rows.line_num}"
        try:
            when = datetime.fromisoformat((row["TIMESTAMP"] or "").strip())
            seconds = 0.0 if first is None else (when - first).total_seconds()
        except (ValueError, TypeError):
            raise ConfigError(f"{where}: TIMESTAMP {shown(row['TIMESTAMP'])}: is no time") from None
        first = first or when
        prompt = _count(row["ContextTokens"], f"{where}: ContextTokens")
        output = _count(row["GeneratedTokens"], f"{where}: GeneratedTokens")
        turn = Turn(random_words(rng, prompt), output, prompt)
        yield Conversation((turn,), max(0.0, seconds))


def read_mooncake(path: Path, most_turns: int, seed: int) -> Iterator[Conversation]:
    """Raises: ConfigError, with the line."""
    first_ms: float | None = None
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = json.loads(line)
            when_ms, hash_ids = float(entry["timestamp"]), list(entry["hash_ids"])
            lengths = entry["input_length"], entry["output_length"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{where}: is no request of such a trace ({error!r})") from None
        prompt = _count(lengths[0], f"{where}: input_length")
        output = _count(lengths[1], f"{where}: output_length")
        first_ms = when_ms if first_ms is None else first_ms
        text = _mooncake_text(seed, hash_ids, prompt, number)
        yield Conversation((Turn(text, output, prompt),), max(0.0, (when_ms - first_ms) / 1e3))


def _mooncake_text(seed: int, hash_ids: list[Any], tokens: int, number: int) -> str:
    """Block by block; words beyond the last id are this request's own."""
    blocks: list[str] = []
    for index in range(-(-tokens // MOONCAKE_BLOCK)):
        name = f"hash {hash_ids[index]!r}" if index < len(hash_ids) else f"own {number}/{index}"
        words = _block(seed, name)
        blocks += words[: tokens - index * MOONCAKE_BLOCK]
    return " ".join(blocks)


@lru_cache(4096)
def _block(seed: int, name: str) -> tuple[str, ...]:
    return tuple(random_words(random.Random(f"{seed}/{name}"), MOONCAKE_BLOCK).split())


def _count(value: Any, where: str) -> int:
    """At least 1: a request without a prompt or an answer cannot be asked."""
    try:
        count = int(value)
    except (ValueError, TypeError):
        raise ConfigError(f"{where} {shown(value)}: must be a whole number") from None
    if not 0 <= count <= MOST_TOKENS:
        raise ConfigError(f"{where} {count}: must be from 0 to {MOST_TOKENS}")
    return max(1, count)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None


READERS: dict[str, Reader] = {
    "sharegpt": read_sharegpt,
    "azure": read_azure,
    "mooncake": read_mooncake,
}
TIMED = ("azure", "mooncake")
