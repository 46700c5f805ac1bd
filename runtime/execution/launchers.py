"""How steps reach the device while the host plans the next one: two forms, by what a call does.

Where a call returns when its work is done (CPU), one worker thread runs steps in launch order.
Where work is queued (CUDA), the caller's thread queues it on a stream of its own and a waiter
thread blocks on the step's fence, so that neither the caller nor its event loop ever waits.
"""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from runtime.runner import LaunchedStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.execution.device import Device
    from runtime.runner import SampleMasks, StepOutput


class StepWork(Protocol):
    """What a step does, in the order in which it is done."""

    def forward(self) -> None:
        """Computes the logits."""

    def sample(self, masks: SampleMasks | None) -> None:
        """Picks the tokens and starts their way to the host."""

    def output(self) -> StepOutput:
        """The result, once it has reached the host. Blocks until then."""
        ...


class Launcher(Protocol):
    """Runs steps in the order of their launch.

    Once one has failed, those behind it fail too, without being run: they would compute with block
    table entries and tokens that the failed one was to write, and so write into others' pages.

    Attributes:
        failed: a step has. Set to False to have steps run again, when none is on its way.
    """

    failed: bool

    def launch(self, work: StepWork) -> LaunchedStep: ...

    def call(self, work: Callable[[], None]) -> None:
        """Does something that steps launched later will see. No step may be on its way."""

    def close(self) -> None:
        """Waits for steps that may sample; gives up those that never got `sample`."""


_CLOSED = "the runner was closed before the step could sample"
_BEHIND = "a step before it has failed"


class ThreadLauncher:
    """One worker thread: forward, wait for the masks, sample, collect."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[tuple[StepWork, LaunchedStep] | None] = queue.SimpleQueue()
        self._may_sample: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.failed = False
        self._thread = threading.Thread(target=self._work, name="model-runner", daemon=True)
        self._thread.start()

    def launch(self, work: StepWork) -> LaunchedStep:
        step = LaunchedStep(lambda _: self._may_sample.put(True))
        self._steps.put((work, step))
        return step

    def call(self, work: Callable[[], None]) -> None:
        with torch.inference_mode():
            work()

    def close(self) -> None:
        if self._thread.is_alive():
            self._may_sample.put(False)
            self._steps.put(None)
            self._thread.join()

    def _work(self) -> None:
        with torch.inference_mode():
            while (launched := self._steps.get()) is not None:
                work, step = launched
                try:
                    step.end(self._run(work, step))
                except BaseException as error:  # whatever it is belongs to the step's waiter
                    self.failed = True
                    step.end(error)
                del launched, work, step  # its tensors are not needed while waiting for the next

    def _run(self, work: StepWork, step: LaunchedStep) -> StepOutput:
        try:
            if self.failed:
                raise RuntimeError(_BEHIND)
            work.forward()
        finally:
            # Steps may sample in launch order, so this one's leave comes first; it is taken also
            # where the forward pass failed, or the next step would get it.
            if not self._may_sample.get():
                self._may_sample.put(False)  # for the next one
                raise RuntimeError(_CLOSED)
        work.sample(step.masks)
        return work.output()


class StreamLauncher:
    """A stream and a waiter thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        self._unsampled: list[LaunchedStep] = []
        self.failed = False
        self._sampled: queue.SimpleQueue[tuple[StepWork, LaunchedStep] | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="model-waiter", daemon=True)
        self._waiter.start()

    def launch(self, work: StepWork) -> LaunchedStep:
        step = LaunchedStep(partial(self._sample, work))
        if self._queue(step, work.forward):
            self._unsampled.append(step)
        return step

    def call(self, work: Callable[[], None]) -> None:
        with torch.inference_mode(), self._device.on(self._stream):
            work()

    def close(self) -> None:
        unsampled, self._unsampled = self._unsampled, []
        for step in unsampled:
            step.end(RuntimeError(_CLOSED))
        if self._waiter.is_alive():
            self._sampled.put(None)
            self._waiter.join()

    def _sample(self, work: StepWork, step: LaunchedStep) -> None:
        if step.done:  # its forward pass could not be queued
            return
        self._unsampled.remove(step)
        if self._queue(step, lambda: work.sample(step.masks)):
            self._sampled.put((work, step))

    def _queue(self, step: LaunchedStep, work: Callable[[], None]) -> bool:
        """Queues work of a step; where that raises, the step has failed."""
        try:
            if self.failed:
                raise RuntimeError(_BEHIND)
            self.call(work)
        except Exception as error:
            self.failed = True
            step.end(error)
            return False
        return True

    def _wait(self) -> None:
        while (launched := self._sampled.get()) is not None:
            work, step = launched
            try:
                output = work.output()  # blocks on the step's fence
            except Exception as error:
                self.failed = True
                step.end(error)
            else:
                step.end(output)
            del launched, work, step  # its tensors lived until here; the step is done
