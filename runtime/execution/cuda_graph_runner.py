"""Decode steps as CUDA graphs: captured once per batch size, replayed without the host's launches.

A graph is a fixed sequence of kernels over fixed memory, so a step of B rows runs in the smallest
captured size that holds it, on static input buffers. Rows past B are padding: request row 0 with
one key, whose table entries all name the reserved page, so they read and write its first slot only.
They are written anew before every replay, since a row left from a larger step would store over the
KV of a request that lives.

Sizes are captured from the largest to the smallest and share one memory pool, so the small ones
use the memory of the largest. They also share one output (`GraphOutput`).
"""

from __future__ import annotations

import bisect
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_WARM_UPS = 2


def graph_sizes(max_rows: int) -> list[int]:
    """The batch sizes to capture: 1, 2, 4, 8, 12, then 16 to 256 by 8, to 511 by 16, on by 32.

    The largest size is max_rows itself, so that every step up to it is replayed.
    """
    ladder = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_rows, 32)]
    return [size for size in ladder if size < max_rows] + [max_rows] * (max_rows > 0)


class GraphRecorder(Protocol):
    """Turns a step over static buffers into something that can be run again."""

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Warms the step up and records it.

        Returns: a call that runs the recorded step and returns its output, the same tensor each
            time, valid until the next run of any step of this recorder.
        """


class CudaRecorder:
    """Captures with `torch.cuda.CUDAGraph`; all graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # Warm-ups compile kernels and let cuBLAS choose; neither may happen during the capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = step()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


class GraphOutput:
    """The logits of whichever captured step ran last.

    All steps write to one buffer: an output of its own for every captured size, alive for good,
    would take 1.3 GB at 152k bfloat16 logits and sizes up to 256.

    Args: rows: the most that a step has.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._logits: Tensor | None = None

    def take(self, logits: Tensor) -> Tensor:
        """A view of the buffer with the values of logits [N, V]."""
        if self._logits is None:  # in the first warm-up, so outside of the graphs' memory
            self._logits = logits.new_empty((self._rows, logits.shape[1]))
        return self._logits[: logits.shape[0]].copy_(logits)


class CudaGraphRunner:
    """The captured decode steps of a model runner (its `DecodeGraphs`).

    Args:
        recorder: how steps are recorded.
        decode_logits: logits [B, V] of a decode step from rows and kv_lens, both [B] int32 on the
            device (`ModelRunner.decode_logits`); the third argument bounds kv_lens. It must
            neither wait for the device nor allocate what outlives the call.
        sizes: ascending batch sizes.
        max_kv_len: tokens of the longest sequence.
        output: shared with other captured steps; None: of its own.
    """

    def __init__(
        self,
        recorder: GraphRecorder,
        decode_logits: Callable[[Tensor, Tensor, int], Tensor],
        sizes: Sequence[int],
        max_kv_len: int,
        device: torch.device,
        progress: Callable[[str], None] = lambda _: None,
        output: GraphOutput | None = None,
    ) -> None:
        self.sizes = list(sizes)
        largest = self.sizes[-1]
        self.rows = torch.zeros(largest, dtype=torch.int32, device=device)
        self.kv_lens = torch.ones(largest, dtype=torch.int32, device=device)
        self._decode_logits = decode_logits
        self._max_kv_len = max_kv_len
        self._output = output or GraphOutput(largest)
        self._replays: dict[int, Callable[[], Tensor]] = {}
        with torch.inference_mode():
            for size in reversed(self.sizes):
                progress(f"capturing decode steps of {size} rows")
                self._replays[size] = recorder.record(partial(self._step, size))

    def _step(self, size: int) -> Tensor:
        """What is recorded: a decode step over the static buffers."""
        logits = self._decode_logits(self.rows[:size], self.kv_lens[:size], self._max_kv_len)
        return self._output.take(logits)

    def holds(self, rows: int) -> bool:
        """Whether some captured size holds a decode step of so many rows."""
        return rows <= self.sizes[-1]

    def padded_size(self, rows: int) -> int:
        """The smallest captured size that holds a step which `holds`."""
        return self.sizes[bisect.bisect_left(self.sizes, rows)]

    def replay(self, rows: Tensor, kv_lens: Tensor) -> Tensor:
        """Logits [B, V] of a decode step of B rows that `holds`, K and V stored.

        Args:
            rows: [B] int32, request rows. kv_lens: [B] int32, keys of each, the new token included.
        Returns: a view that is valid until the next replay.
        """
        count = rows.shape[0]
        size = self.padded_size(count)
        self.rows[:count].copy_(rows)
        self.kv_lens[:count].copy_(kv_lens)
        self.rows[count:size].zero_()
        self.kv_lens[count:size].fill_(1)
        return self._replays[size]()[:count]
