"""Admission: which prompts, or pieces of prompts, the next step computes."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from runtime.scheduling.accounting import BlockingTerm
from runtime.scheduling.chunk_sizer import ChunkLoad, ChunkSize, make_chunk_sizer
from runtime.scheduling.kv_memory import match_limit
from runtime.scheduling.page_allocator import whole_pages
from runtime.scheduling.prefill_adder import PrefillAdder, StepLoad, Verdict
from runtime.scheduling.prefill_delayer import PrefillDelayer
from runtime.scheduling.radix_cache import PrefixMatch
from runtime.scheduling.radix_tree import TOKEN_BYTES
from runtime.scheduling.retraction import WithoutVictims, fewest_victims, preemption_order
from runtime.scheduling.waiting_queue import QueueOrder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from runtime.config import SchedulerConfig
    from runtime.request import Request
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.lifecycle import Lifecycle
    from runtime.scheduling.prefill_adder import Memory
    from runtime.scheduling.radix_tree import Node
    from runtime.scheduling.schedule_batch import Admitted

WORTH_WAITING_TOKENS = 32
MAX_LEFT = 64  # requests left for their twins in one pass; it then stops looking
AHEAD_STEPS = 4  # short prompts may save up their share of so many steps
_FULL = (BlockingTerm.ROWS, BlockingTerm.KV_TOTAL, BlockingTerm.KV_STEP)


class Admission:
    """Walks the queue with the budgets of one step.

    "Full" is nothing but an observable with its term: every pass looks at rows and KV anew. That
    costs a sum over the running rows and one match of the first waiting prompt, whatever the length
    of the queue; a remembered refusal saves that much, and is wrong as soon as one of the many
    things that it rests on has changed unnoticed.

    Args:
        life: queue, running list and pending chunk; changed by `build`.
    """

    def __init__(self, config: SchedulerConfig, life: Lifecycle) -> None:
        self._life = life
        self._memory = life.memory
        self.term = BlockingTerm.NONE  # why the last pass admitted no more
        self.size = ChunkSize(None)  # of the last pass that had prompts to compute
        self._credit = 0.0  # tokens that short prompts may take from the pending chunk
        self.configure(config)

    def configure(self, config: SchedulerConfig) -> None:
        """Takes new options; what was learned under the old ones is forgotten."""
        self._config = config
        self.sizer = make_chunk_sizer(config)
        self._delayer = PrefillDelayer(config) if config.enable_prefill_delayer else None
        self._order = QueueOrder(config, self._life.queue, self._memory)

    @property
    def full(self) -> bool:
        """Whether the last pass had to refuse somebody for want of rows or KV."""
        return self.term in _FULL

    def build(
        self, now: float, ratio: float, *, retracted: bool, first: Request | None
    ) -> list[Admitted]:
        """The prefill rows of this pass, the pending chunk's next piece first. Admitted requests
        have left the queue, with a lock on their prefix.

        Args:
            ratio: the new-token ratio.
            retracted: this pass has retracted rows, so nobody new is admitted.
            first: an urgent request that is sure to start (`urgent_start`) if no other is looked
                at before it; it is not held back for others.
        """
        chunked = self._life.chunked
        rows = self._rows_to_fill(now, retracted=retracted, urgent=first is not None)
        built: list[Admitted] = []
        if rows > 0 or chunked is not None:
            self.size = self._size(self._life.running, chunked)
            adder = self._adder(ratio, self.size, self._life.running, self._memory)
            pending = PendingPrefixes(self._memory)
            if chunked is not None:
                pending.add(chunked)
            self._credit = self._credit_in(adder, chunked)
            if chunked is not None:
                if rows > 0:
                    self._admit_ahead(adder, chunked, pending, rows, now, first)
                if not adder.add_chunked(chunked):
                    self._life.clocks.single_out(chunked, adder.term)
            admitted = self._admit_waiting(adder, pending, rows, now, first) if rows > 0 else []
            built = adder.admitted
            for item in built:
                if item.match is not None:
                    self._life.admit(item.request, item.match.tokens, now)
            self._order.note_admitted(admitted, now)
            if self._memory.tier is not None:
                self._memory.tier.take_pages()
        if self._delayer is not None:
            self._delayer.finalize(len(built))
        return built

    @property
    def urgent(self) -> bool:
        """Whether the first waiting request has so high a priority that it may push somebody
        out."""
        config, queue = self._config, self._life.queue
        admitted = self._life.admitted
        if config.disable_priority_preemption or not queue or not admitted:
            return False
        lowest = min([request.priority for request in admitted])
        return queue.highest_priority() - lowest > config.priority_preemption_threshold

    def urgent_start(self, now: float, ratio: float) -> tuple[Request | None, list[Request]]:
        """The first waiting request, an urgent one, and the fewest admitted requests without which
        it starts in this pass; (None, none) where it cannot.

        The order of the queue is not to be asked again for it: a random one is drawn anew, and one
        that depends on the cache, or on how many wait, may change as soon as the victims are gone.
        """
        candidate = next(iter(self._candidates(now)))
        _prepare_prefill(candidate)
        match = self._memory.match(candidate)
        tier = self._memory.tier
        if tier is not None and tier.is_loading(candidate):
            return None, []

        def admits(victims: Sequence[Request]) -> bool:
            return self._would_admit(candidate, match, ratio, victims)

        rows_missing = 1 - self._free_rows()
        if rows_missing <= 0 and admits(()):
            waits = tier is not None and tier.find(candidate, match, match_limit(candidate))
            return (None if waits else candidate), []
        threshold, chunked = self._config.priority_preemption_threshold, self._life.chunked
        order = preemption_order(self._life.admitted, candidate.priority, threshold)
        least = max(rows_missing, 1)
        victims = fewest_victims(order, least, admits)
        if chunked in order:
            # It may be the pending chunk alone that the candidate would wait behind.
            order.sort(key=lambda request: request is not chunked)
            sooner = fewest_victims(order, least, admits)
            victims = sooner if len(sooner) < len(victims) else victims
        return (candidate if victims else None), victims

    def _would_admit(
        self, candidate: Request, match: PrefixMatch, ratio: float, victims: Sequence[Request]
    ) -> bool:
        """Whether a waiting request would be the first to be admitted if the victims were gone."""
        life = self._life
        running = [request for request in life.running if request not in victims]
        chunked = None if life.chunked in victims else life.chunked
        left = self._memory.left_by(victims, candidate, match.tokens)
        memory = WithoutVictims(self._memory, victims, left)
        adder = self._adder(ratio, self._size(running, chunked), running, memory)
        if chunked is not None:
            pending = PendingPrefixes(self._memory)
            pending.add(chunked)
            if pending.worth_waiting(candidate, match):
                return False
        match = PrefixMatch(match.tokens + left, match.node)
        if chunked is not None:
            credit, most = self._credit_in(adder, chunked), self._most_ahead(adder, running)
            ahead = credit and candidate.priority >= chunked.priority
            if not (ahead and adder.add_ahead(candidate, match, chunked, credit, most)):
                adder.add_chunked(chunked)
        if not _is_last(adder, candidate):
            adder.add(candidate, match)
        admitted = _is_last(adder, candidate)
        if admitted:
            memory.unlock(match.node)
        return admitted

    def _rows_to_fill(self, now: float, *, retracted: bool, urgent: bool) -> int:
        """How many requests may be admitted in this pass; notes the term where it is none."""
        if not self._life.queue:
            self._blocked_by(BlockingTerm.NEXT_PASS)
            return 0
        if retracted:
            self._blocked_by(BlockingTerm.RETRACTED)
            return 0
        rows = self._free_rows()
        if rows <= 0:
            self._blocked_by(BlockingTerm.ROWS)
            return 0
        if not urgent and not self._delayer_allows(now, rows):
            self._blocked_by(BlockingTerm.DELAYER)
            return 0
        return rows

    def _free_rows(self) -> int:
        pending = self._life.chunked is not None
        most = self._config.max_running_requests - len(self._life.running) - pending
        return min(most, len(self._memory.free_rows))

    def _delayer_allows(self, now: float, rows: int) -> bool:
        if self._delayer is None or self._life.chunked is not None:
            return True
        usage = 1 - self._memory.available_tokens / self._config.usable_tokens
        return self._delayer.allow(
            now,
            waiting=len(self._life.queue),
            running=len(self._life.running),
            free_rows=rows,
            kv_usage=usage,
        )

    def _credit_in(self, adder: PrefillAdder, chunked: Request | None) -> float:
        """Tokens that short prompts may take from the pending chunk in this pass: their share of
        its steps, saved up over a few of them, and as much as one cut of it at least."""
        share = self._config.prefill_share
        if chunked is None or not share:
            return 0.0
        step = share * adder.left_chunk
        unit = self._config.truncation_align_size or self._config.page_size
        return min(self._credit + step, max(AHEAD_STEPS * step, unit))

    def _most_ahead(self, adder: PrefillAdder, running: Sequence[Request]) -> int:
        """Tokens that a step beside these rows may compute of prompts that have no history: where
        steps are sized by time, more than of the pending chunk, which looks back on its own."""
        size = self._size(running, None)
        tokens = size.tokens or 0
        if not size.exact:
            tokens -= len(self._mixed(running))
        # Where time bounds a step to parts of a page, a page is still what a prompt begins with.
        return max(tokens, adder.left_chunk, self._config.page_size)

    def _admit_ahead(
        self,
        adder: PrefillAdder,
        chunked: Request,
        pending: PendingPrefixes,
        rows: int,
        now: float,
        first: Request | None,
    ) -> None:
        """Admits short prompts ahead of the pending chunk, out of turn, on credit. Without this
        every short prompt waits until all long ones before it are computed, one after another."""
        queue = self._life.queue
        if not self._credit or queue.highest_priority() < chunked.priority:
            return
        most = self._most_ahead(adder, self._life.running)
        shortest = self._order.shortest(now, most)
        for request in _led_by(first, shortest):
            if len(adder.admitted) >= rows:
                break
            _prepare_prefill(request)
            match = self._memory.match(request)
            if pending.worth_waiting(request, match) or self._may_load(request, match):
                continue
            price = adder.add_ahead(request, match, chunked, self._credit, most)
            if not price:
                break  # the next one is longer, or must not take what this one needs
            self._credit -= price
            pending.add(request)
        self._order.note_passed_over(shortest, [item.request for item in adder.admitted], now)

    def _admit_waiting(
        self,
        adder: PrefillAdder,
        pending: PendingPrefixes,
        rows: int,
        now: float,
        first: Request | None,
    ) -> list[Request]:
        self._blocked_by(BlockingTerm.NEXT_PASS)
        admitted: list[Request] = []
        ahead = {item.request for item in adder.admitted}
        rows -= sum(item.match is not None for item in adder.admitted)
        for request in _led_by(first, self._candidates(now)):
            if request in ahead:
                continue
            if len(admitted) >= rows:
                self._blocked_by(BlockingTerm.ROWS)
                break
            _prepare_prefill(request)
            match = self._memory.match(request)
            if pending.worth_waiting(request, match):
                self._leave_for_twin(request, pending)
                if pending.left < MAX_LEFT:
                    continue
                self._blocked_by(BlockingTerm.POLICY)
                break
            if request is not first and self._waits_for_load(request, match, adder, rows):
                continue
            pending.add(request)
            verdict = adder.add(request, match)
            if _is_last(adder, request):
                admitted.append(request)
            if verdict is not Verdict.CONTINUE:
                self._blocked_by(adder.term)
                break
        return admitted

    def _may_load(self, request: Request, match: PrefixMatch) -> bool:
        """Whether a request's prefix is being loaded, or may be."""
        tier = self._memory.tier
        if tier is None:
            return False
        return tier.is_loading(request) or (
            tier.find(request, match, match_limit(request)) is not None
        )

    def _waits_for_load(
        self, request: Request, match: PrefixMatch, adder: PrefillAdder, rows: int
    ) -> bool:
        """Whether a request waits for its prefix to be loaded; decides on the load where there is
        KV for it."""
        tier = self._memory.tier
        if tier is None:
            return False
        if not tier.is_loading(request):
            found = tier.find(request, match, match_limit(request))
            if found is None:
                return False
            # Whoever else loads the same, or is to have the last rows, goes first.
            if not tier.is_read(match, found) and tier.loading < rows:
                if not adder.set_aside(request, match, found.tokens - match.tokens):
                    return False
                tier.book(request, match, found)
        self._life.clocks.single_out(request, BlockingTerm.KV_LOAD)
        return True

    def _candidates(self, now: float) -> Iterable[Request]:
        return self._order.candidates(now, self._life.counters.computed_tokens)

    def _leave_for_twin(self, request: Request, pending: PendingPrefixes) -> None:
        pending.left += 1
        self._life.counters.shared_prefix_skips += 1
        self._life.clocks.single_out(request, BlockingTerm.SHARED_PREFIX)

    def _size(self, running: Sequence[Request], chunked: Request | None) -> ChunkSize:
        mixed = self._mixed(running)
        context = sum([request.length for request in mixed])
        history = 0 if chunked is None else chunked.length
        held_back = len(running) - len(mixed)
        return self.sizer.choose(ChunkLoad(history, len(mixed), context, held_back))

    def _adder(
        self, ratio: float, size: ChunkSize, running: Sequence[Request], memory: Memory
    ) -> PrefillAdder:
        """The budgets of a pass, beside these running rows."""
        mixed = self._mixed(running)
        page_tokens = self._memory.new_page_tokens(mixed)
        load = StepLoad(len(mixed), page_tokens, running, ratio)
        return PrefillAdder(self._config, memory, load, size.tokens, exact_chunk=size.exact)

    def _mixed(self, running: Sequence[Request]) -> Sequence[Request]:
        """The running rows that a step with prefill rows carries."""
        return [] if self._config.disable_mixed_chunk else running

    def _blocked_by(self, term: BlockingTerm) -> None:
        """What the first request that is left waits for, and all behind it."""
        self.term = BlockingTerm.NONE if term is BlockingTerm.NEXT_PASS else term
        self._life.clocks.current = term


def _is_last(adder: PrefillAdder, request: Request) -> bool:
    """Whether a request is the one admitted last."""
    return bool(adder.admitted) and adder.admitted[-1].request is request


def _led_by(first: Request | None, others: Iterable[Request]) -> Iterable[Request]:
    """`first`, if anybody, then the others in their order."""
    if first is None:
        return others
    return chain((first,), (request for request in others if request is not first))


def _prepare_prefill(request: Request) -> None:
    """Sets what a waiting request computes before it samples, should it be admitted."""
    request.scheduling.target = len(request.input_ids) + len(request.output_ids)


class PendingPrefixes:
    """Which prefixes are about to be in the cache: those of the pending chunk and of the requests a
    pass has admitted or refused (in-batch prefix caching).

    Of requests that arrive together with the same prefix, the first computes it and the others wait
    one pass for it, instead of computing it side by side. Two prompts that agree beyond what is
    cached end their cached part at the same node of the tree, and go on with the same tokens. So a
    pending prompt is noted as that node with the tokens that follow, and one look-up finds it
    however many others there are, and however long the prefix is.

    Valid within one pass: nothing is put into the cache or taken out of it meanwhile.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        # What is shared is worth a pass only from that many tokens on, and comes in pages.
        self._gain = whole_pages(WORTH_WAITING_TOKENS, memory.page_size)
        self._heads: set[tuple[Node | str, bytes]] = set()
        self.left = 0

    def add(self, request: Request) -> None:
        # All that is cached of it counts, not only what it may use: the others may use more.
        match = self._memory.whole_match(request, self._gain)
        if match is not None:
            self._heads.add(self._head(request, match))

    def worth_waiting(self, request: Request, match: PrefixMatch) -> bool:
        """Whether some pending prompt will soon extend what is cached for this one by enough."""
        if not self._heads:
            return False
        match = self._memory.pending_match(request, match)
        if match.tokens + self._gain > match_limit(request):
            return False
        return self._head(request, match) in self._heads

    def _head(self, request: Request, match: PrefixMatch) -> tuple[Node | str, bytes]:
        first = match.tokens * TOKEN_BYTES
        following = request.scheduling.key[first : first + self._gain * TOKEN_BYTES]
        return match.node or request.namespace, following
