"""What `CudaRecorder` asks of torch, in which order: a graph cannot be captured on a CPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from runtime.execution.cuda_graph_runner import CudaRecorder

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stream:
    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self._told = name, told

    def wait_stream(self, other: Stream) -> None:
        self._told.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked for, with torch's calls replaced."""
    told: list[str] = []
    outer, own = Stream("outer", told), Stream("own", told)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        told.append(f"on {stream.name}")
        yield
        told.append("off")

    class Graph:
        def replay(self) -> None:
            told.append("replay")

    @contextmanager
    def capture(graph: Graph, *, pool: Any, stream: Stream) -> Iterator[None]:
        told.append(f"capture into pool {pool} on {stream.name}")
        yield
        told.append("end of capture")

    for name, fake in {
        "graph_pool_handle": lambda: 7,
        "Stream": lambda device: own,
        "current_stream": lambda: outer,
        "stream": on,
        "CUDAGraph": Graph,
        "graph": capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return told


def test_a_step_is_warmed_up_on_the_capturing_stream_before_it_is_captured(
    told: list[str],
) -> None:
    """The first run of a kernel compiles it, and the first product makes cuBLAS choose and take
    its workspace: in a capture both are errors."""
    recorder = CudaRecorder(torch.device("cpu"))
    outputs = [torch.zeros(1) for _ in range(3)]
    made = iter(outputs)

    def step() -> torch.Tensor:
        told.append("step")
        return next(made)

    replay = recorder.record(step)
    assert told == [
        "own waits for outer",
        "on own",
        "step",
        "step",
        "off",
        "outer waits for own",
        "capture into pool 7 on own",
        "step",
        "end of capture",
    ]
    del told[:]
    assert replay() is outputs[-1], "the tensor in the graph's memory"
    assert replay() is outputs[-1]
    assert told == ["replay", "replay"]
