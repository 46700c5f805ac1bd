"""Which steps of a runner are captured, and how they get into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.execution.cuda_graph_runner import CudaGraphRunner, GraphOutput, graph_sizes
from runtime.execution.mixed_graph_runner import MixedGraphRunner, mixed_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from runtime.config import RunnerConfig
    from runtime.execution.cuda_graph_runner import GraphRecorder
    from runtime.execution.device import Device
    from runtime.execution.model_runner import ModelRunner, RunnerSizes
    from runtime.execution.packed_step import PackedShape


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What is captured, the smallest first.

    Args:
        decode_sizes: rows of decode steps. shapes: of steps with prompts.
    """

    decode_sizes: list[int]
    shapes: list[PackedShape]


def plan_graphs(config: RunnerConfig, device: Device, sizes: RunnerSizes) -> GraphPlan:
    """What the options ask for, as far as the device can."""
    rows = min(config.cuda_graph_max_bs, sizes.rows) if device.graphs else 0
    return GraphPlan(graph_sizes(rows), mixed_shapes(config.cuda_graph_max_tokens, rows))


def capture_graphs(
    runner: ModelRunner,
    plan: GraphPlan,
    recorder: GraphRecorder,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Gives the runner its captured steps, recorded from the largest to the smallest."""
    where = runner.device.torch_device
    rows = [shape.logits for shape in plan.shapes]
    output = GraphOutput(max(plan.decode_sizes + rows, default=0))
    if plan.shapes:
        runner.mixed_graphs = MixedGraphRunner(
            recorder, runner.packed_logits, plan.shapes, where, output, progress
        )
    if plan.decode_sizes:
        runner.graphs = CudaGraphRunner(
            recorder,
            runner.decode_logits,
            plan.decode_sizes,
            runner.sizes.context_length,
            where,
            progress,
            output,
        )


def rehearse_graphs(runner: ModelRunner, plan: GraphPlan) -> None:
    """Runs the largest step of each kind, which take as much memory as all of them captured: the
    smaller ones are recorded into the same pool."""
    largest = GraphPlan(plan.decode_sizes[-1:], plan.shapes[-1:])
    capture_graphs(runner, largest, _Rehearsal())


class _Rehearsal:
    """Runs a step once instead of recording it."""

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        step()
        return step
