"""--truncation-align-size: where chunks end, and that a long prompt can always be cut."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.errors import ConfigError
from runtime.runner import StepOutput
from runtime.scheduling.schedule_batch import ScheduleBatch
from tests.runtime.scheduling.scheduler_harness import Driver, config, request


def driver(**options: Any) -> Driver:
    return Driver(config(**{"page_size": 16, "capacity_tokens": 8192, **options}))


def ends(batches: list[ScheduleBatch], request_id: str) -> list[int]:
    """The positions at which the prefill rows of a request end."""
    return [
        batch.prefix_lens[row] + batch.extend_lens[row]
        for batch in batches
        for row in range(batch.num_prefill)
        if batch.requests[row].request_id == request_id
    ]


SIZES = {
    "static": {"chunked_prefill_size": 256},
    "static, quarter left": {"chunked_prefill_size": 64},
    "dynamic": {"chunked_prefill_size": 256, "enable_dynamic_chunking": True},
    "target": {"chunked_prefill_size": 256, "tpot_slo_ms": 20.0},
    "bound": {"chunked_prefill_size": 0, "step_bound_ms": 20.0},
    "strict": {"chunked_prefill_size": 256, "disable_mixed_chunk": True},
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_every_chunk_but_the_last_ends_at_a_multiple(sizes: dict[str, Any]) -> None:
    run = driver(truncation_align_size=64, **sizes)
    inner = run.device.run

    def timed(batch: ScheduleBatch) -> StepOutput:
        output = inner(batch)
        output.device_s = 0.001 + 2e-4 * (batch.prefill_tokens + batch.num_decode)
        return output

    run.device.run = timed  # type: ignore[method-assign]
    run.add(request("row", 10, 1000))
    run.step()
    for index in range(6):
        name = f"long{index}"
        prefix = list(range(16 * (index % 3)))  # cached by the first that has it
        run.add(request(name, [*prefix, *range(5000 + 1000 * index, 5900 + 1000 * index)], 1))
        for _ in range(200):
            if name in run.ended:
                break
            run.step()
        found = ends(run.batches, name)
        assert found[-1] == 900 + len(prefix)
        assert [end % 64 for end in found[:-1]] == [0] * (len(found) - 1)


def test_a_size_that_is_fitted_below_the_alignment_still_cuts() -> None:
    run = driver(
        capacity_tokens=65536,
        context_length=40000,
        chunked_prefill_size=96,
        truncation_align_size=96,
        enable_dynamic_chunking=True,
    )
    run.checked = False
    inner = run.device.run

    def timed(batch: ScheduleBatch) -> StepOutput:
        output = inner(batch)
        x, history = batch.prefill_tokens, batch.prefix_lens[0]
        output.device_s = 2e-5 * (x * x + 2 * history * x) + 0.5 * x + 1 if x else 1.0
        return output

    run.device.run = timed  # type: ignore[method-assign]
    run.add(*[request(f"teaches{k}", 700 + 111 * k, 2) for k in range(4)])
    run.add(request("long", 20_000, 2), request("short", 10, 2))
    run.run(2000)
    assert len(run.tokens["long"]) == len(run.tokens["short"]) == 2


def test_decode_rows_keep_no_prompt_out_whose_alignment_is_the_chunk() -> None:
    run = driver(chunked_prefill_size=128, truncation_align_size=128)
    run.add(request("row", 10, 1000))
    run.step()
    run.add(request("long", 1000, 4), request("short", 10, 4))
    for _ in range(20):
        run.step()
    assert ends(run.batches, "long") == [128, 256, 384, 512, 640, 768, 896, 1000]
    assert len(run.tokens["short"]) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncation_align_size": 24}, r"24: must be a multiple of page_size \(16\)"),
        ({"truncation_align_size": 256}, r"256: must be at most chunked_prefill_size \(128\)"),
        (
            {"truncation_align_size": 64, "max_prefill_tokens": 32},
            r"64: must be at most max_prefill_tokens \(32\)",
        ),
    ],
    ids=["inside a page", "beyond the chunk", "beyond a step"],
)
def test_what_could_never_cut_is_refused_at_start(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(page_size=16, capacity_tokens=8192, chunked_prefill_size=128, **options)
