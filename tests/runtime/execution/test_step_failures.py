"""Steps of a real model that fail: the others' tokens are those of an undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import runtime.execution.model_runner as model_runner
from runtime.config import RunnerConfig, SchedulerConfig
from runtime.execution.build import build_runner
from runtime.execution.graph_capture import GraphPlan, capture_graphs
from runtime.execution.launchers import StreamLauncher, ThreadLauncher
from runtime.execution.model_runner import ModelRunner, ModelStep
from runtime.execution.packed_step import PackedShape
from runtime.request import FinishReason, Request, SamplingParams
from runtime.scheduling.scheduler import Scheduler
from scripts._eager_recorder import EagerRecorder
from tests.ops.gpu.tiny_decoder import queued
from tests.runtime.execution.drivers import Generated, Run, request, run
from tests.runtime.models.tiny_models import make_model, random_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.scheduling.schedule_batch import ScheduleBatch

PLAIN = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
# Penalties so strong that a token counted twice, or not at all, shows in the next one.
COUNTED = replace(PLAIN, presence_penalty=1.5, frequency_penalty=1.5, repetition_penalty=1.8)
DRAWN = replace(COUNTED, temperature=1.2, top_p=0.9, seed=7, logprobs=1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder, "llama", scale=0.12)
    config = RunnerConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_total_tokens=1024,
        cpu_kernels="torch",
        cpu_threads=1,
    )
    runner, _ = build_runner(config, page_size=4, max_running_requests=8)
    yield runner
    runner.close()


@pytest.fixture(params=[ThreadLauncher, StreamLauncher, "graphs"])
def runner(
    built: ModelRunner, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModelRunner]:
    device = built.device
    if request.param is StreamLauncher:
        monkeypatch.setattr(model_runner, "ThreadLauncher", lambda: StreamLauncher(device))
    elif request.param == "graphs":
        device = queued(device)
    runner = ModelRunner(device, built.decoder, built.sizes)
    if request.param == "graphs":  # some steps of this load are captured, some are not
        capture_graphs(runner, GraphPlan([2, 4], [PackedShape(18, 4, 4, 4)]), EagerRecorder())
    yield runner
    runner.close()


def requests() -> list[Request]:
    return [
        request("counted", random_tokens(9, seed=1), COUNTED),
        request("drawn", random_tokens(14, seed=2), DRAWN),
        request("chunks", random_tokens(70, seed=3), replace(DRAWN, seed=11)),
        request("guilty", random_tokens(40, seed=4), PLAIN),
        request("plain", random_tokens(5, seed=5), PLAIN),
    ]


def generate(runner: ModelRunner, overlap: bool = True) -> Run:
    config = SchedulerConfig(
        capacity_tokens=1024,
        context_length=512,
        page_size=4,
        chunked_prefill_size=16,
        max_running_requests=8,
    )
    return run(Scheduler(config), runner, requests(), overlap=overlap)


@pytest.fixture(scope="module")
def wanted(built: ModelRunner) -> dict[str, Generated]:
    """What everybody gets where no step fails."""
    return generate(built, overlap=False).outputs


def fail_in(
    part: str, count: int, monkeypatch: pytest.MonkeyPatch, *, after: bool, times: int
) -> None:
    """Makes the steps fail that would give the guilty row its token number `count`."""
    original = getattr(ModelStep, part)
    left = [times]

    def wrapper(step: ModelStep, *arguments: Any) -> Any:
        batch: ScheduleBatch = step._batch
        counts = {
            batch.requests[row].request_id: n
            for row, n in zip(batch.sampled, batch.output_counts, strict=True)
        }
        guilty = left[0] > 0 and counts.get("guilty") == count
        left[0] -= guilty
        result = original(step, *arguments) if after or not guilty else None
        if guilty:
            raise RuntimeError(f"{part} broke")
        return result

    monkeypatch.setattr(ModelStep, part, wrapper)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize(
    ("part", "after"),
    [
        pytest.param("forward", False, id="forward"),
        pytest.param("sample", False, id="sample"),
        pytest.param("sample", True, id="sampled-and-counted"),
        pytest.param("output", True, id="output"),
    ],
)
@pytest.mark.parametrize("count", [0, 5], ids=["first-token", "later-token"])
@pytest.mark.sampled(6)
def test_others_get_the_tokens_of_an_undisturbed_run(
    runner: ModelRunner,
    wanted: dict[str, Generated],
    part: str,
    after: bool,
    count: int,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_in(part, count, monkeypatch, after=after, times=99)
    found = generate(runner, overlap)
    guilty = found.outputs.pop("guilty")
    assert guilty.finish is not None
    assert guilty.finish.reason is FinishReason.ERROR
    assert guilty.token_ids == wanted["guilty"].token_ids[:count]
    assert found.failed_steps > 1
    for name, generated in found.outputs.items():
        assert generated.token_ids == wanted[name].token_ids, name
        assert len(generated.logprobs) == len(wanted[name].logprobs)


@pytest.mark.parametrize("part", ["forward", "sample", "output"])
@pytest.mark.sampled(5)
def test_a_failure_by_chance_changes_nothing(
    runner: ModelRunner,
    wanted: dict[str, Generated],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_in(part, 4, monkeypatch, after=True, times=1)
    found = generate(runner)
    assert found.failed_steps == 1
    for name, generated in found.outputs.items():
        assert generated.token_ids == wanted[name].token_ids, name


def test_a_device_that_computes_passes_the_probe_and_a_lost_one_does_not(
    built: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.probe()

    def lost(*arguments: object, **options: object) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch, "ones", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        built.probe()
