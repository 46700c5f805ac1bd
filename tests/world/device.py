"""A model of few lines on a device that fails: each token is a hash of what is read from its KV.

The device keeps pages, the table and each row's newest token as a real one does. A token is made of
the bytes that are read through the table, so that a page given away too early, a stale entry or a
token lost in a retry is a wrong word in somebody's answer, and everybody's right answer is known
beforehand (`alone`).
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from runtime.request import TokenLogprobs
from runtime.runner import LaunchedStep, RunnerInfo, SampleMasks, StepOutput
from tests.fakes import IM_END, VOCAB_SIZE

if TYPE_CHECKING:
    from runtime.request import Request
    from runtime.scheduling.schedule_batch import ScheduleBatch
    from tests.world.faults import Faults
    from tests.world.loop import WorldLoop

LETTERS = 24
# A prompt that holds this byte makes every step fail that has it in a row; with the other one, its
# row gives NaN. No answer holds them.
FAILS, SPOILS = 1, 2
SPOILT = -1  # KV of a row that gives NaN
SPOILT_BYTES = SPOILT.to_bytes(4, "little", signed=True)


def next_token(crc: int, allowed: Callable[[int], bool] | None = None) -> int:
    """The token after a history: a letter, a blank, or the end.

    Args:
        crc: of the history's ids as 32-bit ints.
        allowed: what a mask lets through; the next id that it does is taken.
    """
    seed = crc >> 4
    if seed % 61 == 0:
        wanted = IM_END
    elif seed % 5 == 0:
        wanted = 32
    else:
        wanted = 97 + seed // 61 % LETTERS
    if allowed is None or allowed(wanted):
        return wanted
    following = [*range(wanted, VOCAB_SIZE), *range(wanted)]
    return next(token for token in following if allowed(token))


def alone(
    prompt: Sequence[int],
    most: int,
    *,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    allowed: Callable[[list[int]], Callable[[int], bool] | None] = lambda _: None,
    ended: Callable[[list[int]], bool] = lambda _: False,
) -> list[int]:
    """What a greedy request gets: its tokens, the end included.

    Args: allowed: from the tokens so far, what may follow. ended: whether nothing may.
    """
    crc = zlib.crc32(array("i", prompt).tobytes())
    found: list[int] = []
    while len(found) < most:
        token = _held_back(next_token(crc, allowed(found)), len(found), min_tokens)
        found.append(token)
        if (token == IM_END and not ignore_eos) or ended(found):
            break
        crc = zlib.crc32(token.to_bytes(4, "little"), crc)
    return found


def _held_back(token: int, index: int, min_tokens: int) -> int:
    """The end cannot be sampled before min_tokens."""
    return 97 if token == IM_END and index < min_tokens else token


class WorldRunner:
    """Runs steps in the order of their launch, each taking virtual time.

    Args:
        faults: asked what goes wrong.
    """

    def __init__(self, loop: WorldLoop, faults: Faults, *, pages: int, page_size: int) -> None:
        self.info = RunnerInfo(
            max_total_tokens=pages * page_size,
            vocab_size=VOCAB_SIZE,
            details={"device": "world"},
        )
        self.steps = 0
        self.closed = False
        self._loop = loop
        self._faults = faults
        self._page_size = page_size
        self._slots = array("i", [0]) * (pages * page_size)
        self._table: dict[int, dict[int, int]] = {}
        self._newest: dict[int, int] = {}
        self._launched: list[tuple[ScheduleBatch, LaunchedStep, bool]] = []  # bool: is behind
        self._running = False
        # What is behind a step that failed, or could not be launched, is not run.
        self._failed = self._launch_failed = False

    def launch(self, batch: ScheduleBatch) -> LaunchedStep:
        assert not self.closed
        self.steps += 1
        if self._faults.happens("launch"):
            self._strike(batch)
            self._launch_failed = True
            raise RuntimeError("a launch failed")
        step = LaunchedStep(lambda _: self._go_on())
        self._launched.append((batch, step, self._launch_failed))
        return step

    def probe(self) -> None:
        assert not self._launched, "a step is in flight"
        if self._faults.happens("probe"):
            self._faults.dead_s = self._loop.time()
            raise RuntimeError("the device does not answer")
        self._failed = self._launch_failed = False

    def close(self) -> None:
        self.closed = True
        assert not self._launched, "closed with a step in flight"

    def _go_on(self) -> None:
        if self._running or not self._launched or not self._launched[0][1].may_sample:
            return
        self._running = True
        batch = self._launched[0][0]
        seconds = 0.002 + 0.0001 * len(batch.requests) + 0.00001 * len(batch.input_ids)
        if self._faults.happens("stall"):
            seconds += self._loop.rng.choice((0.05, 0.5, 4.0))
        self._loop.call_later(seconds, self._finish)

    def _finish(self) -> None:
        batch, step, behind = self._launched.pop(0)
        self._running = False
        try:
            if self._failed or behind:
                raise RuntimeError("a step before it has failed")
            output = self._run(batch, step.masks)
        except Exception as error:
            self._failed = True
            if isinstance(error, AssertionError):
                self._loop.broken.append(f"the device: {error}")
            step.end(error)
        else:
            step.end(output)
        self._go_on()

    def _run(self, batch: ScheduleBatch, masks: SampleMasks | None) -> StepOutput:
        for made in batch.restore:
            self._newest[made.row] = [-1, *made.output_ids][-1]
        self._write_table(batch)
        assert len(set(batch.rows)) == len(batch.rows), "a row is twice in a step"
        # A step that fails may have done a part of its work.
        failing = [request for request in batch.requests if FAILS in request.input_ids]
        if self._faults.happens("step"):
            self._strike(batch)
            raise RuntimeError("a step failed")
        self._store(batch)
        if failing:
            self._faults.counts["failing row"] += 1
            raise RuntimeError("a row makes its step fail")
        output = self._sample(batch, masks)
        if self._faults.happens("late step"):
            self._strike(batch)
            raise RuntimeError("a step failed after it had sampled")
        return output

    def _strike(self, batch: ScheduleBatch) -> None:
        """A row that is alone in a step that fails is taken for the cause."""
        if len(batch.requests) == 1:
            self._faults.struck.add(tuple(batch.requests[0].input_ids))

    def _write_table(self, batch: ScheduleBatch) -> None:
        entries = zip(batch.table_rows, batch.table_indices, batch.table_pages, strict=True)
        for row, index, page in entries:
            assert row > 0
            assert page > 0
            self._table.setdefault(row, {})[index] = page

    def _store(self, batch: ScheduleBatch) -> None:
        """Every row's new tokens, through its table row."""
        at = 0
        size = self._page_size
        for b, row in enumerate(batch.rows):
            start, length = batch.prefix_lens[b], batch.extend_lens[b]
            if b < batch.num_prefill:
                new: Sequence[int] = batch.input_ids[at : at + length]
                at += length
            else:
                new = [self._newest[row]]
            request, table = batch.requests[b], self._table[row]
            # What is computed from NaN is NaN.
            reads = self._history(row, start) if b < batch.num_prefill else b""
            spoils = SPOILS in request.input_ids or SPOILT_BYTES in reads
            for position, token in enumerate(new, start):
                slot = table[position // size] * size + position % size
                self._slots[slot] = SPOILT if spoils else token
        assert at == len(batch.input_ids)

    def _history(self, row: int, length: int) -> bytes:
        size, table = self._page_size, self._table[row]
        found = array("i")
        for index in range((length + size - 1) // size):
            first = table[index] * size
            found += self._slots[first : first + size]
        return found[:length].tobytes()

    def _sample(self, batch: ScheduleBatch, masks: SampleMasks | None) -> StepOutput:
        output = StepOutput(token_ids=[])
        allowed = {} if masks is None else _allowed(masks)
        for i, b in enumerate(batch.sampled):
            request = batch.requests[b]
            length = batch.prefix_lens[b] + batch.extend_lens[b]
            assert length == batch.sample_positions[i]
            history = self._history(batch.rows[b], length)
            token = 0
            if SPOILT_BYTES in history:
                self._faults.counts["NaN"] += 1
                output.failed[i] = "a logit is NaN"
            else:
                token = next_token(zlib.crc32(history), allowed.get(i))
                token = _held_back(token, batch.output_counts[i], request.sampling.min_tokens)
            self._newest[batch.rows[b]] = token
            output.token_ids.append(token)
        self._score(batch, output)
        return output

    def _score(self, batch: ScheduleBatch, output: StepOutput) -> None:
        counts = [batch.requests[b].sampling.logprobs for b in batch.sampled]
        if any(count is not None for count in counts):
            output.logprobs = [
                None if count is None else _scored(token, count)
                for token, count in zip(output.token_ids, counts, strict=True)
            ]
        for b in range(batch.num_prefill):
            request: Request = batch.requests[b]
            count = request.sampling.prompt_logprobs
            if count is not None:
                first = batch.prefix_lens[b] + 1
                following = request.input_ids[first : first + batch.extend_lens[b]]
                output.prompt_logprobs[b] = [_scored(token, count) for token in following]


def _scored(token: int, count: int) -> TokenLogprobs:
    top = tuple(((token + i) % VOCAB_SIZE, -0.5 * (i + 1)) for i in range(count))
    return TokenLogprobs(token, -0.5, top)


def _allowed(masks: SampleMasks) -> dict[int, Callable[[int], bool]]:
    """By index into `sampled`, what may be sampled."""
    bits: Any = memoryview(masks.bits).cast("B")
    width = len(bits) // len(masks.rows)

    def of(first: int) -> Callable[[int], bool]:
        return lambda token: bool(bits[first + token // 8] >> (token % 8) & 1)

    return {row: of(i * width) for i, row in enumerate(masks.rows)}
