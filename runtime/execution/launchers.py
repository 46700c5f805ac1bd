"""How steps reach the device while the host plans the next one: two forms, by what a call does.

Where a call returns when its work is done (CPU), one worker thread runs steps in launch order.
Where work is queued (CUDA), the caller's thread queues it on a stream of its own and a waiter
thread blocks on the step's fence, so that neither the caller nor its event loop ever waits.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.execution.device import Device
    from runtime.runner import SampleMasks, StepOutput


class Step(Protocol):
    """A step's work, in the order in which it is done."""

    def forward(self) -> None:
        """Computes the logits."""

    def sample(self, masks: SampleMasks | None) -> None:
        """Picks the tokens and starts their way to the host."""

    def output(self) -> StepOutput:
        """The result, once it has reached the host. Blocks until then."""
        ...


class LaunchedStep:
    """A step on its way: what `launch` returns (see `runtime.runner.PendingStep`)."""

    def __init__(self, step: Step, when_sampled: Callable[[LaunchedStep], None]) -> None:
        self.step = step
        self.masks: SampleMasks | None = None
        self.future: Future[StepOutput] = Future()
        self._when_sampled = when_sampled

    def sample(self, masks: SampleMasks | None) -> None:
        self.masks = masks
        self._when_sampled(self)

    def result(self) -> StepOutput:
        return self.future.result()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self.future.add_done_callback(lambda _: callback())


class Launcher(Protocol):
    """Runs steps in the order of their launch."""

    def launch(self, step: Step) -> LaunchedStep: ...

    def close(self) -> None:
        """Waits for steps that may sample; gives up those that never got `sample`."""


class ThreadLauncher:
    """One worker thread: forward, wait for the masks, sample, collect."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        self._may_sample: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="model-runner", daemon=True)
        self._thread.start()

    def launch(self, step: Step) -> LaunchedStep:
        launched = LaunchedStep(step, self._may_sample.put)
        self._steps.put(launched)
        return launched

    def close(self) -> None:
        if self._thread.is_alive():
            self._may_sample.put(None)
            self._steps.put(None)
            self._thread.join()

    def _work(self) -> None:
        with torch.inference_mode():
            while (launched := self._steps.get()) is not None:
                try:
                    output = self._run(launched)
                except BaseException as error:  # whatever it is belongs to the step's waiter
                    launched.future.set_exception(error)
                else:
                    launched.future.set_result(output)
                del launched  # its tensors are not needed while waiting for the next step

    def _run(self, launched: LaunchedStep) -> StepOutput:
        try:
            launched.step.forward()
        finally:
            # Steps get their masks in launch order, so this one's come first; they are taken
            # also where the forward pass failed, or the next step would get them.
            sampled = self._may_sample.get()
        if sampled is None:
            raise RuntimeError("the runner was closed before the step could sample")
        assert sampled is launched, "steps must get their masks in launch order"
        launched.step.sample(launched.masks)
        return launched.step.output()


class StreamLauncher:
    """A stream and a waiter thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        self._sampled: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="model-waiter", daemon=True)
        self._waiter.start()

    def launch(self, step: Step) -> LaunchedStep:
        launched = LaunchedStep(step, self._sample)
        self._queue(launched, step.forward)
        return launched

    def close(self) -> None:
        if self._waiter.is_alive():
            self._sampled.put(None)
            self._waiter.join()

    def _sample(self, launched: LaunchedStep) -> None:
        if not launched.future.done():  # else its forward pass could not be queued
            self._queue(launched, lambda: launched.step.sample(launched.masks))
            self._sampled.put(launched)

    def _queue(self, launched: LaunchedStep, work: Callable[[], None]) -> None:
        try:
            with torch.inference_mode(), self._device.on(self._stream):
                work()
        except Exception as error:
            launched.future.set_exception(error)

    def _wait(self) -> None:
        while (launched := self._sampled.get()) is not None:
            if launched.future.done():
                continue
            try:
                output = launched.step.output()  # blocks on the step's fence
            except Exception as error:
                launched.future.set_exception(error)
            else:
                launched.future.set_result(output)
            del launched  # its tensors lived until here; the step is done
