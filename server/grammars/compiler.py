"""Structured output: grammars compiled off the event loop, and a matcher per request.

Which library: llguidance 1.9 or xgrammar 0.2.9, compared on one core with a 49,152-token byte-level
BPE and the 105 schemas of tests/server/api/json_schemas.json, 20 random walks through each mask:

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
Two holes of it are closed in grammar_sources.py (escaped spellings of keys; minProperties counted
with equal keys). To be compared again when xgrammar reports unsupported keywords as errors.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from server.grammars.sources import Source

CACHED_GRAMMARS = 256
# State and schema stay out of messages: they may hold what the prompt holds.
_LIMITS = LLParserLimits(verbose_errors=False)


def hugging_face_tokenizer(
    tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]
) -> LLTokenizer:
    """The grammar library's view of a `tokenizers` file (about 0.2 s for 50,000 tokens).

    Args: vocab_size: ids that the model can sample; at least as many as the tokenizer has.
    """
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids))


class GrammarMatcher:
    """What one request may still say. Used by the engine's loop alone.

    It follows committed tokens only, so a retracted request, whose committed tokens are computed
    again, goes on with it unchanged.

    Attributes: ready: always; a grammar is compiled before its request is queued.
        failed: why it can go no further (a limit of the library), None while all is well.
    """

    __slots__ = ("_ends", "_matcher", "_taken", "_words", "failed", "min_tokens", "ready")

    def __init__(
        self, matcher: LLMatcher, words: int, ends: NDArray[np.int64], min_tokens: int
    ) -> None:
        self._matcher = matcher
        self._words = words
        self._ends = ends
        self._taken = 0
        self.min_tokens = min_tokens
        self.ready = True
        self.failed: str | None = None

    def fill_mask(self, bits: NDArray[np.int32]) -> None:
        """Writes which tokens may come next: bit t % 32 of word t // 32 allows token t.

        Once the output is complete, only end-of-sequence tokens are allowed. The ends are held
        back until min_tokens, unless nothing else is left: there the grammar wins. After a failure
        nothing is allowed.
        """
        # A tokenizer may know more ids than the model can sample.
        row = bits if bits.size == self._words else np.zeros(self._words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if row is not bits:
            bits[:] = row[: bits.size]
        if self._matcher.is_error():
            self.failed = self.failed or _sentence(self._matcher.get_error())
            bits.fill(0)
        elif self._taken < self.min_tokens and not self._matcher.is_stopped():
            self._hold_ends(bits)

    def _hold_ends(self, bits: NDArray[np.int32]) -> None:
        kept = bits.view(np.uint32).copy()
        masks = (1 << (self._ends & 31)).astype(np.uint32)
        np.bitwise_and.at(kept, self._ends >> 5, ~masks)
        if kept.any():
            bits[:] = kept.view(np.int32)

    def accept(self, token_id: int) -> None:
        """Takes a committed token. What comes after the end is ignored."""
        if self.failed is not None or self._matcher.is_stopped():
            return
        self._taken += 1
        if not self._matcher.consume_token(token_id):
            self.failed = _sentence(self._matcher.get_error())

    def is_terminated(self) -> bool:
        """The output is complete and can only end."""
        return self.failed is None and bool(self._matcher.is_stopped())


class CompiledGrammar:
    """A grammar from which any number of matchers start (n choices, equal requests)."""

    def __init__(self, matcher: LLMatcher, words: int, eos_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._words = words
        self._eos_ids = tuple(eos_ids)

    def matcher(self, min_tokens: int = 0, stop_token_ids: Iterable[int] = ()) -> GrammarMatcher:
        """A matcher at the start.

        Args: min_tokens, stop_token_ids: EOS and these cannot come before so many tokens, where
            the grammar leaves a choice. (The request's own min_tokens must then be 0: a ban that
            is applied after the mask could leave no token at all.)
        """
        ends = np.array(sorted({*self._eos_ids, *stop_token_ids}), dtype=np.int64)
        return GrammarMatcher(self._matcher.deep_copy(), self._words, ends, min_tokens)


class GrammarCompiler:
    """Compiles sources in its own threads and keeps the latest.

    Args:
        make_tokenizer: called once, in such a thread, at the first compilation.
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
        self._make_tokenizer = make_tokenizer
        self._tokenizer: asyncio.Future[LLTokenizer] | None = None
        self._eos_ids = tuple(sorted(eos_ids))
        self._cache: OrderedDict[str, asyncio.Future[CompiledGrammar]] = OrderedDict()
        self._cache_size = cache_size
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar")

    async def compile(self, source: Source, param: str) -> CompiledGrammar:
        """The compiled grammar. Equal sources are compiled once, also while that goes on.

        Raises: InvalidRequest: naming `param` and what of it cannot be enforced.
        """
        key = json.dumps(source)
        task = self._cache.get(key)
        if task is None:
            task = asyncio.ensure_future(self._compile(source))
            self._cache[key] = task
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        try:
            # A client that leaves must not cancel what others wait for.
            return await asyncio.shield(task)
        except ValueError as error:
            self._cache.pop(key, None)
            raise InvalidRequest(f"{param}: {error}", param=param) from None

    async def _compile(self, source: Source) -> CompiledGrammar:
        loop = asyncio.get_running_loop()
        if self._tokenizer is None:
            self._tokenizer = loop.run_in_executor(self._pool, self._make_tokenizer)
        try:
            tokenizer = await asyncio.shield(self._tokenizer)
        except ValueError:  # neither byte-level nor with byte fallback
            raise ValueError("no grammar can be enforced with this model's tokenizer") from None
        words = (tokenizer.vocab_size + 31) // 32
        work = partial(_compile, tokenizer, source, words)
        return CompiledGrammar(await loop.run_in_executor(self._pool, work), words, self._eos_ids)

    def close(self) -> None:
        """Ends the threads; compilations that have not begun are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _compile(tokenizer: LLTokenizer, source: Source, words: int) -> LLMatcher:
    """Raises ValueError where the source is wrong or no first token can satisfy it."""
    text = json.dumps({"grammars": source})
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    bits = np.zeros(words, dtype=np.int32)
    if not matcher.is_error():
        # The first mask builds the lexer, and shows grammars that no text satisfies.
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    if matcher.is_error():
        raise ValueError(_sentence(matcher.get_error()))
    return matcher


_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")


def _sentence(message: str) -> str:
    """The library's message for a client: one line, without parser state."""
    if found := _UNIMPLEMENTED.search(message):
        keys: Any = json.loads(found[1])
        return f"keywords of the schema that cannot be enforced: {', '.join(keys)}"
    if "NoExtensionBias" in message:
        return "no text satisfies it"
    head = re.split("<(?:state|backtrace|non-verbose)", message)[0].strip()
    return re.sub(r"\s+", " ", head)[:500] or "the grammar cannot be compiled"
