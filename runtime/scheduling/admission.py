"""Admission: which prompts, or pieces of prompts, the next step computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.scheduling.prefill_adder import PrefillAdder, StepLoad, Verdict
from runtime.scheduling.request_record import record_of
from runtime.scheduling.wait_clocks import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.config import SchedulerConfig
    from runtime.request import Request
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.prefill_adder import Admitted
    from runtime.scheduling.wait_clocks import WaitClocks
    from runtime.scheduling.waiting_queue import WaitingQueue


class Admission:
    """Walks the queue with the budgets of one step.

    "Full" is never latched: a refusal holds only as long as nothing it rests on has changed
    (`_refused_at`), and is kept as an observable with its reason.
    """

    def __init__(
        self, config: SchedulerConfig, memory: KVMemory, queue: WaitingQueue, clocks: WaitClocks
    ) -> None:
        self.config = config
        self._memory = memory
        self._queue = queue
        self._clocks = clocks
        self._refused_at: tuple[object, ...] | None = None
        self.reason = Reason.NONE  # why the last pass admitted no more

    @property
    def full(self) -> bool:
        return self._refused_at is not None

    def build(
        self,
        now: float,
        running: Sequence[Request],
        chunked: Request | None,
        ratio: float,
        *,
        retracted: bool,
    ) -> tuple[list[Admitted], Request | None]:
        """The prefill rows of this pass and the request that stays cut after it.

        Args:
            running: rows that decode; they ride along when steps are mixed.
            retracted: this pass has retracted, so nobody new is admitted.
        """
        slots = self._free_slots(running, chunked, ratio, retracted=retracted)
        if slots <= 0 and chunked is None:
            return [], None
        adder = PrefillAdder(
            self.config, self._memory, self._load(running, ratio), self._chunk_tokens()
        )
        if chunked is not None:
            adder.add_chunked(chunked)
            if not adder.admitted:
                self._clocks.single_out(chunked, Reason.KV_STEP)
        if slots > 0:
            self._admit_waiting(adder, slots, self._versions(ratio))
        return adder.admitted, adder.chunked

    def _free_slots(
        self,
        running: Sequence[Request],
        chunked: Request | None,
        ratio: float,
        *,
        retracted: bool,
    ) -> int:
        """Requests that may be admitted in this pass; where none, says why."""
        if not len(self._queue):
            self._open(Reason.NEXT_PASS)
            return 0
        if retracted:
            self._open(Reason.RETRACTED)
            return 0
        versions = self._versions(ratio)
        if self._refused_at == versions:
            return 0
        pending = chunked is not None
        slots = min(
            self.config.max_running_requests - len(running) - pending,
            self._memory.allocator.free_rows,
        )
        if slots <= 0:
            self._close(Reason.SLOTS, versions)
        return slots

    def _admit_waiting(self, adder: PrefillAdder, slots: int, versions: tuple[object, ...]) -> None:
        self._open(Reason.NEXT_PASS)
        admitted: list[Request] = []
        for request in self._queue:
            if len(admitted) >= slots:
                self._close(Reason.SLOTS, versions)
                break
            record = record_of(request)
            record.target = len(request.input_ids) + len(request.output_ids)
            verdict = adder.add(request, self._memory.match(request))
            if adder.admitted and adder.admitted[-1].request is request:
                admitted.append(request)
            if verdict is Verdict.NO_TOKEN:
                self._close(adder.reason, versions)
            elif verdict is Verdict.OTHER:
                self._open(adder.reason)
            if verdict is not Verdict.CONTINUE:
                break
        for request in admitted:
            self._queue.remove(request)
            self._clocks.end(request)

    def _close(self, reason: Reason, versions: tuple[object, ...]) -> None:
        self._refused_at = versions
        self.reason = self._clocks.current = reason

    def _open(self, reason: Reason) -> None:
        self._refused_at = None
        self.reason = Reason.NONE if reason is Reason.NEXT_PASS else reason
        self._clocks.current = reason

    def _versions(self, ratio: float) -> tuple[object, ...]:
        """All that a refusal for want of slots or KV rests on."""
        return self._memory.version, self._queue.version, ratio, self.config

    def _load(self, running: Sequence[Request], ratio: float) -> StepLoad:
        if self.config.disable_mixed_chunk:
            return StepLoad(0, 0, running, ratio)
        size = self._memory.page_size
        new_pages = sum([not request.length % size for request in running])
        return StepLoad(len(running), new_pages * size, running, ratio)

    def _chunk_tokens(self) -> int | None:
        size = self.config.chunked_prefill_size
        return size if size > 0 else None
