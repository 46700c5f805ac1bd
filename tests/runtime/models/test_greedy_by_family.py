"""Every family through scheduler and runner: 64 greedy tokens of a ragged batch are transformers',
in chunks, whole, behind cached prefixes, and after retractions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from runtime.config import RunnerConfig, SchedulerConfig
from runtime.execution.build import build_runner
from runtime.request import SamplingParams
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.execution.drivers import Run, request, run
from tests.runtime.models.test_families import FAMILIES
from tests.runtime.models.tiny_models import expected_logits, make_model, random_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.execution.model_runner import ModelRunner
    from runtime.request import Request

NEW_TOKENS = 64
SHARED = random_tokens(24, seed=99)
PROMPTS = [
    random_tokens(1, seed=1),
    SHARED + random_tokens(9, seed=2),
    random_tokens(70, seed=3),
    SHARED + random_tokens(20, seed=4),
]
PAGE_SIZE = 2


def requests() -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return [request(str(i), prompt, sampling) for i, prompt in enumerate(PROMPTS)]


def serve(runner: ModelRunner, scheduler: Scheduler) -> Run:
    return run(scheduler, runner, requests(), check=False)


def tokens(result: Run) -> list[list[int]]:
    return [output.token_ids for output in result.outputs.values()]


def scheduler(**options: Any) -> Scheduler:
    config = {"capacity_tokens": 2048, "context_length": 512, "page_size": PAGE_SIZE}
    return Scheduler(SchedulerConfig(max_running_requests=8, **{**config, **options}))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_on_every_path_equal_transformers(name: str, tmp_path: Path) -> None:
    model_type, special = FAMILIES[name]
    model = make_model(tmp_path, model_type, **special)
    config = RunnerConfig(
        model=str(tmp_path), device="cpu", dtype="float32", max_total_tokens=2048, cpu_threads=1
    )
    runner, _ = build_runner(config, page_size=PAGE_SIZE, max_running_requests=8)
    whole = tokens(serve(runner, scheduler(chunked_prefill_size=0)))
    for prompt, generated in zip(PROMPTS, whole, strict=True):
        # Each token is the likeliest one behind those before it, so they are the greedy ones.
        logits = expected_logits(model, prompt + generated[:-1])[len(prompt) - 1 :]
        assert generated == logits.argmax(-1).tolist()
    for chunk in (7, 64):
        chunked = scheduler(chunked_prefill_size=chunk)
        assert tokens(serve(runner, chunked)) == whole
        again = serve(runner, chunked)
        assert tokens(again) == whole
        assert again.cached_tokens == sum((len(prompt) - 1) // 2 * 2 for prompt in PROMPTS)
    tight = scheduler(chunked_prefill_size=64, capacity_tokens=240, schedule_conservativeness=0.001)
    retracted = serve(runner, tight)
    assert tokens(retracted) == whole
    assert retracted.retractions > 0
    runner.close()
