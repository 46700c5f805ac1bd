"""Rotary frequencies that follow a prompt's length, through scheduler and runner, against
transformers generating with its cache: beside shorter and longer prompts that begin alike."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

from runtime.config import RunnerConfig, SchedulerConfig
from runtime.execution.build import build_runner
from runtime.request import SamplingParams
from runtime.rope_layout import LongPrompts
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.execution.drivers import Run, request, run
from tests.runtime.models.tiny_models import make_model, random_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from runtime.execution.model_runner import ModelRunner

ORIGINAL, NEW_TOKENS = 64, 24
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
TYPES: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_parameters": {"rope_type": "longrope", **LONG, "factor": 4.0, "rope_theta": 1e4}
        | {"original_max_position_embeddings": ORIGINAL},
    },
    "dynamic": {
        "max_position_embeddings": ORIGINAL,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    },
}
TOKENS = random_tokens(130)
# One grows beyond the original context; the others are longer from the start.
PROMPTS = [TOKENS[:50], TOKENS[:64], TOKENS[:65], TOKENS[:90], TOKENS[:90], TOKENS]


@pytest.fixture(scope="module", params=TYPES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder, "llama", seed=5, **TYPES[request.param])
    return folder, [generated(model, prompt) for prompt in PROMPTS]


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    # transformers 5.2x renamed the argument.
    names = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in names else "past_key_values"
    cache, ids, tokens = DynamicCache(config=model.config), prompt, []
    with torch.no_grad():
        model(torch.tensor([[3]]))  # forgets the frequencies of the sequence before
        for _ in range(NEW_TOKENS):
            logits = model(torch.tensor([ids]), **{argument: cache}, use_cache=True).logits
            ids = [int(logits[0, -1].argmax())]
            tokens += ids
    return tokens


@pytest.fixture(scope="module", params=[pytest.param("torch", marks=pytest.mark.slow), "auto"])
def runner(
    model: tuple[Path, list[list[int]]], request: pytest.FixtureRequest
) -> Iterator[ModelRunner]:
    options = {"device": "cpu", "cpu_kernels": request.param, "cpu_threads": 1}
    config = RunnerConfig(model=str(model[0]), max_total_tokens=1024, **options)
    runner, _ = build_runner(config, page_size=4, max_running_requests=8)
    yield runner
    runner.close()


def serve(runner: ModelRunner, scheduler: Scheduler) -> Run:
    long_prompts = runner.info.long_prompts
    assert long_prompts is not None
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [
        request(str(i), prompt, sampling, namespace=long_prompts.namespace("", len(prompt)))
        for i, prompt in enumerate(PROMPTS)
    ]
    return run(scheduler, runner, requests)


def tokens(result: Run) -> list[list[int]]:
    return [output.token_ids for output in result.outputs.values()]


def scheduler(**options: Any) -> Scheduler:
    config = {"capacity_tokens": 1024, "context_length": 256, "chunked_prefill_size": 64}
    return Scheduler(SchedulerConfig(page_size=4, max_running_requests=8, **{**config, **options}))


@pytest.mark.parametrize("chunk", [8, 64, 0])
def test_tokens_equal_transformers_in_chunks_and_behind_cached_prefixes(
    runner: ModelRunner, model: tuple[Path, list[list[int]]], chunk: int
) -> None:
    served = scheduler(chunked_prefill_size=chunk)
    assert tokens(serve(runner, served)) == model[1]
    again = serve(runner, served)
    assert tokens(again) == model[1]
    cached = [request.cached_tokens for request in again.requests.values()]
    assert cached == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]


def test_tokens_equal_transformers_with_retractions(
    runner: ModelRunner, model: tuple[Path, list[list[int]]]
) -> None:
    """What was generated is prefilled again with the frequencies that it had. Which requests are
    retracted depends on the pool, so several are tried."""
    retractions = 0
    for capacity in (200, 260, 320):
        tight = scheduler(capacity_tokens=capacity, schedule_conservativeness=0.001)
        result = serve(runner, tight)
        assert tokens(result) == model[1]
        retractions += result.retractions
    assert retractions > 0


def test_prompts_of_other_frequencies_share_nothing() -> None:
    shared, each = LongPrompts(64, by_length=False), LongPrompts(64, by_length=True)
    assert [shared.namespace("", n) for n in (1, 64, 65, 90)] == ["0:", "0:", "1:", "1:"]
    assert [each.namespace("", n) for n in (1, 64, 65, 90)] == ["0:", "0:", "65:", "90:"]
    assert shared.namespace("1:", 5) != shared.namespace("", 90)
