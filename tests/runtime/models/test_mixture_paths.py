"""A mixture of experts through scheduler and runner: every path gives transformers' greedy tokens.

On native kernels a token's numbers do not depend on its neighbours either, though they share the
experts' matrix products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from runtime.config import RunnerConfig, SchedulerConfig
from runtime.execution.build import build_runner
from runtime.request import SamplingParams
from runtime.scheduling.scheduler import Scheduler
from tests.runtime.execution.drivers import Run, request, run
from tests.runtime.models.tiny_models import make_model, random_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from runtime.execution.model_runner import ModelRunner
    from runtime.request import Request

NEW_TOKENS = 20
LENGTHS = (1, 9, 70, 33, 18, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moe")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    return make_model(
        folder, "qwen3_moe", **experts, norm_topk_prob=True, mlp_only_layers=[1], scale=0.12
    )


@pytest.fixture(scope="module", params=[pytest.param("torch", marks=pytest.mark.slow), "auto"])
def runner(
    folder: Path, model: PreTrainedModel, request: pytest.FixtureRequest
) -> Iterator[ModelRunner]:
    config = RunnerConfig(
        model=str(folder),
        device="cpu",
        max_total_tokens=2048,
        cpu_kernels=request.param,
        cpu_threads=1,
    )
    runner, _ = build_runner(config, page_size=2, max_running_requests=8)
    yield runner
    runner.close()


def requests(tag: str = "") -> list[Request]:
    sampling = SamplingParams(
        temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2
    )
    shared = random_tokens(16, seed=99)
    return [
        request(f"{tag}{i}", (shared if i % 2 else []) + random_tokens(length, seed=i), sampling)
        for i, length in enumerate(LENGTHS)
    ]


def scheduler(**options: Any) -> Scheduler:
    config = {"capacity_tokens": 2048, "context_length": 512, "chunked_prefill_size": 16}
    return Scheduler(SchedulerConfig(page_size=2, max_running_requests=8, **{**config, **options}))


def tokens(result: Run) -> list[list[int]]:
    return [generated.token_ids for generated in result.outputs.values()]


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    """transformers' own tokens."""
    made = []
    for item in requests():
        prompt = torch.tensor([list(item.input_ids)])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        made.append(out[0, prompt.shape[1] :].tolist())
    return made


def test_it_runs_op_by_op(runner: ModelRunner) -> None:
    assert runner.info.details["decoder"] == "op by op"


@pytest.mark.parametrize("chunk", [7, 64, 0])
def test_greedy_tokens_in_chunks_then_behind_cached_prefixes(
    runner: ModelRunner, expected: list[list[int]], chunk: int
) -> None:
    warm = scheduler(chunked_prefill_size=chunk)
    first = run(warm, runner, requests("first"))
    assert tokens(first) == expected
    assert (first.steps["mixed"] > 0) == (chunk > 0)
    second = run(warm, runner, requests("second"))
    assert tokens(second) == expected
    assert second.cached_tokens >= sum(LENGTHS) - 2 * len(LENGTHS)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.sampled(1)
def test_greedy_tokens_with_retractions(
    runner: ModelRunner, expected: list[list[int]], overlap: bool
) -> None:
    """Which requests are retracted depends on the pool, so several are tried."""
    retractions = 0
    for capacity in (124, 140, 160):
        tight = scheduler(capacity_tokens=capacity, schedule_conservativeness=0.001)
        result = run(tight, runner, requests(), overlap=overlap)
        assert tokens(result) == expected
        retractions += result.retractions
    assert retractions > 0


def test_log_probabilities_do_not_depend_on_neighbours(runner: ModelRunner) -> None:
    single = scheduler(chunked_prefill_size=0, disable_radix_cache=True)
    alone = [run(single, runner, [item]).outputs[item.request_id] for item in requests()]
    together = run(scheduler(), runner, requests()).outputs.values()
    tolerance = 0.0 if runner.info.details["ops"] == "cpu-native" else 1e-5
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=tolerance, rel=0.0)
