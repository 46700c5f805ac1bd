"""What goes wrong in a world, how often, and by whose hand: drawn from the seed, and counted."""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from llguidance import LLMatcher, LLTokenizer

import runtime.simulation.trace
import server.formats.model_format
import server.generation.engine
import server.grammars.compiler
import server.http.loop_watch
import server.serving
import server.text.lanes
from server.text.tokenizer import Tokenizer
from tests.fakes import byte_tokenizer
from tests.world.loop import WorldThreads

if TYPE_CHECKING:
    from tests.world.loop import WorldLoop

# Of the device, by step: how likely each is in a world that has it at all.
DEVICE = {"launch": 0.02, "step": 0.03, "late step": 0.03, "stall": 0.03, "probe": 0.15}
WORLDS_WITH = {"launch": 0.3, "step": 0.3, "late step": 0.3, "stall": 0.4, "probe": 0.04}
# Characters of a prompt that the tokenizer, or the detokenizer of its answer, cannot take.
UNREADABLE, UNSPEAKABLE = "\x03", "\x04"
# Parts of a grammar's source that make it fail.
NOT_COMPILED, NO_MASK, NOT_ACCEPTED = "zq", "qz", "qq"


class Faults:
    """Args: rng: draws what goes wrong in this world, and then each time whether it does."""

    def __init__(self, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._chances = {
            kind: DEVICE[kind] for kind, share in WORLDS_WITH.items() if rng.random() < share
        }
        if "probe" in self._chances:  # it is asked only after a step that failed
            self._chances.setdefault("step", DEVICE["step"])
        self.wall_s = 0.0  # what the wall clock has jumped
        self.struck: set[tuple[int, ...]] = set()  # prompts whose step failed with nobody beside
        self.dead_s = float("inf")  # since when the device is gone
        self.disk = Disk(
            self, room=rng.choice((3_000, 9_000, 40_000, 1 << 40)), tears=rng.random() < 0.5
        )

    def happens(self, kind: str) -> bool:
        if self._rng.random() >= self._chances.get(kind, 0.0):
            return False
        self.counts[kind] += 1
        return True


class Disk:
    """A file on a disk that may fill up, in the middle of a line too."""

    def __init__(self, faults: Faults, *, room: int, tears: bool) -> None:
        self.text = ""
        self.opened = self.closed = 0
        self._faults = faults
        self._room = room
        self._tears = tears

    def open(self, path: Any, *args: Any, **options: Any) -> Disk:
        self.opened += 1
        return self

    def write(self, text: str) -> None:
        if len(self.text) + len(text) > self._room:
            if self._tears:
                self.text += text[: self._room - len(self.text)]
            self._faults.counts["disk torn" if self._tears else "disk full"] += 1
            raise OSError(28, "No space left on device")
        self.text += text

    def flush(self) -> None:
        """What is written is there."""

    def close(self) -> None:
        self.closed += 1


class FaultyBackend:
    """The tokenizer library, which raises its own bare Exception at some texts."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        if any(UNREADABLE in text for text in texts):
            self._faults.counts["tokenizer"] += 1
            raise Exception("the tokenizer library cannot read this")
        return self._inner.encode_batch_fast(texts, **options)


class FaultyDetokenizer:
    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._left = 3

    def feed(self, token_id: int) -> str:
        self._left -= 1
        if self._left < 0:
            self._faults.counts["detokenizer"] += 1
            raise RuntimeError("the detokenizer has failed")
        return "x"

    def flush(self, *, cut: bool = True) -> str:
        return ""


class WorldTokenizer(Tokenizer):
    """The byte tokenizer, which fails where it is told to."""

    faults: Faults

    def detokenizer(self, prompt_ids: Any = (), **options: Any) -> Any:
        if ord(UNSPEAKABLE) in prompt_ids:
            return FaultyDetokenizer(self.faults)
        return super().detokenizer(prompt_ids, **options)


@cache
def shared_tokenizer() -> Tokenizer:
    """What is the same in every world, and takes a while to make."""
    tokenizer = byte_tokenizer()
    tokenizer.prepare()
    return tokenizer


@cache
def _grammar_tokenizer(text: str, vocab_size: int, eos_ids: tuple[int, ...]) -> LLTokenizer:
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids))


def world_tokenizer(faults: Faults) -> WorldTokenizer:
    shared = shared_tokenizer()
    tokenizer = WorldTokenizer(shared.backend, chat_template=shared.chat_template)
    tokenizer.faults = faults
    tokenizer.backend = FaultyBackend(shared.backend, faults)  # type: ignore[assignment]
    return tokenizer


class FaultyMatcher:
    """The grammar library's matcher, which raises where its grammar says so."""

    faults: Faults

    def __init__(self, tokenizer: Any, text: str, inner: Any = None, **options: Any) -> None:
        if NOT_COMPILED in text:
            self.faults.counts["grammar compiler"] += 1
            raise RuntimeError("the grammar library has failed")
        self._text = text
        self._inner = inner or LLMatcher(tokenizer, text, **options)
        self._copied = inner is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def deep_copy(self) -> FaultyMatcher:
        return type(self)(None, self._text, self._inner.deep_copy())

    def unsafe_compute_mask_ptr(self, *where: int) -> None:
        if self._copied and NO_MASK in self._text:
            self.faults.counts["grammar mask"] += 1
            raise RuntimeError("the grammar library has no mask")
        self._inner.unsafe_compute_mask_ptr(*where)

    def consume_token(self, token: int) -> bool:
        if NOT_ACCEPTED in self._text:
            self.faults.counts["grammar token"] += 1
            raise RuntimeError("the grammar library takes no token")
        return bool(self._inner.consume_token(token))


class _NoThread:
    """In place of the thread that looks at what holds up the loop: nothing does, in virtual time."""

    def __init__(self, **options: Any) -> None:
        """It is never run."""

    def start(self) -> None: ...
    def join(self) -> None: ...


@contextlib.contextmanager
def world_around(loop: WorldLoop, faults: Faults, rng: random.Random) -> Iterator[None]:
    """Everything by which the server could tell that it is in a world: clocks, chance, threads,
    the disk, signals."""

    def threads(*args: Any, **options: Any) -> WorldThreads:
        return WorldThreads(*args, **options)

    watched = SimpleNamespace(
        Thread=_NoThread, Event=threading.Event, get_ident=threading.get_ident
    )
    matcher = type("Matcher", (FaultyMatcher,), {"faults": faults})
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (time, "monotonic", loop.time),
            (time, "perf_counter", loop.time),
            (time, "thread_time", lambda: 0.0),
            (time, "time", lambda: 1.8e9 + loop.time() + faults.wall_s),
            (secrets, "token_hex", lambda count: rng.randbytes(count).hex()),
            (server.text.lanes, "ThreadPoolExecutor", threads),
            (server.grammars.compiler, "ThreadPoolExecutor", threads),
            (server.grammars.compiler, "LLMatcher", matcher),
            (server.formats.model_format, "hugging_face_tokenizer", _grammar_tokenizer_of),
            (server.http.loop_watch, "threading", watched),
            (server.serving, "announce", lambda *_: None),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(
            patch.object(runtime.simulation.trace, "open", faults.disk.open, create=True)
        )
        yield


def _grammar_tokenizer_of(text: str, vocab_size: int, eos_ids: list[int]) -> LLTokenizer:
    return _grammar_tokenizer(text, vocab_size, tuple(eos_ids))
