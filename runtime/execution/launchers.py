"""How steps reach the device while the host plans the next one: two forms, by what a call does.

Where a call returns when its work is done (CPU), one worker thread runs steps in launch order.
Where work is queued (CUDA), it goes on a stream of its own, and a waiter thread blocks on the
step's fence, so that neither the caller nor its event loop ever waits. A captured step is queued by
the caller, in a fraction of a millisecond; one that is launched kernel by kernel, for many of them,
by a thread, so that streams are served meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from runtime.runner import LaunchedStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.execution.device import Device
    from runtime.runner import SampleMasks, StepOutput


class StepJob(Protocol):
    """What a step does, in the order in which it is done.

    Attributes:
        quick: where work is queued, `forward` takes a few calls.
    """

    @property
    def quick(self) -> bool: ...

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

    def launch(self, job: StepJob) -> LaunchedStep: ...

    def call(self, work: Callable[[], None]) -> None:
        """Does something that steps launched later will see. No step may be on its way."""

    def close(self) -> None:
        """Waits for steps that may sample; gives up those that never got `sample`."""


_CLOSED = "the runner was closed before the step could sample"
_BEHIND = "a step before it has failed"


class ThreadLauncher:
    """One worker thread: forward, wait for the masks, sample, collect."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[tuple[StepJob, LaunchedStep] | None] = queue.SimpleQueue()
        self._may_sample: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.failed = False
        self._thread = threading.Thread(target=self._work, name="model-runner", daemon=True)
        self._thread.start()

    def launch(self, job: StepJob) -> LaunchedStep:
        step = LaunchedStep(lambda _: self._may_sample.put(True))
        self._steps.put((job, step))
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
                job, step = launched
                try:
                    step.end(self._run(job, step))
                except BaseException as error:  # whatever it is belongs to the step's waiter
                    self.failed = True
                    step.end(error)
                del launched, job, step  # its tensors are not needed while waiting for the next

    def _run(self, job: StepJob, step: LaunchedStep) -> StepOutput:
        try:
            if self.failed:
                raise RuntimeError(_BEHIND)
            job.forward()
        finally:
            # Steps may sample in launch order, so this one's leave comes first; it is taken also
            # where the forward pass failed, or the next step would get it.
            if not self._may_sample.get():
                self._may_sample.put(False)  # for the next one
                raise RuntimeError(_CLOSED)
        job.sample(step.masks)
        return job.output()


class StreamLauncher:
    """A stream, a thread that queues what takes long, and a waiter thread.

    Work is queued in the order of the calls: by the caller where the thread has nothing to do.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        self._unsampled: list[LaunchedStep] = []
        self.failed = False
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._handed_over = 0  # jobs, counted by the caller
        self._taken_on = 0  # and done, counted by the thread
        self._sampled: queue.SimpleQueue[tuple[StepJob, LaunchedStep] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._launch, name="model-launcher", daemon=True),
            threading.Thread(target=self._wait, name="model-waiter", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def launch(self, job: StepJob) -> LaunchedStep:
        step = LaunchedStep(partial(self._sample, job))
        # One that could not be queued may never be asked to sample.
        self._unsampled = [other for other in self._unsampled if not other.done] + [step]
        self._do(partial(self._queue, step, job.forward), quick=job.quick)
        return step

    def call(self, work: Callable[[], None]) -> None:
        with torch.inference_mode(), self._device.on(self._stream):
            work()

    def close(self) -> None:
        launcher, waiter = self._threads
        if launcher.is_alive():
            self._jobs.put(None)
            launcher.join()
        unsampled, self._unsampled = self._unsampled, []
        for step in unsampled:
            if not step.done:
                step.end(RuntimeError(_CLOSED))
        if waiter.is_alive():
            self._sampled.put(None)
            waiter.join()

    def _sample(self, job: StepJob, step: LaunchedStep) -> None:
        self._unsampled = [other for other in self._unsampled if other is not step]
        self._do(partial(self._queue_sampling, job, step), quick=True)

    def _do(self, job: Callable[[], object], *, quick: bool) -> None:
        if quick and self._handed_over == self._taken_on:
            job()
            return
        self._handed_over += 1
        self._jobs.put(job)

    def _launch(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # a step's tensors are not needed while waiting for the next
            self._taken_on += 1

    def _queue_sampling(self, job: StepJob, step: LaunchedStep) -> None:
        if self._queue(step, lambda: job.sample(step.masks)):
            self._sampled.put((job, step))

    def _queue(self, step: LaunchedStep, work: Callable[[], None]) -> bool:
        """Queues work of a step; where that raises, the step has failed."""
        if step.done:  # its forward pass could not be queued
            return False
        begin = time.perf_counter()
        try:
            if self.failed:
                raise RuntimeError(_BEHIND)
            self.call(work)
        except BaseException as error:  # whatever it is belongs to the step's waiter
            self.failed = True
            step.end(error)
            return False
        step.queueing_s += time.perf_counter() - begin
        return True

    def _wait(self) -> None:
        while (launched := self._sampled.get()) is not None:
            job, step = launched
            try:
                output = job.output()  # blocks on the step's fence
            except Exception as error:
                self.failed = True
                step.end(error)
            else:
                step.end(output)
            del launched, job, step  # its tensors lived until here; the step is done
