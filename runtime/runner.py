"""What any executor of steps answers to: the seam between the scheduler's ints and a device.

The engine calls `launch` for step N + 1 before step N's result is read. A launched step samples
only after `LaunchedStep.sample`, since a grammar's mask for it needs the token of the step before;
its forward pass runs meanwhile. Steps run in the order of their launch.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runtime.request import TokenLogprobs
    from runtime.rope_layout import LongPrompts
    from runtime.scheduling.schedule_batch import ScheduleBatch


@dataclass(slots=True)
class SampleMasks:
    """Tokens that some of a step's sampled rows may take.

    Args:
        rows: indices into `ScheduleBatch.sampled`, ascending.
        bits: a C-contiguous [len(rows), ceil(vocab_size / 32)] int32 buffer (numpy array or any
            object with the buffer protocol); bit t % 32 of word t // 32 allows token t.
    """

    rows: Sequence[int]
    bits: Any


@dataclass(slots=True)
class StepOutput:
    """The result of a step on the host.

    Args:
        token_ids: parallel to `ScheduleBatch.sampled`.
        logprobs: parallel to token_ids where some row asked for them; None entries for the others.
        prompt_logprobs: by batch row, for prefill rows that asked: one entry per new token of the
            chunk, the log-probability of the *next* prompt token at that position (so the last
            entry is missing in a prompt's last chunk).
        failed: by index into `sampled`, why the row gave no token (a NaN logit, an empty mask).
        device_s: seconds the device spent on the step.
        idle_s: seconds between the end of the step before it, on the device, and its beginning.
        compiled_kernels: so many were compiled while it was queued, each for seconds perhaps.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    device_s: float = 0.0
    idle_s: float = 0.0
    compiled_kernels: int = 0


class LaunchedStep:
    """A step on its way, as `Runner.launch` returns it. Made by the runner, which calls `end`.

    Args: when_sampled: the runner's; given the step once it may sample.

    Attributes:
        may_sample: `sample` has been called.
        masks: what it was called with.
        ended_s: when it was done, on the monotonic clock.
        queueing_s: seconds that the host spent on it where it queues a step's work for the device.
    """

    __slots__ = ("_future", "_when_sampled", "ended_s", "masks", "may_sample", "queueing_s")

    def __init__(self, when_sampled: Callable[[LaunchedStep], None]) -> None:
        self._future: Future[StepOutput] = Future()
        self._when_sampled = when_sampled
        self.may_sample = False
        self.masks: SampleMasks | None = None
        self.ended_s = 0.0
        self.queueing_s = 0.0

    def sample(self, masks: SampleMasks | None) -> None:
        """Lets the step sample once its forward pass is done. Called once; never blocks."""
        assert not self.may_sample, "a step samples once"
        self.may_sample = True
        self.masks = masks
        self._when_sampled(self)

    def result(self) -> StepOutput:
        """Blocks until the step is done. Raises what the step raised."""
        return self._future.result()

    @property
    def done(self) -> bool:
        """`result` would not block."""
        return self._future.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls back, from any thread or at once, when `result` would not block any more."""
        self._future.add_done_callback(lambda _: callback())

    def end(self, result: StepOutput | BaseException) -> None:
        """The step is done: gives what it computed, or why it could not."""
        self.ended_s = time.monotonic()
        if isinstance(result, BaseException):
            self._future.set_exception(result)
        else:
            self._future.set_result(result)


def failed_step(error: Exception) -> LaunchedStep:
    """A step that could not be launched, as one that has failed."""
    step = LaunchedStep(lambda _: None)
    step.end(error)
    return step


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the engine and /server_info need to know of a runner.

    Args:
        max_total_tokens: KV tokens of the pool, the reserved page included.
        vocab_size: ids that can be sampled are 0 .. vocab_size - 1.
        chunk_tokens: prefill tokens of a step where no option says; None: as many as a time allows.
        long_prompts: which prompts share KV with none of the others; None: there are none.
        state_slots: recurrent states that can be kept beside those of the rows; None: the model has
            none.
        details: free text pairs (device, dtype, kernels) for /server_info.
    """

    max_total_tokens: int
    vocab_size: int
    chunk_tokens: int | None = None
    long_prompts: LongPrompts | None = None
    state_slots: int | None = None
    details: dict[str, str] = field(default_factory=dict)


class Runner(Protocol):
    """Runs steps. Not thread-safe: one caller at a time."""

    info: RunnerInfo

    def launch(self, batch: ScheduleBatch) -> LaunchedStep:
        """Starts a step and returns at once. What the device keeps of the rows in `batch.restore`
        is first set to what their committed tokens say."""
        ...

    def probe(self) -> None:
        """Blocks until the device has shown that it still computes. No step is in flight.

        After a step that failed, steps behind it fail without being run until this is called.

        Raises: Exception: it does not, and never will again.
        """
        ...

    def close(self) -> None:
        """Waits for launched steps and frees the device. Idempotent."""
        ...
