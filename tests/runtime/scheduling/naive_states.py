"""Which recurrent states may be gone on from, followed from what steps were to save, by slow, plain
code."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from runtime.request import Request
from runtime.scheduling.schedule_batch import ScheduleBatch
from tests.runtime.scheduling.fake_device import SPOILT
from tests.runtime.scheduling.naive_books import NaiveBooks, Prefix


@dataclass
class NaiveStates:
    """What is saved.

    Args: saved: prefixes whose states steps were to save.
    """

    books: NaiveBooks
    saved: set[Prefix] = field(default_factory=set)

    @property
    def on(self) -> bool:
        """Whether there are states to save."""
        config = self.books.scheduler.config
        return config.recurrent and not config.disable_radix_cache

    def look_at(
        self, batch: ScheduleBatch, started: Container[Request], alone: Container[Request]
    ) -> None:
        """A step is planned.

        Args:
            started: who begins with it. alone: who shares nothing with others.
        """
        if self.on and not batch.retry:
            self._check_starts(batch, started, alone)
        self._note_saves(batch, alone)

    def _check_starts(
        self, batch: ScheduleBatch, started: Container[Request], alone: Container[Request]
    ) -> None:
        """A request that begins goes on from the deepest saved state of its tokens."""
        kept = {
            prefix
            for prefix, (node, _) in self.books.tree().items()
            if node.state is not None and node.state.step < batch.step
        }
        for b, request in enumerate(batch.requests[: batch.num_prefill]):
            if request not in started:
                continue
            history = (*request.input_ids, *request.output_ids)
            asked = request.sampling.prompt_logprobs is not None and not request.output_ids
            most = 0 if request in alone or asked else len(history) - 1
            deeper = range(batch.prefix_lens[b] + 1, most + 1)
            missed = [end for end in deeper if (request.namespace, history[:end]) in kept]
            assert not missed, f"{request.request_id} begins before the state of {missed} tokens"

    def _note_saves(self, batch: ScheduleBatch, alone: Container[Request]) -> None:
        places = self._places(batch)
        saves = list(zip(batch.save_rows, batch.save_tokens, strict=True))
        assert set(saves) <= places.keys(), "a state is saved where none belongs"
        assert not any(batch.requests[b] in alone for b, _ in saves)
        slots = self.books.scheduler.config.state_slots
        if self.on and slots >= len(places):
            due = {b: tokens for b, tokens in sorted(places) if batch.requests[b] not in alone}
            missed = due.items() - set(saves)
            assert not missed or self._held_back() >= slots - len(places), "a state is not saved"
        self.saved.update(places[save] for save in saves)

    def _places(self, batch: ScheduleBatch) -> dict[tuple[int, int], Prefix]:
        """Where a step is to save states, by row and tokens in it: at multiples of the interval, at
        the last page border before the end of what is to be prefilled, and where a pin ends."""
        config, size = self.books.scheduler.config, self.books.page_size
        every = -(-config.state_interval // size) * size
        places: dict[tuple[int, int], Prefix] = {}
        for b, request in enumerate(batch.requests):
            tokens = self._tokens(request)
            start, end = batch.prefix_lens[b], batch.prefix_lens[b] + batch.extend_lens[b]
            border = (request.scheduling.target - 1) // size * size
            ends = {border, *(wish.tokens // size * size for wish in request.pins)}
            ends = ends if b < batch.num_prefill else set()
            for position in range(start + 1, end + 1):
                if not position % every or position in ends:
                    places[b, position - start] = (request.namespace, tokens[:position])
        return places

    def _tokens(self, request: Request) -> tuple[int, ...]:
        """As the device has them, which knows what is not committed."""
        sampled = self.books.device.sampled.get(request.request_id, [])
        known = len(request.output_ids)
        return (*request.input_ids, *request.output_ids, *sampled[known:])

    def _held_back(self) -> int:
        """States that are saved and not yet in the cache."""
        saved = [state for request in self.books.holders for state in request.scheduling.saved]
        return sum(state.slot > 0 and state.node is None for state in saved)

    def check(self) -> None:
        """Whatever state could be gone on from has seen just the tokens of its prefix."""
        books = self.books
        config, device = books.scheduler.config, books.device
        kept: dict[Prefix, Any] = {
            prefix: node.state for prefix, (node, _) in books.tree().items() if node.state
        }
        if not self.on:
            assert not kept
            return
        slots = [state.slot for state in kept.values()]
        first = config.max_running_requests + 1
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(first, first + config.state_slots))
        to_come = {f.batch.step for f in books.launched if not device.has_run(f.batch)}
        assert device.states is not None
        for (namespace, tokens), state in kept.items():
            assert (namespace, tokens) in self.saved
            wanted = (SPOILT, device.chain(namespace, tokens)[-1])
            there = state.step in to_come or device.states.get(state.slot) in wanted
            assert there, f"the state of {len(tokens)} tokens is not there"
