"""Structured output: grammars compiled off the event loop, and a matcher per request.

Which library: llguidance 1.9 or xgrammar 0.2.9, compared on one core with a 49,152-token byte-level
BPE and the 105 schemas of tests/server/grammars/json_schemas.json, 20 random walks each:

                                      llguidance    xgrammar
    finished walks that validate      all 1,904     1,622; of 26 schemas some or all were invalid
    schemas refused                   0             3
    unsupported keywords              an error      a warning on stderr, then unconstrained
    compile, median / largest         0.4 / 1 ms    1.6 / 41 ms
    mask, median / p99 / largest      3/114/1352 us 11/195/1452 us
    import                            0.08 s        2.5 s, with torch and transformers
    dependencies                      none          torch, triton, transformers, tvm-ffi, pydantic

xgrammar lets through control characters in strings, drops length next to pattern or format, and
reads allOf, sibling keywords of $ref, and required names without properties as "anything". The
server imports no torch, and "never unconstrained in silence" is a promise of its API: llguidance.
Two holes of it are closed in json_schema.py (escaped spellings of keys; minProperties counted
with equal keys). To be compared again when xgrammar reports unsupported keywords as errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from runtime.errors import GenerationFailed, InvalidRequest, QueueFull
from server.grammars.bits import forbid
from server.grammars.library_errors import in_words
from server.grammars.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from runtime.errors import LoomserveError
    from server.grammars.sources import Source

log = logging.getLogger("loomserve.grammars")

CACHED_GRAMMARS = 256
RETRY_AFTER_S = 1.0
# Compiling takes a thread up to 0.8 s for so many (600,000 took 5 s).
MAX_CHARACTERS = 150_000
# What one client may have waiting: 20 times as much, some seconds of both threads.
MAX_WAITING_CHARACTERS = 20 * MAX_CHARACTERS
# Processor time of the event loop that a request's masks may take: this, and for each token so much
# more. A mask and its token take 0.3 ms, an object of 440 optional keys once 12 ms; where rules are
# ambiguous (e: e e | "a") the time grows with the square of the output.
MASK_SECONDS = 0.04
MASK_SECONDS_A_TOKEN = 0.001
# State and schema stay out of messages: they may hold what the prompt holds.
_LIMITS = LLParserLimits(verbose_errors=False)


# What a grammar leaves no choice of is not sought ahead: the library does so without an end where
# there is none (/a+/ /a+/, whose second part is never reached), and for seconds in long constants.
# Masks cost the same without (12 us, on the schemas of tests/server/grammars/json_schemas.json).
_OPTIONS = '%llguidance {"no_forcing": true}'


def check_length(characters: int, param: str) -> None:
    """Raises: InvalidRequest: a grammar of so many characters takes too long to compile."""
    if characters > MAX_CHARACTERS:
        raise InvalidRequest(
            f"{param}: the grammar has {characters} characters; at most {MAX_CHARACTERS} are"
            " allowed",
            param=param,
        )


def hugging_face_tokenizer(
    tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]
) -> LLTokenizer:
    """The grammar library's view of a `tokenizers` file (about 0.2 s for 50,000 tokens).

    Args: vocab_size: ids that the model can sample; at least as many as the tokenizer has.
    """
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids))


class GrammarMatcher:
    """What one request may still say. Used by the engine's loop alone.

    It is there before its grammar is compiled, so that the request can wait in the queue for that:
    `start` asks for it, and in the end it is `ready` or `refused`. It follows committed tokens
    only, so a retracted request, whose committed tokens are computed again, goes on unchanged.

    Attributes:
        refused: why its grammar cannot be enforced, None while all is well.
        failed: why it can go no further (a limit of the library), None while all is well.
    """

    __slots__ = (
        "_compilation",
        "_ends",
        "_grammar",
        "_left_s",
        "_matcher",
        "_taken",
        "_when_known",
        "failed",
        "min_tokens",
        "refused",
    )

    def __init__(self, grammar: GrammarSpec, ends: NDArray[np.int64], min_tokens: int) -> None:
        self._grammar = grammar
        self._compilation = grammar.compiler.finished(grammar.key)
        self._matcher: LLMatcher | None = None
        self._ends = ends
        self._taken = 0
        self._left_s = MASK_SECONDS
        self._when_known: Callable[[], None] | None = None
        self.min_tokens = min_tokens
        self.refused: LoomserveError | None = None
        self.failed: LoomserveError | None = None

    @property
    def ready(self) -> bool:
        """Its grammar is compiled."""
        return self._compilation is not None and self._compilation.matcher is not None

    def start(self, when_known: Callable[[], None]) -> None:
        """Asks for the grammar, where it is not ready.

        Args: when_known: called once, later, when it is `ready` or `refused`.
        """
        if not self.ready:
            self._when_known = when_known
            self._compilation = self._grammar.compiler.join(self, self._grammar)

    def close(self) -> None:
        """Is not needed any more: a grammar that nobody waits for is not compiled. Idempotent."""
        if self._when_known is not None:
            self._when_known = None
            self._grammar.compiler.leave(self, self._grammar)

    def known(self, compilation: Compilation) -> None:
        """Told by the compiler how it ended."""
        self.refused = compilation.error_for(self._grammar.param)
        when_known, self._when_known = self._when_known, None
        if when_known is not None:
            when_known()

    def _started(self) -> LLMatcher:
        if self._matcher is None:
            assert self._compilation is not None
            assert self._compilation.matcher is not None, "the grammar is not compiled yet"
            self._matcher = self._compilation.matcher.deep_copy()
        return self._matcher

    def fill_mask(self, bits: NDArray[np.int32]) -> None:
        """Writes which tokens may come next: bit t % 32 of word t // 32 allows token t.

        Once the output is complete, only end-of-sequence tokens are allowed. The ends are held
        back until min_tokens, unless nothing else is left: there the grammar wins. After a failure
        nothing is allowed.
        """
        matcher = self._started()
        begun = time.thread_time()
        words = self._grammar.compiler.words
        # A tokenizer may know more ids than the model can sample.
        row = bits if bits.size == words else np.zeros(words, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if row is not bits:
            bits[:] = row[: bits.size]
        self._spend(time.thread_time() - begun)
        if matcher.is_error():
            self.failed = self.failed or self._limit(in_words(matcher.get_error()))
            bits.fill(0)
        elif self._taken < self.min_tokens and not matcher.is_stopped():
            forbid(bits, self._ends)

    def accept(self, token_id: int) -> None:
        """Takes a committed token. What comes after the end is ignored."""
        matcher = self._started()
        if self.failed is not None or matcher.is_stopped():
            return
        self._taken += 1
        self._left_s = min(MASK_SECONDS, self._left_s + MASK_SECONDS_A_TOKEN)
        begun = time.thread_time()
        if not matcher.consume_token(token_id):
            self.failed = self._limit(in_words(matcher.get_error()))
        self._spend(time.thread_time() - begun)

    def _spend(self, seconds: float) -> None:
        """Counts what the library took; what takes too much of everybody's time fails."""
        self._left_s -= seconds
        if self._left_s < 0 and self.failed is None:
            self.failed = self._limit("the output has become too ambiguous under it")

    def _limit(self, reason: str) -> InvalidRequest:
        param = self._grammar.param
        return InvalidRequest(f"{param}: {reason}", param=param)

    def is_terminated(self) -> bool:
        """The output is complete and can only end."""
        return self.failed is None and bool(self._started().is_stopped())


class GrammarSpec:
    """A grammar that a request asks for, from which its choices' matchers start.

    Args:
        param: the request's field that it came from, for messages.
        client: who asks for it.
    Raises: InvalidRequest: it is too long to be compiled.
    """

    def __init__(
        self, compiler: GrammarCompiler, source: Source, param: str, client: str = ""
    ) -> None:
        self.compiler = compiler
        self.source = source
        self.param = param
        self.client = client
        self.key = json.dumps(source)
        check_length(len(self.key), param)

    def matcher(self, min_tokens: int = 0, stop_token_ids: Iterable[int] = ()) -> GrammarMatcher:
        """A matcher at the start.

        Args: min_tokens, stop_token_ids: EOS and these cannot come before so many tokens, where
            the grammar leaves a choice. (The request's own min_tokens must then be 0: a ban that
            is applied after the mask could leave no token at all.)
        """
        ends = np.array(sorted({*self.compiler.eos_ids, *stop_token_ids}), dtype=np.int64)
        return GrammarMatcher(self, ends, min_tokens)


class Compilation:
    """A grammar on its way, and all who wait for it; its fields change on the event loop alone.

    Attributes:
        matcher: at the start of the grammar; None until it is compiled.
        work: what a thread does; None until it is its turn.
    """

    __slots__ = ("_error", "matcher", "source", "waiting", "work")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.work: Future[LLMatcher] | None = None
        self.waiting: list[GrammarMatcher] = []
        self.matcher: LLMatcher | None = None
        self._error: BaseException | None = None

    def end(self) -> None:
        """Its work is done: tells all who wait."""
        assert self.work is not None
        self._error = self.work.exception()
        if self._error is None:
            self.matcher = self.work.result()
        elif not isinstance(self._error, ValueError):
            log.error("a grammar could not be compiled", exc_info=self._error)
        waiting, self.waiting = self.waiting, []
        for matcher in waiting:
            matcher.known(self)

    def error_for(self, param: str) -> LoomserveError | None:
        """What the client whose field this was is told, where it cannot be enforced."""
        if self._error is None:
            return None
        if isinstance(self._error, ValueError):
            return InvalidRequest(f"{param}: {self._error}", param=param)
        kind = type(self._error).__name__
        return GenerationFailed(f"the grammar cannot be compiled: internal error ({kind})")


class GrammarCompiler:
    """Compiles grammars in its own threads and keeps the latest. What is compiled or waits for a
    thread is never more than what requests wait for: the queue's cap bounds both, and what one
    client may have waiting has a bound too. Clients take turns (see turns.py).

    Args:
        make_tokenizer: called once, by `prepare` or at the first compilation.
        eos_ids: ids that end the output.
    """

    def __init__(
        self,
        make_tokenizer: Callable[[], LLTokenizer],
        eos_ids: Iterable[int],
        *,
        threads: int = 2,
        cache_size: int = CACHED_GRAMMARS,
    ) -> None:
        self.eos_ids = tuple(sorted(eos_ids))
        self.words = 0  # of a mask; known once something is compiled
        self._make_tokenizer = make_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._no_tokenizer = False
        self._making = threading.Lock()
        self._going_on: dict[str, Compilation] = {}
        self._finished: OrderedDict[str, Compilation] = OrderedDict()
        self._cache_size = cache_size
        self._turns = Turns()
        self._free = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar")

    def grammar(self, source: Source, param: str, client: str = "") -> GrammarSpec:
        """A grammar to make matchers of; nothing is compiled before one is started.

        Raises: InvalidRequest: naming `param`. QueueFull: the client has too much waiting already.
        """
        found = GrammarSpec(self, source, param, client)
        waiting = self._turns.characters(client)
        if found.key in self._finished or found.key in self._going_on or not waiting:
            return found
        if waiting + len(found.key) > MAX_WAITING_CHARACTERS:
            raise QueueFull(
                f"{param}: {waiting} characters of this client's grammars wait to be compiled, and"
                f" at most {MAX_WAITING_CHARACTERS} may; retry later",
                retry_after_s=RETRY_AFTER_S,
            )
        return found

    def prepare(self) -> None:
        """Makes the tokenizer now: that holds the interpreter (0.2 s for 50,000 tokens), which
        must not happen while others are served."""
        with contextlib.suppress(ValueError):  # told to those who ask for a grammar
            self._tokenizer_or_error()

    def finished(self, key: str) -> Compilation | None:
        """What is compiled already."""
        found = self._finished.get(key)
        if found is not None:
            self._finished.move_to_end(key)
        return found

    def join(self, matcher: GrammarMatcher, grammar: GrammarSpec) -> Compilation:
        """Adds one who waits; equal sources are compiled once, also while that goes on."""
        compilation = self._going_on.get(grammar.key)
        if compilation is None:
            compilation = self._going_on[grammar.key] = Compilation(grammar.source)
        compilation.waiting.append(matcher)
        if compilation.work is None:
            self._turns.add(grammar.client, grammar.key, len(grammar.key))
            self._begin()
        return compilation

    def _begin(self) -> None:
        """Gives free threads what is next."""
        while self._free and (key := self._turns.take()) is not None:
            self._free -= 1
            work = self._pool.submit(self._compile, self._going_on[key].source)
            self._going_on[key].work = work
            work.add_done_callback(self._at_the_end_of(key))

    def _at_the_end_of(self, key: str) -> Callable[[Future[LLMatcher]], None]:
        loop = asyncio.get_running_loop()

        def done(_: Future[LLMatcher]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end, key)

        return done

    def leave(self, matcher: GrammarMatcher, grammar: GrammarSpec) -> None:
        """Takes out one who waited. What nobody waits for and has not begun is dropped."""
        compilation = self._going_on.get(grammar.key)
        if compilation is None or matcher not in compilation.waiting:
            return
        compilation.waiting.remove(matcher)
        if not compilation.waiting and compilation.work is None:
            self._turns.remove(grammar.key)
            del self._going_on[grammar.key]

    def _end(self, key: str) -> None:
        self._free += 1
        compilation = self._going_on.pop(key)
        assert compilation.work is not None
        if compilation.work.cancelled():
            return  # the server is closing
        compilation.end()
        self._begin()
        if compilation.matcher is not None:
            self._finished[key] = compilation
            if len(self._finished) > self._cache_size:
                self._finished.popitem(last=False)

    def _compile(self, source: Source) -> LLMatcher:
        """Raises ValueError where the source is wrong or no first token can satisfy it."""
        return _compile(self._tokenizer_or_error(), source, self.words)

    def _tokenizer_or_error(self) -> LLTokenizer:
        with self._making:
            if self._tokenizer is None and not self._no_tokenizer:
                try:
                    self._tokenizer = self._make_tokenizer()
                    self.words = (self._tokenizer.vocab_size + 31) // 32
                except ValueError:  # neither byte-level nor with byte fallback
                    self._no_tokenizer = True
        if self._tokenizer is None:
            raise ValueError("no grammar can be enforced with this model's tokenizer")
        return self._tokenizer

    def close(self) -> None:
        """Ends the threads; compilations that have not begun are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _compile(tokenizer: LLTokenizer, source: Source, words: int) -> LLMatcher:
    """Raises ValueError where the source is wrong or no first token can satisfy it."""
    whole = {"name": "whole", "lark_grammar": f"{_OPTIONS}\nstart: @{source[0]['name']}"}
    text = json.dumps({"grammars": [whole, *source]})
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    bits = np.zeros(words, dtype=np.int32)
    if not matcher.is_error():
        # The first mask builds the lexer, and shows grammars that no text satisfies.
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    if matcher.is_error():
        raise ValueError(in_words(matcher.get_error()))
    return matcher
