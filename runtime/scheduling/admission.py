"""Admission: which prompts, or pieces of prompts, the next step computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.scheduling.chunk_sizer import ChunkLoad, ChunkSize, make_chunk_sizer
from runtime.scheduling.pending_prefixes import MAX_LEFT, PendingPrefixes
from runtime.scheduling.preemption import choose_preempted
from runtime.scheduling.prefill_adder import PrefillAdder, StepLoad, Verdict
from runtime.scheduling.prefill_delayer import PrefillDelayer
from runtime.scheduling.queue_order import QueueOrder
from runtime.scheduling.wait_clocks import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runtime.config import SchedulerConfig
    from runtime.request import Request
    from runtime.scheduling.lifecycle import Lifecycle
    from runtime.scheduling.prefill_adder import Admitted


_FULL = (Reason.ROWS, Reason.KV_TOTAL, Reason.KV_STEP)


class Admission:
    """Walks the queue with the budgets of one step.

    "Full" is nothing but an observable with its reason: every pass looks at rows and KV anew. That
    costs a sum over the running rows and one match of the first waiting prompt, whatever the length
    of the queue; a remembered refusal saves that much, and is wrong as soon as one of the many
    things that it rests on has changed unnoticed.

    Args:
        life: queue, running list and pending chunk; changed by `build`.
    """

    def __init__(self, config: SchedulerConfig, life: Lifecycle) -> None:
        self._life = life
        self._memory = life.memory
        self.reason = Reason.NONE  # why the last pass admitted no more
        self.chunk_tokens: int | None = None
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
        return self.reason in _FULL

    # The pass

    def build(self, now: float, ratio: float, *, retracted: bool) -> list[Admitted]:
        """The prefill rows of this pass, the pending chunk's next piece first. Admitted requests
        have left the queue, with a lock on their prefix.

        Args:
            ratio: the new-token ratio.
            retracted: this pass has retracted rows, so nobody new is admitted.
        """
        chunked = self._life.chunked
        rows = self._rows_to_fill(now, retracted=retracted)
        built: list[Admitted] = []
        if rows > 0 or chunked is not None:
            adder = self._adder(ratio, self._choose_size())
            if chunked is not None:
                adder.add_chunked(chunked)
                if not adder.admitted:
                    self._life.clocks.single_out(chunked, Reason.KV_STEP)
            admitted = self._admit_waiting(adder, rows, now) if rows > 0 else []
            built = adder.admitted
            for item in built:
                if item.match is not None:
                    self._life.admitted(item.request, item.match.tokens, now)
            self._order.note_admitted(admitted, now)
        if self._delayer is not None:
            self._delayer.finalize(len(built))
        return built

    def preempted(self, now: float, ratio: float) -> list[Request]:
        """Admitted requests that the first waiting one may push out, so that it then fits: for want
        of rows or KV, or the pending chunk, behind which it would wait for a whole prompt."""
        life, config = self._life, self._config
        admitted = life.running if life.chunked is None else [*life.running, life.chunked]
        if config.disable_priority_preemption or not life.queue or not admitted:
            return []
        threshold = config.priority_preemption_threshold
        highest = life.queue.highest_priority()
        if highest - min([request.priority for request in admitted]) <= threshold:
            return []
        candidate = next(iter(self._candidates(now)))
        _prepare_prefill(candidate)
        # The size of the last pass will do: it bounds only what the pending chunk takes.
        adder = self._adder(ratio, ChunkSize(self.chunk_tokens))
        reserved = {r.request_id: int(adder.forecast(r)) for r in life.running}
        if life.chunked is not None:
            before = adder.off_total
            adder.add_chunked(life.chunked)
            reserved[life.chunked.request_id] = int(adder.off_total - before)
        rows_missing = 1 - self._free_rows()
        tokens_missing = self._tokens_missing(candidate, adder)
        if rows_missing <= 0 and tokens_missing <= 0:
            chunk = life.chunked
            return [chunk] if chunk and highest - chunk.priority > threshold else []
        return choose_preempted(
            candidate,
            admitted,
            self._memory,
            threshold=threshold,
            rows_missing=rows_missing,
            tokens_missing=tokens_missing,
            reserved=reserved,
        )

    def _tokens_missing(self, candidate: Request, adder: PrefillAdder) -> int:
        """By how much the candidate's need exceeds what the forecast leaves; fits if <= 0."""
        match = self._memory.match(candidate)
        # Locked for the test: a prefix that only the cache holds is no room for the rest.
        self._memory.lock(match.node)
        missing = adder.need(candidate, match) - adder.rem_total + 1
        self._memory.unlock(match.node)
        return missing

    # How many

    def _rows_to_fill(self, now: float, *, retracted: bool) -> int:
        """Requests that may be admitted in this pass; where none, says why."""
        if not self._life.queue:
            self._blocked_by(Reason.NEXT_PASS)
            return 0
        if retracted:
            self._blocked_by(Reason.RETRACTED)
            return 0
        rows = self._free_rows()
        if rows <= 0:
            self._blocked_by(Reason.ROWS)
            return 0
        if not self._delayer_allows(now, rows):
            self._blocked_by(Reason.DELAYER)
            return 0
        return rows

    def _free_rows(self) -> int:
        pending = self._life.chunked is not None
        most = self._config.max_running_requests - len(self._life.running) - pending
        return min(most, self._memory.rows.num_free)

    def _delayer_allows(self, now: float, rows: int) -> bool:
        if self._delayer is None or self._life.chunked is not None:
            return True
        usage = 1 - self._memory.available_tokens / self._memory.capacity_tokens
        return self._delayer.allow(
            now,
            waiting=len(self._life.queue),
            running=len(self._life.running),
            free_rows=rows,
            kv_usage=usage,
        )

    # Who

    def _admit_waiting(self, adder: PrefillAdder, rows: int, now: float) -> list[Request]:
        self._blocked_by(Reason.NEXT_PASS)
        pending = PendingPrefixes(self._memory)
        if self._life.chunked is not None:
            pending.add(self._life.chunked)
        admitted: list[Request] = []
        for request in self._candidates(now):
            if len(admitted) >= rows:
                self._blocked_by(Reason.ROWS)
                break
            _prepare_prefill(request)
            match = self._memory.match(request)
            if pending.worth_waiting(request, match):
                self._leave_for_twin(request, pending)
                if pending.left < MAX_LEFT:
                    continue
                self._blocked_by(Reason.POLICY)
                break
            pending.add(request)
            verdict = adder.add(request, match)
            if adder.admitted and adder.admitted[-1].request is request:
                admitted.append(request)
            if verdict is not Verdict.CONTINUE:
                self._blocked_by(adder.reason)
                break
        return admitted

    def _candidates(self, now: float) -> Iterable[Request]:
        return self._order.candidates(now, self._life.counters.computed_tokens)

    def _leave_for_twin(self, request: Request, pending: PendingPrefixes) -> None:
        pending.left += 1
        self._life.counters.shared_prefix_skips += 1
        self._life.clocks.single_out(request, Reason.SHARED_PREFIX)

    def _choose_size(self) -> ChunkSize:
        chunked, mixed = self._life.chunked, self._mixed_rows()
        context = sum([request.length for request in mixed])
        history = 0 if chunked is None else chunked.length
        held_back = len(self._life.running) - len(mixed)
        size = self.sizer.choose(ChunkLoad(history, len(mixed), context, held_back))
        self.chunk_tokens = size.tokens
        return size

    def _adder(self, ratio: float, size: ChunkSize) -> PrefillAdder:
        """The budgets of this pass, beside the running rows."""
        mixed = self._mixed_rows()
        page_tokens = self._memory.new_page_tokens(mixed)
        load = StepLoad(len(mixed), page_tokens, self._life.running, ratio)
        return PrefillAdder(self._config, self._memory, load, size.tokens, exact_chunk=size.exact)

    def _mixed_rows(self) -> list[Request]:
        return [] if self._config.disable_mixed_chunk else self._life.running

    def _blocked_by(self, reason: Reason) -> None:
        """What the first request that is left waits for, and all behind it."""
        self.reason = Reason.NONE if reason is Reason.NEXT_PASS else reason
        self._life.clocks.current = reason


def _prepare_prefill(request: Request) -> None:
    """Sets what a waiting request computes before it samples, should it be admitted."""
    request.scheduling.target = len(request.input_ids) + len(request.output_ids)
