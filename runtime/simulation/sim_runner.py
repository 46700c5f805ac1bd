"""A runner that computes nothing: tokens come from a script, time from a function.

It answers to `runtime.runner.Runner`, keeps the block table as a device would, and asserts what
the scheduler owes every runner: rows and pages in range, every new position backed by a page, a
prompt continued where its last chunk ended. With it, the scheduler, the engine and the whole
server run without torch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from runtime.request import TokenLogprobs
from runtime.runner import LaunchedStep, RunnerInfo, StepOutput

if TYPE_CHECKING:
    from runtime.request import Request
    from runtime.runner import SampleMasks
    from runtime.scheduling.schedule_batch import ScheduleBatch

Script = Callable[["Request", int], int]


def counting_script(request: Request, index: int) -> int:
    """Token `index` of a request: a function of its prompt and the index only."""
    prompt = request.input_ids
    return 3 + (len(prompt) * 7 + prompt[-1] + index * 5) % 200


class SimRunner:
    """Runs steps by script.

    Args:
        script: gives the token id of (request, index of the output token).
        step_seconds: how long a step takes; None: no time at all, and a step is done as soon as
            it may sample. With a function, steps run in launch order on a thread of their own.
    """

    def __init__(
        self,
        script: Script = counting_script,
        *,
        vocab_size: int = 512,
        max_total_tokens: int = 65536,
        page_size: int = 16,
        step_seconds: Callable[[ScheduleBatch], float] | None = None,
    ) -> None:
        self.info = RunnerInfo(
            max_total_tokens=max_total_tokens,
            vocab_size=vocab_size,
            details={"device": "simulation"},
        )
        self.script = script
        self.steps = 0
        self._page_size = page_size
        self._pages = max_total_tokens // page_size
        self._table: dict[tuple[int, int], int] = {}
        self._step_seconds = step_seconds
        self._jobs: queue.SimpleQueue[tuple[ScheduleBatch, LaunchedStep] | None]
        self._jobs = queue.SimpleQueue()
        self._may_sample: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if step_seconds is not None:
            self._thread = threading.Thread(target=self._work, name="sim-runner", daemon=True)
            self._thread.start()

    def launch(self, batch: ScheduleBatch) -> LaunchedStep:
        """Starts a step; it is done at once, or `step_seconds` after the step before it."""
        self._check(batch)
        self.steps += 1
        if self._thread is None:
            step = LaunchedStep(partial(self._finish, batch))
        else:
            step = LaunchedStep(lambda _: self._may_sample.put(True))
            self._jobs.put((batch, step))
        return step

    def probe(self) -> None:
        """There is no device that could be gone."""

    def close(self) -> None:
        """Waits for launched steps. Idempotent."""
        if self._thread is not None:
            self._may_sample.put(False)
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def run(self, batch: ScheduleBatch, masks: SampleMasks | None) -> StepOutput:
        """The output of a step. Tests override it to make steps fail."""
        tokens = []
        words: dict[int, memoryview] = {}
        if masks is not None:
            bits = memoryview(masks.bits).cast("B").cast("I")
            width = len(bits) // len(masks.rows)
            words = {row: bits[i * width : (i + 1) * width] for i, row in enumerate(masks.rows)}
        for i, row in enumerate(batch.sampled):
            token = self.script(batch.requests[row], batch.output_counts[i])
            if i in words:
                token = _allowed(words[i], token, self.info.vocab_size)
            tokens.append(token)
        output = StepOutput(token_ids=tokens)
        self._add_logprobs(batch, output)
        return output

    def _add_logprobs(self, batch: ScheduleBatch, output: StepOutput) -> None:
        wanted = [batch.requests[row].sampling.logprobs for row in batch.sampled]
        if any(count is not None for count in wanted):
            output.logprobs = [
                None if count is None else self._logprobs(token, count)
                for token, count in zip(output.token_ids, wanted, strict=True)
            ]
        for row in range(batch.num_prefill):
            request, start, length = (
                batch.requests[row],
                batch.prefix_lens[row],
                batch.extend_lens[row],
            )
            count = request.sampling.prompt_logprobs
            if count is not None:
                following = request.input_ids[start + 1 : start + length + 1]
                output.prompt_logprobs[row] = [self._logprobs(t, count) for t in following]

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The token stands first, its neighbours follow, each half as likely as the one before."""
        top = tuple(((token + i) % self.info.vocab_size, -0.7 * (i + 1)) for i in range(count))
        return TokenLogprobs(token, -0.7, top)

    def _work(self) -> None:
        assert self._step_seconds is not None
        ended: float | None = None
        while (launched := self._jobs.get()) is not None:
            batch, step = launched
            begun = time.monotonic()
            time.sleep(self._step_seconds(batch))
            # Steps may sample in launch order, so this one's leave comes first.
            if self._may_sample.get():
                idle_s = 0.0 if ended is None else begun - ended
                ended = time.monotonic()
                self._finish(batch, step, ended - begun, idle_s)
            else:
                self._may_sample.put(False)  # for the next one
                step.end(RuntimeError("the runner was closed before the step could sample"))

    def _finish(
        self, batch: ScheduleBatch, step: LaunchedStep, device_s: float = 0.0, idle_s: float = 0.0
    ) -> None:
        try:
            output = self.run(batch, step.masks)
            output.device_s, output.idle_s = device_s, idle_s
        except Exception as error:
            step.end(error)
        else:
            step.end(output)

    def _check(self, batch: ScheduleBatch) -> None:
        """Applies the table writes and asserts that every new position has a page."""
        for row, index, page in zip(
            batch.table_rows, batch.table_indices, batch.table_pages, strict=True
        ):
            assert 0 < page < self._pages, f"page {page} of {self._pages}"
            self._table[row, index] = page
        assert (
            len(batch.rows)
            == len(batch.prefix_lens)
            == len(batch.extend_lens)
            == len(batch.requests)
        )
        assert len(set(batch.rows)) == len(batch.rows), "a row is twice in a step"
        total = sum(batch.extend_lens[: batch.num_prefill])
        assert total == len(batch.input_ids), (
            f"prefill lengths sum to {total}, input_ids are {len(batch.input_ids)}"
        )
        for row, start, length in zip(
            batch.rows, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            assert row > 0, "row 0 is reserved"
            assert length > 0
            for index in range(
                start // self._page_size, (start + length - 1) // self._page_size + 1
            ):
                assert (row, index) in self._table, f"row {row} has no page {index}"


def _allowed(words: memoryview, token: int, vocab_size: int) -> int:
    """The token where its bit is set, else the first one whose bit is."""
    for candidate in [token, *range(vocab_size)]:
        if int(words[candidate // 32]) >> (candidate % 32) & 1:
            return int(candidate)
    raise ValueError("a mask allows no token")
