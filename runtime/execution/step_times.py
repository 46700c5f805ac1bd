"""The steps that the step-time model starts from: measured, or as an earlier start measured them.

To measure takes up to two seconds. What an earlier start found for the same model, kernels and
options is taken where the first step of it takes as long as it did then: the machine is at the same
speed. What is wrong with it all the same, the model learns from the steps that it serves.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from ops.cpu.remembered import keep, place_of, recall
from runtime.execution.warm_up import time_step
from runtime.scheduling.step_time_model import FIRST, measure_steps

if TYPE_CHECKING:
    from runtime.execution.model_runner import ModelRunner
    from runtime.scheduling.step_time_model import MeasuredSteps

_SAME = 1.25  # two times of one step at one speed of the machine differ by less


def remembered_steps(
    runner: ModelRunner, model: str, *, bound_s: float, context_length: int
) -> MeasuredSteps:
    """See `measure_steps`. model: names all of it that the time of a step follows from. The runner
    must be idle."""
    measure = partial(
        measure_steps, partial(time_step, runner), bound_s=bound_s, context_length=context_length
    )
    parts = runner.device.parts
    if parts is None:
        return measure()
    details = runner.info.details
    path = place_of(parts.library, "step-times", model, details, bound_s, context_length)
    known = _steps(recall(path))
    if known and _at_the_same_speed(runner, known[0]):
        return known
    found = measure()
    if found:
        keep(path, found)
    return found


def _at_the_same_speed(runner: ModelRunner, first: tuple[float, ...]) -> bool:
    time_step(runner, *FIRST)  # whatever is done once is done here
    seconds = time_step(runner, *FIRST)
    return first[-1] / _SAME < seconds < first[-1] * _SAME


def _steps(recalled: Any) -> MeasuredSteps:
    """Those of a file; none where it holds something else."""
    if not isinstance(recalled, list) or not all(map(_is_step, recalled)):
        return ()
    return tuple(map(tuple, recalled))


def _is_step(step: Any) -> bool:
    if not isinstance(step, list) or len(step) != 5:
        return False
    return all(type(value) in (int, float) and 0 <= value < math.inf for value in step)
