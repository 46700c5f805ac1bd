"""What the step-time model starts from: a short measurement of this machine, made at start.

The steps are few, small and unlike each other: pieces of a prompt alone, beside decode rows, and
behind a history, so that every term of the model shows in some. Larger pieces follow as long as
they stay well within the bound, since time does not grow evenly where bandwidth still hides
arithmetic. The result is part of the scheduler's recorded configuration: a replay starts alike.
"""

from __future__ import annotations

from collections.abc import Callable

StepTimer = Callable[[int, int, int, int], float]
MeasuredSteps = tuple[tuple[float, ...], ...]

HISTORY = 2048
ROWS = 8
SHORT, LONG = 64, 512  # cached tokens of a decode row
SIZES = ((4, SHORT), (8, LONG), (16, SHORT))  # and of the decode rows beside them
LARGEST = 1024
BUDGET_S = 2.0  # a model so slow that this ends the measurement learns the rest while it serves


def measure_steps(time_step: StepTimer, *, bound_s: float, context_length: int) -> MeasuredSteps:
    """Times steps until the bound is in sight, or the time for it is up.

    Args:
        time_step: runs a step of (prompt tokens, tokens before them, decode rows, cached tokens of
            each row) and gives its seconds.
    Returns:
        (tokens, square, rows, context, seconds) of each, see `step_time_model.StepShape`.
    """
    found: list[tuple[float, ...]] = []

    def measure(tokens: int, history: int, rows: int, row_tokens: int) -> float:
        seconds = time_step(tokens, history, rows, row_tokens)
        square = tokens * (tokens + 2 * history)
        found.append((tokens, square, rows, rows * (row_tokens + 1), seconds))
        return seconds

    if context_length < 2 * LONG:
        return ()  # a toy: it is learned in no time
    time_step(1, 0, ROWS, SHORT)  # whatever is done once is done here
    spent = measure(1, 0, 0, 0)
    history = min(HISTORY, context_length // 2)
    tokens, seconds = 0, 0.0
    for tokens, cached in SIZES:
        for shape in ((0, 0, 0), (0, ROWS, cached), (history, 0, 0)):
            if spent > BUDGET_S:
                return tuple(found)
            spent += measure(tokens, *shape)
    while spent < BUDGET_S and seconds < bound_s / 2 and tokens < min(LARGEST, context_length // 2):
        tokens *= 2
        seconds = measure(tokens, 0, ROWS, SHORT)
        spent += seconds
    return tuple(found)
