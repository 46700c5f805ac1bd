"""Runs every kernel that serving may need once, before the first request.

Triton compiles a kernel when it is first launched, for seconds each; in service that would be a
stall of all requests. The steps here are made for request row 0, whose table entries all name the
reserved page, so they read and write nothing that a request owns.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from runtime.execution.unplanned_step import unplanned_step
from runtime.request import Request, SamplingParams
from runtime.runner import SampleMasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.execution.model_runner import ModelRunner

# A kernel for prompts, one for a mixed step of few tokens, and one for decode rows.
_LENGTHS = (256, 2, 1)
_TOKEN = 0
_PLAIN = SamplingParams(temperature=1.0, seed=0)
_EXTRAS = SamplingParams(
    temperature=0.0,
    logit_bias=((_TOKEN, 1.0),),
    min_tokens=1,
    stop_token_ids=frozenset({_TOKEN}),
    logprobs=1,
)


def warm_up(runner: ModelRunner) -> None:
    """Prefills row 0 once per kind of attention and of sampling. The runner must be idle."""
    vocab_size = runner.info.vocab_size
    words = np.full((1, (vocab_size + 31) // 32), -1, dtype=np.int32)
    greedy = SamplingParams(temperature=0.0)
    for length in _LENGTHS:
        _run(runner, min(length, runner.sizes.context_length), greedy)
    for sampling in (greedy, _PLAIN, replace(_PLAIN, top_k=2, top_p=0.9)):
        _run(runner, 1, sampling)
        _run(runner, 1, replace(sampling, presence_penalty=0.5))
        # What changes logits has them in float32, whatever the model's type.
        _run(runner, 1, replace(sampling, logit_bias=((_TOKEN, 1.0),)))
    _run(runner, 1, _EXTRAS, SampleMasks([0], words))


def time_step(runner: ModelRunner, tokens: int, history: int, rows: int, row_tokens: int) -> float:
    """Seconds of a step with a piece of a prompt and decode rows, as `measure_steps` asks for.
    The runner must be idle."""
    greedy = SamplingParams(temperature=0.0)
    return _run(runner, tokens, greedy, history=history, rows=[row_tokens] * rows)


def largest_step(runner: ModelRunner, tokens: int) -> None:
    """A step that takes as much memory as any: `tokens` of a prompt and a decode row for every
    request, sampled with all that sampling can be asked for. The runner must be idle."""
    everything = replace(_EXTRAS, temperature=1.0, top_p=0.9, presence_penalty=0.5)
    _run(runner, tokens, everything, rows=[1] * (runner.sizes.rows - 1))


def _run(
    runner: ModelRunner,
    length: int,
    sampling: SamplingParams,
    masks: SampleMasks | None = None,
    *,
    history: int = 0,
    rows: Sequence[int] = (),
) -> float:
    """Seconds of a step. rows: cached tokens of the decode rows beside the prompt."""
    tokens = array("i", [_TOKEN] * length)
    starts = [history, *rows]
    requests = [Request("warm-up", tokens, sampling, arrival_s=0.0)] * len(starts)
    step = runner.launch(unplanned_step(requests, [0] * len(starts), starts, tokens))
    step.sample(masks)
    return step.result().device_s
