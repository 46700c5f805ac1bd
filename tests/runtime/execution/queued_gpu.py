"""A GPU that computes nothing and keeps the order of calls: streams, events and pinned memory.

Device tensors are torch's meta tensors, so a step's operations have shapes and no values. What is
queued is done when the test says so (`run`). Only then do copies reach the host; until then the
host's buffers hold a token that nobody samples. What a GPU punishes now and then raises `Misuse`
here every time:

- work on another stream than the runner's;
- a copy from or to memory that is not pinned, and any other call that waits for the device;
- a copy out of a buffer that an earlier copy may still be reading;
- a wait, by whoever queues work, for an event that has not been reached.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest
    from torch import Tensor

NOT_YET, ANSWER = 201, 5  # what a copy to the host gives before and after it is done
DEVICE = torch.device("meta")
_ATEN = torch.ops.aten
_READS = (_ATEN._local_scalar_dense.default, _ATEN.item.default)


class Misuse(AssertionError):
    """Something that goes wrong on a GPU, at least sometimes."""


class FakeStream:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def wait_stream(self, other: FakeStream) -> None:
        self._gpu.queue("wait_stream", stream=self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._at: int | None = None

    def record(self) -> None:
        self._at = self._gpu.queue("record")

    def synchronize(self) -> None:
        if self._at is not None:
            self._gpu.wait(self._at)

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1.0


class FakeGpu:
    """The device's queue.

    Attributes:
        commands: what was queued, in order.
        waits: the commands whose end was waited for by whoever queues work.
        patient: such a wait runs the device up to there instead of raising.
        strict: only streams other than the default one take work.
        fails_at: the number of the command whose queueing raises.
    """

    def __init__(self) -> None:
        self.default = FakeStream(self)
        self.commands: list[str] = []
        self.waits: list[int] = []
        self.patient = False
        self.strict = False
        self.fails_at: int | None = None
        self._effects: dict[int, Callable[[], object]] = {}
        self._done = 0
        self._seen = 0  # commands whose end the host has waited for
        self._pinned: dict[int, Tensor] = {}  # by address, kept so that none comes twice
        self._read_by: dict[int, int] = {}  # the last copy out of a buffer
        self._moved = threading.Condition()
        self._here = threading.local()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts it in the place of torch's."""
        empty = torch.empty

        def pinned_or_not(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            tensor = empty(*size, **options)
            return self._pin(tensor) if pin_memory else tensor

        monkeypatch.setattr(torch, "empty", pinned_or_not)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda host: self._pin(host.clone()))
        for name, fake in {
            "Stream": lambda *_: FakeStream(self),
            "Event": lambda **_: FakeEvent(self),
            "stream": self._on,
            "current_stream": lambda *_: self._stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def queue(
        self,
        what: str,
        effect: Callable[[], object] | None = None,
        *,
        stream: FakeStream | None = None,
    ) -> int:
        """The number of the new command."""
        if self.strict and (stream or self._stream) is self.default:
            raise Misuse(f"{what} on the default stream")
        with self._moved:
            number = len(self.commands)
            if number == self.fails_at:
                raise RuntimeError(f"{what} cannot be queued")
            self.commands.append(what)
            if effect is not None:
                self._effects[number] = effect
            self._moved.notify_all()
        return number

    def wait_for_queued(self, what: str, count: int) -> None:
        """Until somebody has queued so many of these commands."""
        with self._moved:
            found = self._moved.wait_for(lambda: self.commands.count(what) >= count, timeout=30)
            assert found, f"{what}: {self.commands}"

    def run(self, upto: int | None = None) -> None:
        """Does what is queued, or so many commands of it."""
        with self._moved, torch.inference_mode():
            upto = len(self.commands) if upto is None else upto
            for number in range(self._done, upto):
                if number in self._effects:
                    self._effects.pop(number)()
            self._done = max(self._done, upto)
            self._moved.notify_all()

    def wait(self, number: int) -> None:
        """Until a command is done."""
        if self._queues and number >= self._done:
            if not self.patient:
                raise Misuse(f"who queues work waits for command {number}")
            self.waits.append(number)
            self.run(number + 1)
        with self._moved:
            assert self._moved.wait_for(lambda: number < self._done, timeout=30), "never done"
            self._seen = max(self._seen, number + 1)

    def copy_in(self, host: Tensor, *, waits: bool) -> None:
        address = host.untyped_storage().data_ptr()
        if not host.numel():
            return
        if waits or address not in self._pinned:
            raise Misuse("a copy to the device that the host waits for")
        if self._read_by.get(address, -1) >= self._seen:
            raise Misuse("a buffer is copied again that the device may not have read")
        self._read_by[address] = self.queue("copy in")

    def copy_out(self, host: Tensor, *, waits: bool) -> None:
        if waits or (host.numel() and host.untyped_storage().data_ptr() not in self._pinned):
            raise Misuse("a copy to the host that the host waits for")
        host.fill_(NOT_YET)
        self.queue("copy out", lambda: host.fill_(ANSWER))

    def _pin(self, host: Tensor) -> Tensor:
        self._pinned[host.untyped_storage().data_ptr()] = host
        return host

    @property
    def _stream(self) -> FakeStream:
        return getattr(self._here, "stream", self.default)

    @property
    def _queues(self) -> bool:
        """Whether this thread queues work now."""
        return self._stream is not self.default

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        before, self._here.stream = self._stream, stream
        try:
            with self.watched():
                yield
        finally:
            self._here.stream = before

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In the block this thread's operations on device tensors are queued."""
        if getattr(self._here, "watched", False):
            yield
            return
        self._here.watched = True
        try:
            with _Watch(self):
                yield
        finally:
            self._here.watched = False


class _Watch(TorchDispatchMode):
    """Has every operation on device tensors queued."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        # In inference mode composite operations come whole.
        kwargs = kwargs or {}
        waits = not (kwargs.get("non_blocking") or any(arg is True for arg in args))
        if func is _ATEN.copy_.default and args[0].device != args[1].device:
            if args[0].device == DEVICE:
                self._gpu.copy_in(args[1], waits=waits)
            else:
                self._gpu.copy_out(args[0], waits=waits)
            return args[0]
        if func in _READS and args[0].device == DEVICE:
            raise Misuse("the host waits for a value")
        moves = func.overloadpacket in (_ATEN.to, _ATEN._to_copy)
        target = [x for x in (*args[1:], kwargs.get("device")) if isinstance(x, torch.device)]
        if moves and args[0].device == DEVICE and target not in ([], [DEVICE]):
            raise Misuse("the host waits for a tensor")
        result = func(*args, **kwargs)
        if moves and args[0].device != result.device:
            self._gpu.copy_in(args[0], waits=waits)
            return result
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        if any(tensor.device == DEVICE for tensor in tensors):
            self._gpu.queue(str(func))
        return result
