"""PrefillAdder: the token budgets of one step's prefill rows; admits, cuts, refuses.

Lives for one pass and owns nothing. It reserves: pages are taken after it is done, so what it
calls available stays constant but for the locks it takes.

    available = free + evictable
    left_total = available - taken_total    for the whole life of the admitted (a forecast)
    left_step  = available - taken_step     for this step alone (hard)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from runtime.scheduling.accounting import BlockingTerm
from runtime.scheduling.page_allocator import whole_pages
from runtime.scheduling.schedule_batch import Admitted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.config import SchedulerConfig
    from runtime.request import Request
    from runtime.scheduling.radix_cache import PrefixMatch
    from runtime.scheduling.radix_tree import Node

NO_LIMIT = 1 << 60


def kv_need(extend_tokens: int, output_tokens: int, page_size: int) -> int:
    """KV tokens that a request is taken to need: what it computes, its outputs, and a page, since
    an extend can open one more.

    The one bound of intake and admission: a pool fits it with *more* available tokens than that.
    Intake asks it with the whole input in whole pages and all outputs, so that what it lets in is
    admitted once nobody else is left.
    """
    return extend_tokens + output_tokens + page_size


class Verdict(Enum):
    """What the next candidate may expect."""

    CONTINUE = "continue"
    NO_TOKEN = "no_token"  # no KV left: the batch is full
    OTHER = "other"  # a budget of this step is used up


class Memory(Protocol):
    """What the adder needs of the KV pool."""

    @property
    def available_tokens(self) -> int: ...
    def lock(self, node: Node | None) -> None: ...
    def unlock(self, node: Node | None) -> None: ...


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What the running rows take from a step's budgets.

    Args:
        mixed_rows: decode rows that the step will carry beside the prefill (M).
        mixed_page_tokens: tokens of the new pages that those rows need in this step.
        running: every running request, carried or not: their outputs are to come.
        new_token_ratio: share of the remaining output that is reserved for each.
    """

    mixed_rows: int
    mixed_page_tokens: int
    running: Sequence[Request]
    new_token_ratio: float


class PrefillAdder:
    """One step's budgets.

    Args:
        chunk_tokens: prefill tokens of the step, the mixed rows' share included; None: prompts
            are not cut.
        exact_chunk: `chunk_tokens` are prefill tokens alone (the size was chosen for a step with
            these decode rows).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: Memory,
        load: StepLoad,
        chunk_tokens: int | None,
        *,
        exact_chunk: bool = False,
    ) -> None:
        page = config.page_size
        self._config = config
        self._memory = memory
        self._page = page
        self._load = load
        clip = self._clip = config.clip_max_new_tokens
        self.taken_step = load.mixed_page_tokens
        outputs = sum([min(r.max_new_tokens - r.launched_tokens, clip) for r in load.running])
        self.taken_total: float = load.mixed_rows + load.new_token_ratio * outputs
        # Where a piece of a prompt may end.
        self._cut = config.truncation_align_size or page
        self.left_input, self.left_chunk = _prefill_budgets(
            config, load.mixed_rows, chunk_tokens, exact_chunk=exact_chunk
        )
        self._chunking = chunk_tokens is not None
        self.admitted: list[Admitted] = []
        self.new_requests = 0
        self.chunked: Request | None = None  # the request whose prompt is still not complete
        self.term = BlockingTerm.NONE  # the term that gave the last verdict other than CONTINUE
        self._lifetimes: list[tuple[float, int]] | None = None

    @property
    def left_total(self) -> int:
        return math.floor(self._memory.available_tokens - self.taken_total)

    @property
    def left_step(self) -> int:
        return self._memory.available_tokens - self.taken_step

    def need(self, request: Request, match: PrefixMatch) -> int:
        """KV tokens that a waiting request is taken to need beside its prefix."""
        extend = request.scheduling.target - match.tokens
        return kv_need(extend, self._reserve(request), self._page)

    def add_chunked(self, request: Request) -> bool:
        """Goes on with the pending chunk, which may end inside a page unless cuts are aligned.

        Returns: False where it waits with the KV it has: too little is free (the term is then
            kv_step), or shorter prompts have taken this step.
        """
        self.chunked = request
        tokens = self._piece(request, min(self.left_chunk, self.left_total, self.left_step))
        if tokens <= 0:
            lacks_kv = self._piece(request, self.left_chunk) > 0
            self.term = BlockingTerm.KV_STEP if lacks_kv else self._cut_short
            return False
        last = tokens == request.scheduling.target - request.length
        if last:
            self.chunked = None
        self.admitted.insert(0, Admitted(request, None, request.length, tokens, last))
        self._charge(tokens, self._reserve(request) if last else 0)
        return True

    def _piece(self, chunked: Request, most: int) -> int:
        """Tokens of the next piece of the pending chunk, at most so many; <= 0: none."""
        left = chunked.scheduling.target - chunked.length
        if most < left and self._config.truncation_align_size:
            return self._cut_behind(chunked.length, most)
        return min(most, left)

    def add_ahead(
        self, request: Request, match: PrefixMatch, chunked: Request, credit: float, most: int
    ) -> int:
        """Admits a short prompt, whole, ahead of the pending chunk, which has not been added yet.

        Args:
            credit: tokens that may be taken from the chunk.
            most: tokens that a step may compute of prompts without a history.
        Returns: tokens that are taken, at most this step's; 0: it was not admitted.
        """
        extend = request.scheduling.target - match.tokens
        whole = self._ceil(extend)
        room = max(self.left_chunk, 0)
        piece = self._piece(chunked, room)
        rest = max(self._piece(chunked, max(room - whole, 0)), 0)
        price = max(min(whole, room), piece - rest, 1)
        cap = self._config.max_prefill_requests
        if price > credit or whole > min(most, self.left_input) or 0 < cap <= self.new_requests:
            return 0
        self._memory.lock(match.node)
        if self._leaves_room(request, match, chunked, piece):
            self._admit(request, match, extend, whole=True)
            return price
        self._memory.unlock(match.node)
        return 0

    def _leaves_room(
        self, request: Request, match: PrefixMatch, chunked: Request, piece: int
    ) -> bool:
        """Whether there is KV for a request and also for all that the pending chunk is still to
        need: a long prompt is put off for a while, and never starved."""
        extend = request.scheduling.target - match.tokens
        left = self._ceil(chunked.scheduling.target - chunked.length)
        total = self.need(request, match) + kv_need(left, self._reserve(chunked), self._page)
        step = self._ceil(extend) + self._ceil(piece) + 2 * self._page
        if total >= self.left_total or step > self.left_step:
            return False
        return not (self._knows_length(request) and self._check_known_length(request, extend))

    def add(self, request: Request, match: PrefixMatch) -> Verdict:
        """Admits a waiting request, whole or cut, or refuses it.

        The request was admitted if it is the last of `admitted`; the verdict is for the next one.
        """
        cap = self._config.max_prefill_requests
        if cap and self.new_requests >= cap:
            return self._refuse(Verdict.OTHER, BlockingTerm.POLICY)
        extend = request.scheduling.target - match.tokens
        if self._knows_length(request):
            refusal = self._check_known_length(request, extend)
            return refusal or self._admit_cut(request, match, extend)
        need = self.need(request, match)
        if need >= self.left_total:
            return self._refuse(Verdict.NO_TOKEN, BlockingTerm.KV_TOTAL)
        if not self._chunking and self.new_requests and self._ceil(extend) >= self.left_input:
            return self._refuse(Verdict.OTHER, BlockingTerm.INPUT_BUDGET)
        # The matched prefix itself may be what makes up most of the evictable tokens.
        self._memory.lock(match.node)
        verdict = (
            self._refuse(Verdict.NO_TOKEN, BlockingTerm.KV_TOTAL)
            if need >= self.left_total
            else self._admit_cut(request, match, extend)
        )
        if not (self.admitted and self.admitted[-1].request is request):
            self._memory.unlock(match.node)
        return verdict

    def set_aside(self, request: Request, match: PrefixMatch, tokens: int) -> bool:
        """Sets KV aside for `tokens` more tokens of a waiting request's prefix, which are to be
        loaded, and locks what is cached of it. Returns whether so much is left beside what the
        running rows reserve, and would be enough for the whole request."""
        self._memory.lock(match.node)
        decoding = 0 if self._load.mixed_rows else self._next_page_tokens()
        if self.need(request, match) < self.left_total and tokens + decoding < self.left_step:
            self.taken_total += tokens
            self.taken_step += tokens
            return True
        self._memory.unlock(match.node)
        return False

    def _next_page_tokens(self) -> int:
        """Tokens of the new pages that one more token for each running row needs."""
        return sum([not request.length % self._page for request in self._load.running]) * self._page

    def _admit_cut(self, request: Request, match: PrefixMatch, extend: int) -> Verdict:
        """Admits a request with as much of it as the step still takes."""
        whole = self._ceil(extend) <= self.left_chunk
        tokens = extend if whole else self._cut_behind(match.tokens, self.left_chunk)
        # An aligned cut may leave some of the chunk; only one prompt at a time is ever cut.
        if tokens <= 0 or (not whole and self.chunked is not None):
            return self._refuse(Verdict.OTHER, self._cut_short)
        if self._ceil(tokens) > self.left_step:
            return self._refuse(Verdict.NO_TOKEN, BlockingTerm.KV_STEP)
        self._admit(request, match, tokens, whole=whole)
        return self._verdict()

    def _admit(self, request: Request, match: PrefixMatch, tokens: int, *, whole: bool) -> None:
        self.admitted.append(Admitted(request, match, match.tokens, tokens, whole))
        self.new_requests += 1
        if not whole:
            self.chunked = request
        self._charge(tokens, self._reserve(request) if whole else 0)

    def _cut_behind(self, start: int, most: int) -> int:
        """Tokens of a piece from `start` on that ends where a prompt may be cut; <= 0: none."""
        return (start + most) // self._cut * self._cut - start

    def _knows_length(self, request: Request) -> bool:
        """Whether it is known how long a request will run and what it will hold."""
        return request.sampling.ignore_eos and self._config.disable_radix_cache

    def _check_known_length(self, request: Request, extend: int) -> Verdict | None:
        """Whether a request whose output length is known, nothing of it cached, fits beside the
        others until each has ended; None if it does."""
        extend = self._ceil(extend)
        if extend + self._page > min(self.left_step, self.left_total):
            return self._refuse(Verdict.NO_TOKEN, BlockingTerm.KV_TOTAL)
        if self._lifetimes is None:
            earlier = [*self._load.running, *(item.request for item in self.admitted)]
            self._lifetimes = [self._lifetime(other) for other in earlier]
        lives = sorted([*self._lifetimes, self._lifetime(request)])
        free = self.left_step - extend
        for index, (left, held) in enumerate(lives):
            live = len(lives) - index
            if free - left * live <= live:
                return self._refuse(Verdict.NO_TOKEN, BlockingTerm.KV_TOTAL)
            free += held
        self._lifetimes.append(self._lifetime(request))
        return None

    def _lifetime(self, request: Request) -> tuple[float, int]:
        """(output tokens left, tokens given back at the end)."""
        ratio = 1.0 if request.sampling.ignore_eos else self._load.new_token_ratio
        held = max(len(request.pages) * self._page, self._ceil(request.scheduling.target))
        return max(request.max_new_tokens * ratio - request.launched_tokens, 0.0), held

    def _reserve(self, request: Request) -> int:
        return min(max(request.remaining_tokens, 0), self._clip)

    def _charge(self, extend: int, decode: int) -> None:
        # One page more than the tokens need: an extend can open one.
        extend = self._ceil(extend)
        self.taken_total += extend + decode + self._page
        self.taken_step += extend + self._page
        self.left_input -= extend
        self.left_chunk -= extend

    @property
    def _cut_short(self) -> BlockingTerm:
        """Which of the two bounds a piece of a prompt ends at."""
        by_input = self.left_input <= self.left_chunk
        return BlockingTerm.INPUT_BUDGET if by_input else BlockingTerm.CHUNK_BUDGET

    def _verdict(self) -> Verdict:
        if self.left_total <= 0:
            return self._refuse(Verdict.NO_TOKEN, BlockingTerm.KV_TOTAL)
        if self.left_step <= 0:
            return self._refuse(Verdict.NO_TOKEN, BlockingTerm.KV_STEP)
        if self.left_input <= 0:
            return self._refuse(Verdict.OTHER, BlockingTerm.INPUT_BUDGET)
        if self.left_chunk <= 0:
            return self._refuse(Verdict.OTHER, BlockingTerm.CHUNK_BUDGET)
        return Verdict.CONTINUE

    def _refuse(self, verdict: Verdict, term: BlockingTerm) -> Verdict:
        self.term = term
        return verdict

    def _ceil(self, tokens: int) -> int:
        return whole_pages(tokens, self._page)


def _prefill_budgets(
    config: SchedulerConfig, mixed_rows: int, chunk_tokens: int | None, *, exact_chunk: bool
) -> tuple[int, int]:
    """Prefill tokens that a step may have in all, and those that prompts may be cut to fit in."""
    page, align, most = config.page_size, config.truncation_align_size, config.max_prefill_tokens
    if chunk_tokens is None:
        return max(most - mixed_rows, page), NO_LIMIT
    # However many decode rows there are, prefill never starves behind them; and whatever size was
    # chosen, it reaches the next place where the first prompt may be cut.
    size = min(chunk_tokens, most)
    floor = max(min(size, max(page, size // 4 // page * page)), align)
    inputs = max(most - mixed_rows, floor)
    chunk = max(chunk_tokens, align) if exact_chunk else max(chunk_tokens - mixed_rows, floor)
    return inputs, min(inputs, chunk)
