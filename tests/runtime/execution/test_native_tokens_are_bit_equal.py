"""With the native kernels a request's numbers do not depend on how it is scheduled.

The kernels sum in one order whatever the number of rows, so tokens and log-probabilities are equal
to the bit alone and among neighbours, in chunks of any size, behind a cached prefix and after a
retraction: in bfloat16 as in float32, and for drawn tokens as for greedy ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from runtime.checkpoints.embedded import ensure_embedded_model
from runtime.config import RunnerConfig, SchedulerConfig
from runtime.execution.build import build_runner
from runtime.request import SamplingParams
from runtime.scheduling.scheduler import Scheduler
from tests.cache import cache_folder
from tests.runtime.execution.drivers import Generated, Run, request, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.execution.model_runner import ModelRunner
    from runtime.request import Request

pytestmark = pytest.mark.slow

POOL = 4096
LENGTHS = (1, 7, 16, 33, 100, 257)
NEW_TOKENS = 20


@pytest.fixture(scope="module", params=["auto", "int8"])
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    """With keys and values as numbers, and as codes."""
    folder = ensure_embedded_model(cache_folder(), print)
    config = RunnerConfig(
        model=str(folder),
        device="cpu",
        dtype="bfloat16",
        kv_cache_dtype=request.param,
        max_total_tokens=POOL,
    )
    runner, _ = build_runner(config, page_size=16, max_running_requests=8)
    if runner.info.details["decoder"] != "compiled":
        pytest.skip("there are no native kernels on this machine")
    yield runner
    runner.close()


def scheduler(**options: Any) -> Scheduler:
    config = {"capacity_tokens": POOL, "context_length": 2048, "chunked_prefill_size": 128}
    return Scheduler(SchedulerConfig(max_running_requests=8, **{**config, **options}))


def requests(tag: str = "") -> list[Request]:
    made = []
    for i, length in enumerate(LENGTHS):
        prompt = [(37 * i + 11 * j * j + j) % 49000 + 20 for j in range(length)]
        sampling = SamplingParams(
            temperature=(i % 2) * 0.9,
            seed=i,
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
            logprobs=2,
        )
        made.append(request(f"{tag}{i}", prompt, sampling))
    return made


def numbers(outputs: list[Generated]) -> list[Any]:
    return [(generated.token_ids, generated.logprobs) for generated in outputs]


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> list[Any]:
    single = scheduler(chunked_prefill_size=0, disable_radix_cache=True)
    runs = [run(single, runner, [item], overlap=False) for item in requests()]
    return numbers([generated for result in runs for generated in result.outputs.values()])


def check(result: Run, alone: list[Any]) -> None:
    assert numbers(list(result.outputs.values())) == alone


@pytest.mark.parametrize("chunk", [32, 80, 0])
def test_among_neighbours_in_chunks_and_behind_a_cached_prefix(
    runner: ModelRunner, alone: list[Any], chunk: int
) -> None:
    warm = scheduler(chunked_prefill_size=chunk)
    result = run(warm, runner, requests("first"))
    check(result, alone)
    assert (result.steps["mixed"] > 3) == (chunk > 0)
    cached = run(warm, runner, requests("second"))
    check(cached, alone)
    assert cached.cached_tokens > 300


def test_after_a_retraction(runner: ModelRunner, alone: list[Any]) -> None:
    """Admits as if every request would end at once, into a pool that does not hold them all."""
    tight = scheduler(capacity_tokens=560, schedule_conservativeness=0.001)
    result = run(tight, runner, requests())
    check(result, alone)
    assert result.retractions > 0
