"""Greedy tokens in float32 equal transformers' `generate`, token for token, on every path.

24 prompts of 1 to 1,500 tokens, 64 tokens each. The reference is a file (scripts/make_reference.py);
a few of its prompts are generated again here. Sums are made in another order than transformers
makes them, so a prompt's comparison may end early where the reference's two best logits are closer
than 1e-3, in at most two of the 24.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from runtime.checkpoints.embedded import ensure_embedded_model
from runtime.config import RunnerConfig, SchedulerConfig
from runtime.execution.build import build_runner
from runtime.request import SamplingParams
from runtime.scheduling.scheduler import Scheduler
from tests.cache import cache_folder
from tests.runtime.execution.drivers import Run, request, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.execution.model_runner import ModelRunner
    from runtime.request import Request

pytestmark = pytest.mark.slow

REFERENCE = json.loads((Path(__file__).parent / "greedy_reference.json").read_text())
CASES: list[dict[str, list[Any]]] = REFERENCE["cases"]
NEAR_TIE = 1e-3
MAX_NEAR_TIES = 2
POOL_TOKENS = 6400


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_embedded_model(cache_folder(), print)


def open_runner(folder: Path, page_size: int) -> ModelRunner:
    config = RunnerConfig(
        model=str(folder), device="cpu", dtype="float32", max_total_tokens=POOL_TOKENS
    )
    runner, _ = build_runner(config, page_size=page_size, max_running_requests=24)
    return runner


@pytest.fixture(scope="module", params=[16], ids=["page16"])
def runner(folder: Path, request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    runner = open_runner(folder, request.param)
    yield runner
    runner.close()


def scheduler(page_size: int = 16, **options: Any) -> Scheduler:
    config = {"capacity_tokens": POOL_TOKENS, "context_length": 8192, "chunked_prefill_size": 64}
    return Scheduler(SchedulerConfig(page_size=page_size, **{**config, **options}))


def requests(tag: str = "") -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True)
    return [request(f"{tag}{i}", case["prompt"], sampling) for i, case in enumerate(CASES)]


def assert_equal(*runs: Run) -> None:
    """The outputs of the runs together are those of the 24 prompts, in order."""
    outputs = [generated.token_ids for result in runs for generated in result.outputs.values()]
    assert len(outputs) == len(CASES)
    near_ties = 0
    for case, got in zip(CASES, outputs, strict=True):
        if got == case["tokens"]:
            continue
        assert len(got) == len(case["tokens"])
        first = next(i for i, (a, b) in enumerate(zip(got, case["tokens"], strict=True)) if a != b)
        assert case["margins"][first] < NEAR_TIE, (
            f"a prompt of {len(case['prompt'])} tokens differs at output token {first}, where the"
            f" reference's margin is {case['margins'][first]}"
        )
        near_ties += 1
    assert near_ties <= MAX_NEAR_TIES


def test_the_reference_is_of_these_weights_and_covers_what_it_must(folder: Path) -> None:
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == REFERENCE["weights_sha256"], "run scripts/make_reference.py"
    lengths = [len(case["prompt"]) for case in CASES]
    assert (len(lengths), min(lengths), max(lengths)) == (24, 1, 1500)
    assert all(len(case["tokens"]) == 64 for case in CASES)


def test_the_reference_is_what_transformers_generates(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for case in CASES[2:9:5]:
        prompt = torch.tensor([case["prompt"]])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out[0, prompt.shape[1] :].tolist() == case["tokens"][:8]


def test_one_at_a_time_without_overlap(runner: ModelRunner) -> None:
    single = scheduler(chunked_prefill_size=0)
    runs = [run(single, runner, [item], overlap=False, check=False) for item in requests()]
    assert_equal(*runs)
    assert all(result.steps == {"prefill": 1, "decode": 63} for result in runs)
    assert not any(result.launched_ahead for result in runs)


def test_all_at_once_with_overlap_chunks_and_mixed_steps(runner: ModelRunner) -> None:
    batched = scheduler()
    result = run(batched, runner, requests())
    assert_equal(result)
    assert result.launched_ahead > 60
    assert result.steps["mixed"] > 20
    assert batched.counters.chunks > len(CASES) + 1500 // 64


def test_all_at_once_without_mixed_steps_and_without_overlap(runner: ModelRunner) -> None:
    unmixed = scheduler(disable_mixed_chunk=True)
    result = run(unmixed, runner, requests(), overlap=False)
    assert_equal(result)
    assert result.launched_ahead == 0
    assert result.steps["mixed"] == 0
    assert result.steps["prefill"] > 1500 // 64


def test_with_a_pool_so_small_that_requests_are_retracted(runner: ModelRunner) -> None:
    small = scheduler(capacity_tokens=2000, schedule_conservativeness=0.05)
    result = run(small, runner, requests())
    assert_equal(result)
    assert result.retractions > 0


def test_page_size_one_then_every_prefix_cached(folder: Path) -> None:
    runner = open_runner(folder, page_size=1)
    cached = scheduler(page_size=1)
    first = run(cached, runner, requests("first"), check=False)
    assert_equal(first)
    assert cached.counters.chunks > len(CASES)
    second = run(cached, runner, requests("second"), check=False)
    runner.close()
    assert_equal(second)
    # All but the last token of each prompt: one must run to give logits.
    assert second.cached_tokens == sum(len(case["prompt"]) - 1 for case in CASES)
