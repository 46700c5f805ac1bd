"""A tiny model through scheduler and runner: every path gives the same tokens and log-probabilities.

The requests differ in everything that sampling can be asked for. What each path gives is compared
with the same requests run one at a time, and log-probabilities with transformers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from runtime.config import RunnerConfig, SchedulerConfig
from runtime.execution.build import build_runner
from runtime.execution.graph_capture import GraphPlan, capture_graphs
from runtime.execution.model_runner import ModelRunner
from runtime.execution.packed_step import PackedShape
from runtime.request import FinishReason, SamplingParams
from runtime.scheduling.scheduler import Scheduler
from scripts._eager_recorder import EagerRecorder
from tests.ops.gpu.tiny_decoder import queued
from tests.runtime.execution.drivers import Run, request, run
from tests.runtime.models.tiny_models import expected_logits, make_model, random_tokens
from tests.values import present

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from runtime.request import Request
    from runtime.scheduling.schedule_batch import ScheduleBatch

POOL = 2048
TIGHT_POOLS = (128, 144, 160, 192)
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=-5),
    SamplingParams(temperature=1.5, min_p=0.1, seed=2**63 + 11, logprobs=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, logprobs=0),
    SamplingParams(temperature=0.7, presence_penalty=1.0, frequency_penalty=0.5, seed=3),
    SamplingParams(temperature=0.0, logit_bias=((40, 3.0), (41, -4.0)), prompt_logprobs=2),
    SamplingParams(temperature=0.0, frequency_penalty=0.8, min_tokens=9, prompt_logprobs=0),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return make_model(folder, "llama", scale=0.12, seed=5)


def with_graphs(built: ModelRunner) -> ModelRunner:
    """The model on a device that queues work; steps of up to 20 tokens in 12 rows are captured."""
    runner = ModelRunner(queued(built.device), built.decoder, built.sizes)
    shapes = [PackedShape(8, 8, 8, 8), PackedShape(20, 12, 12, 12)]
    capture_graphs(runner, GraphPlan([1, 4, 12], shapes), EagerRecorder())
    return runner


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("torch", marks=pytest.mark.slow),
        pytest.param("torch, queued, with graphs", marks=pytest.mark.slow),
        "auto",
    ],
)
def runner(
    folder: Path, model: PreTrainedModel, request: pytest.FixtureRequest
) -> Iterator[ModelRunner]:
    kernels, *graphs = request.param.split(", ", 1)
    config = RunnerConfig(
        model=str(folder),
        device="cpu",
        max_total_tokens=POOL,
        cpu_kernels=kernels,
        cpu_threads=1,
    )
    runner, _ = build_runner(config, page_size=4, max_running_requests=16)
    if graphs:
        runner.close()
        runner = with_graphs(runner)
    yield runner
    runner.close()


def scheduler(**options: Any) -> Scheduler:
    config = {"capacity_tokens": POOL, "context_length": 512, "chunked_prefill_size": 16}
    return Scheduler(SchedulerConfig(page_size=4, max_running_requests=16, **{**config, **options}))


def tight_scheduler(capacity: int) -> Scheduler:
    """A pool of a few requests that admits as if they would end at once."""
    return scheduler(capacity_tokens=capacity, schedule_conservativeness=0.001)


def requests(tag: str = "") -> list[Request]:
    """16 requests, two for each kind of sampling; some share the beginning of their prompt."""
    shared = random_tokens(24, seed=99, vocab_size=128)
    made = []
    for i in range(16):
        own = random_tokens(5 + 7 * (i % 5), seed=i, vocab_size=128)
        sampling = replace(SAMPLINGS[i % 8], max_new_tokens=12 + i, ignore_eos=True)
        made.append(request(f"{tag}{i}", (shared if i % 3 == 0 else []) + own, sampling))
    return made


def tokens(result: Run) -> list[list[int]]:
    return [generated.token_ids for generated in result.outputs.values()]


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> list[list[int]]:
    """Each request run by itself, without overlap, chunks or cache."""
    single = scheduler(chunked_prefill_size=0, disable_radix_cache=True)
    return [tokens(run(single, runner, [item], overlap=False))[0] for item in requests()]


def test_requests_do_not_see_one_another(runner: ModelRunner, alone: list[list[int]]) -> None:
    result = run(scheduler(), runner, requests())
    assert tokens(result) == alone
    assert result.launched_ahead > 10
    assert result.steps["mixed"] > 5
    assert result.cached_tokens > 0


def test_without_overlap(runner: ModelRunner, alone: list[list[int]]) -> None:
    result = run(scheduler(), runner, requests(), overlap=False)
    assert tokens(result) == alone
    assert result.launched_ahead == 0


def test_without_mixed_steps(runner: ModelRunner, alone: list[list[int]]) -> None:
    result = run(scheduler(disable_mixed_chunk=True), runner, requests())
    assert tokens(result) == alone
    assert result.steps["mixed"] == 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.sampled(1)
def test_with_retractions(runner: ModelRunner, alone: list[list[int]], overlap: bool) -> None:
    """Which requests are retracted depends on the pool, so several are tried."""
    retracted = []
    for capacity in TIGHT_POOLS:
        result = run(tight_scheduler(capacity), runner, requests(), overlap=overlap)
        assert tokens(result) == alone
        retracted += [item for item in result.requests.values() if item.retractions]
    assert len(retracted) >= 3
    assert any(item.sampling.frequency_penalty for item in retracted)


@pytest.mark.parametrize("mixing", [True, False], ids=["mixed", "strict"])
def test_with_steps_that_fail(runner: ModelRunner, alone: list[list[int]], mixing: bool) -> None:
    """What the device did for them, and for the steps behind them, is done again: penalty counts
    and newest tokens are those of before."""
    failed, retried = [], []

    def fails(batch: ScheduleBatch) -> bool:
        retried.append(batch.retry)
        if batch.step % 4 or len(batch.requests) == 1:
            return False
        failed.append(batch.kind)
        return True

    made = scheduler(disable_mixed_chunk=not mixing)
    result = run(made, runner, requests(), fails=fails)
    assert tokens(result) == alone
    assert {"mixed", "decode"} <= set(failed) if mixing else {"prefill", "decode"} <= set(failed)
    assert sum(retried) > 10


def test_with_every_prefix_cached(runner: ModelRunner, alone: list[list[int]]) -> None:
    warm = scheduler()
    run(warm, runner, requests("first"))
    result = run(warm, runner, requests("second"))
    assert tokens(result) == alone
    asked = [r for r in result.requests.values() if r.sampling.prompt_logprobs is None]
    assert all(r.cached_tokens >= len(r.input_ids) - 4 for r in asked)


def test_greedy_tokens_equal_transformers(
    runner: ModelRunner, model: PreTrainedModel, alone: list[list[int]]
) -> None:
    for item, got in list(zip(requests(), alone, strict=True))[::8]:
        prompt = torch.tensor([list(item.input_ids)])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(got),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out[0, prompt.shape[1] :].tolist() == got


def test_logprobs_are_the_models_own(runner: ModelRunner, model: PreTrainedModel) -> None:
    check_logprobs(run(scheduler(), runner, requests()), model)


def test_logprobs_after_a_retraction(runner: ModelRunner, model: PreTrainedModel) -> None:
    retracted = []
    for capacity in TIGHT_POOLS:
        result = run(tight_scheduler(capacity), runner, requests())
        check_logprobs(result, model)
        retracted += [item.sampling for item in result.requests.values() if item.retractions]
    assert any(sampling.logprobs is not None for sampling in retracted)
    assert any(sampling.prompt_logprobs is not None for sampling in retracted)


def check_logprobs(result: Run, model: PreTrainedModel) -> None:
    for item in result.requests.values():
        generated = result.outputs[item.request_id]
        prompt = list(item.input_ids)
        want = expected_logits(model, prompt + generated.token_ids).log_softmax(-1)
        asked, prompt_asked = item.sampling.logprobs, item.sampling.prompt_logprobs
        if asked is None:
            assert generated.logprobs == []
        else:
            check_records(generated.logprobs, generated.token_ids, want[len(prompt) - 1 :], asked)
        if prompt_asked is None:
            assert generated.prompt_logprobs is None
        else:
            first, *others = present(generated.prompt_logprobs)
            assert first is None
            check_records(others, prompt[1:], want, prompt_asked)


def check_records(records: list[Any], token_ids: list[int], want: torch.Tensor, count: int) -> None:
    for i, (record, token) in enumerate(zip(records, token_ids, strict=True)):
        assert record.token_id == token
        assert record.logprob == pytest.approx(float(want[i, token]), abs=1e-4)
        values, ids = want[i].topk(count)
        assert [token for token, _ in record.top] == ids.tolist()
        assert [value for _, value in record.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("stop", [{2, 3}, {2, 3, 50}], ids=["eos", "eos-and-stop-id"])
def test_the_end_is_possible_after_exactly_min_tokens(
    runner: ModelRunner, min_tokens: int, stop: set[int]
) -> None:
    """Every id that would end the request is biased to be chosen whenever it may be."""
    runner.sampler.state._eos = frozenset({2, 3})
    sampling = SamplingParams(
        temperature=0.0,
        max_new_tokens=20,
        min_tokens=min_tokens,
        stop_token_ids=frozenset(stop - {2, 3}),
        logit_bias=tuple((token, 100.0) for token in stop),
    )
    ending = scheduler(eos_token_ids=frozenset({2, 3}))
    result = run(ending, runner, [request("a", random_tokens(30), sampling)])
    (generated,) = result.outputs.values()
    assert len(generated.token_ids) == min_tokens + 1
    assert not set(generated.token_ids[:-1]) & stop
    assert generated.token_ids[-1] in stop
    assert present(generated.finish).reason is FinishReason.STOP


def test_a_request_whose_logits_are_nan_ends_alone(folder: Path, model: PreTrainedModel) -> None:
    config = RunnerConfig(
        model=str(folder), device="cpu", max_total_tokens=POOL, cpu_kernels="torch"
    )
    runner, _ = build_runner(config, page_size=4, max_running_requests=16)
    runner.decoder.model.embedding[7] = math.nan
    sampling = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    good, bad = random_tokens(19), [9, 7, 9]
    batch = scheduler()
    result = run(batch, runner, [request(n, p, sampling) for n, p in [("g", good), ("b", bad)]])
    assert len(result.outputs["g"].token_ids) == 8
    assert present(result.outputs["g"].finish).reason is FinishReason.LENGTH
    assert result.outputs["b"].token_ids == []
    assert present(result.outputs["b"].finish).reason is FinishReason.ERROR
    assert "NaN" in present(present(result.outputs["b"].finish).message)
    # The pages that held NaN are used again, and nothing of them is seen.
    again = run(batch, runner, [request("g2", good, sampling)])
    runner.close()
    assert again.outputs["g2"].token_ids == result.outputs["g"].token_ids


def test_ids_that_the_tokenizer_lacks_are_never_sampled(
    folder: Path, tmp_path: Path, model: PreTrainedModel
) -> None:
    padded = make_model(tmp_path, "llama", scale=0.12, seed=5)
    with torch.no_grad():
        padded.lm_head.weight[128:] *= 50  # the padding has the largest and smallest logits
    padded.save_pretrained(tmp_path)
    config = RunnerConfig(model=str(tmp_path), device="cpu", max_total_tokens=POOL)
    runner, _ = build_runner(config, page_size=4, max_running_requests=16, tokenizer_size=128)
    assert runner.info.vocab_size == 128
    result = run(scheduler(), runner, requests())
    runner.close()
    assert max(max(ids) for ids in tokens(result)) < 128
