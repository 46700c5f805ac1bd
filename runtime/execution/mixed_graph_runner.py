"""Steps with prompts as CUDA graphs: for any division of a fixed number of tokens.

Without them the host launches some ten kernels a layer, 5 to 7 ms of a step that a small model
computes in 1. A step of T tokens and B rows is packed into the smallest captured shape that holds
it (`packed_step`), copied over the static ints, and replayed. Tokens and rows beyond its own are
padding; how many of either are decode rows is data.

The ladder of tokens is close where a step's time grows with them, and wide below some 256, where
reading the weights decides. Rows cost little: programs that find nothing to do.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from runtime.execution.packed_step import PackedShape, empty_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from runtime.execution.cuda_graph_runner import GraphOutput, GraphRecorder

_TOKENS = (32, 64, 128, 192, 256)  # then every 128


def mixed_shapes(max_tokens: int, max_rows: int) -> list[PackedShape]:
    """The shapes to capture, the smallest first: each number of tokens (32, 64, 128, 192, 256, then
    by 128) with 16, 64, 256, ... rows; the largest are max_tokens and max_rows themselves."""
    if max_tokens < 1 or max_rows < 1:
        return []
    tokens = [*_TOKENS, *range(384, max_tokens, 128)]
    rows = [16 * 4**i for i in range(max_rows.bit_length())]
    shapes = {
        PackedShape(count, min(most, count), min(most, count), min(most, count))
        for count in _up_to(max_tokens, tokens)
        for most in _up_to(max_rows, rows)
    }
    return sorted(shapes)


def _up_to(largest: int, ladder: Sequence[int]) -> list[int]:
    return [size for size in ladder if size < largest] + [largest]


class MixedGraphRunner:
    """The captured steps with prompts of a model runner (its `MixedGraphs`).

    Args:
        recorder, output: see `CudaGraphRunner`.
        packed_logits: logits of a packed step on the device (`ModelRunner.packed_logits`). It must
            neither wait for the device nor allocate what outlives the call.
        shapes: ascending, of as many decode rows as prompts and logits.
    """

    def __init__(
        self,
        recorder: GraphRecorder,
        packed_logits: Callable[[Tensor, PackedShape], Tensor],
        shapes: Sequence[PackedShape],
        device: torch.device,
        output: GraphOutput,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.shapes = list(shapes)
        self._packed_logits = packed_logits
        self._output = output
        self._ints = torch.zeros(
            max(sum(shape.sizes) for shape in shapes), dtype=torch.int32, device=device
        )
        self._replays: dict[PackedShape, Callable[[], Tensor]] = {}
        with torch.inference_mode():
            for shape in reversed(self.shapes):
                progress(f"capturing steps of {shape.tokens} tokens in {shape.prompts} rows")
                padding = torch.from_numpy(empty_step(shape))
                self._ints[: len(padding)].copy_(padding)
                self._replays[shape] = recorder.record(partial(self._step, shape))

    def _step(self, shape: PackedShape) -> Tensor:
        """What is recorded: a step over the static ints."""
        return self._output.take(self._packed_logits(self._ints[: sum(shape.sizes)], shape))

    def padded_shape(self, tokens: int, rows: int) -> PackedShape | None:
        """The smallest captured shape that holds a step; None: none does."""
        fitting = (s for s in self.shapes if s.tokens >= tokens and s.prompts >= rows)
        return next(fitting, None)

    def replay(self, packed: Tensor, shape: PackedShape) -> Tensor:
        """Logits [shape.logits, V] of a step packed into a captured shape, K and V stored.
        Valid until the next replay of any step."""
        self._ints[: packed.shape[0]].copy_(packed)
        return self._replays[shape]()
