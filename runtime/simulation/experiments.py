"""The comparisons of docs/performance.md: one mechanism of the scheduler off and on at a time.

All runs are Llama-3.1-8B on one H200 as `runtime.simulation.machines` models it, from fixed seeds.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runtime.percentiles import percentile
from runtime.simulation.machines import machine
from runtime.simulation.report import (
    Summary,
    markdown_table,
    share_within,
    summarize,
)
from runtime.simulation.scenario import simulate
from runtime.simulation.workloads import Arrival, Workload, in_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.simulation.simulator import SimulationResult

MACHINE = "h200-llama-8b"
TARGET_MS = 25.0
TIGHT_MS = 15.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One line of a comparison."""

    name: str
    why: str
    options: dict[str, Any] = field(default_factory=dict)
    static_batching: bool = False


@dataclass(frozen=True, slots=True)
class Experiment:
    """Variants served with the same arrivals.

    Args:
        columns: heads of the figures. figures: their values, as text, for one run.
    """

    title: str
    arrivals: Callable[[], list[Arrival]]
    variants: tuple[Variant, ...]
    columns: tuple[str, ...]
    figures: Callable[[SimulationResult, Summary, Variant], tuple[str, ...]]


def readme_tables(progress: Callable[[str], None] = lambda _: None) -> str:
    """Every comparison as a markdown table under its title, with a sentence on each line of it."""
    parts = []
    for experiment in EXPERIMENTS:
        arrivals = experiment.arrivals()
        head = [f"**{experiment.title}**", *experiment.columns, "why"]
        rows = []
        for variant in experiment.variants:
            progress(f"{experiment.title}: {variant.name}")
            result = simulate(
                machine(MACHINE),
                arrivals,
                variant.options,
                static_batching=variant.static_batching,
            )
            figures = experiment.figures(result, summarize(result), variant)
            rows.append([variant.name, *figures, variant.why])
        parts.append(markdown_table(head, rows, left=(0, len(head) - 1)))
    return "\n\n".join(parts)


def offline() -> list[Arrival]:
    """1,000 requests at once; what they ask for is twice what they take."""
    return Workload(requests=1000, max_new_factor=2.0).arrivals()


def long_prompts_beside_chats() -> list[Arrival]:
    """Chats that stream, and every other second on average a prompt of 16,000 to 32,000 tokens."""
    chats = Workload(requests=600, rate=10.0, input_tokens=(100, 1024), output_tokens=(200, 600))
    long = Workload(
        requests=30, rate=0.5, input_tokens=(16_000, 32_000), output_tokens=(50, 200), seed=1
    )
    for index, arrival in enumerate(prompts := long.arrivals()):
        arrival.request_id = f"long{index}"
    return in_order([*chats.arrivals(), *prompts])


def storm_of_long_prompts() -> list[Arrival]:
    """20 prompts of 16,000 to 32,000 tokens at once, and short ones while they are computed."""
    short = Workload(requests=300, rate=20.0, input_tokens=(50, 400), output_tokens=(20, 60))
    long = Workload(requests=20, input_tokens=(16_000, 32_000), output_tokens=(50, 200), seed=1)
    for index, arrival in enumerate(prompts := long.arrivals()):
        arrival.request_id = f"long{index}"
    return in_order([*prompts, *short.arrivals()])


def steady_backlog() -> list[Arrival]:
    """600 requests at once: there is always a prompt to compute beside the running requests."""
    return Workload(requests=600, input_tokens=(1000, 6000), output_tokens=(100, 400)).arrivals()


def shared_prefixes() -> list[Arrival]:
    """60 common prefixes of 4,000 tokens, somewhat more than the pool of this run can keep, a
    twentieth of the requests without one, arriving a little faster than fcfs can serve them."""
    return Workload(
        requests=2000,
        rate=7.5,
        burst=4,
        input_tokens=(50, 400),
        output_tokens=(20, 100),
        prefix_groups=60,
        prefix_tokens=4000,
        cold_share=0.05,
    ).arrivals()


def conversations() -> list[Arrival]:
    """60 conversations of 8 turns, each with a beginning of its own of 4,000 tokens (a system
    prompt, tools, files), and a minute between turns: several times what the pool keeps."""
    draw = random.Random(5)
    made: list[Arrival] = []
    for index in range(60):
        history = _tokens(draw, 4000)
        time_s = draw.uniform(0.0, 120.0)
        for turn in range(8):
            history = history + _tokens(draw, draw.randint(200, 1500))
            answer = _tokens(draw, draw.randint(100, 300))
            name = f"c{index}.{turn}"
            made.append(Arrival(time_s, history, len(answer), len(answer), name, output_ids=answer))
            history = history + answer
            time_s += 20.0 + round(draw.expovariate(1 / 40.0), 9)
    return in_order(made)


def _tokens(draw: random.Random, count: int) -> array[int]:
    return array("i", array("H", draw.randbytes(2 * count)))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _throughput(result: SimulationResult, summary: Summary, _: Variant) -> tuple[str, ...]:
    rows = result.steps.rows
    return (
        f"{summary.output_tokens_per_s:,.0f}",
        f"{sum(rows) / len(rows):.0f}",
        _ms(summary.ttft.p50),
        _ms(summary.ttft.p99),
    )


def _gaps(result: SimulationResult, summary: Summary, _: Variant) -> tuple[str, ...]:
    return (
        f"{summary.output_tokens_per_s:,.0f}",
        _ms(summary.itl.p50),
        _ms(summary.itl.p99),
        _ms(summary.itl.max),
        _ms(summary.ttft.p99),
    )


def _target(result: SimulationResult, summary: Summary, variant: Variant) -> tuple[str, ...]:
    target_s = variant.options.get("tpot_slo_ms", TARGET_MS) / 1e3
    return (
        f"{share_within(result, target_s):.1%}",
        f"{summary.total_tokens_per_s:,.0f}",
        _ms(summary.itl.p50),
        _ms(summary.itl.max),
        _ms(summary.ttft.p50),
    )


def _first_tokens(result: SimulationResult, summary: Summary, _: Variant) -> tuple[str, ...]:
    cold = [r.ttft_s for r in result.requests if r.input_tokens < 1000]
    return (
        _ms(summary.ttft.mean),
        _ms(summary.ttft.p99),
        _ms(max(cold)),
        f"{summary.cached_share:.0%}",
        f"{summary.output_tokens_per_s:,.0f}",
    )


def _turns(result: SimulationResult, summary: Summary, _: Variant) -> tuple[str, ...]:
    later = sorted(r.ttft_s for r in result.requests if not r.request_id.endswith(".0"))
    computed = sum(result.steps.prefill_tokens)
    return (
        _ms(percentile(later, 0.5)),
        _ms(percentile(later, 0.99)),
        f"{summary.cached_share:.0%}",
        f"{computed:,}",
        f"{summary.device_share:.0%}",
    )


def _short_and_long(result: SimulationResult, summary: Summary, _: Variant) -> tuple[str, ...]:
    short = sorted(r.ttft_s for r in result.requests if r.input_tokens < 1000)
    long = sorted(r.ttft_s for r in result.requests if r.input_tokens >= 1000)
    return (
        _ms(short[len(short) // 2]),
        _ms(short[-1]),
        _ms(long[len(long) // 2]),
        _ms(long[-1]),
        f"{summary.output_tokens_per_s:,.0f}",
    )


_GAP_COLUMNS = ("out tok/s", "ITL p50, ms", "ITL p99", "largest gap", "TTFT p99")
_NO_AGE_BOUND = 1e12
_SMALL_POOL = {"capacity_tokens": 204_800, "max_running_requests": 32}

EXPERIMENTS = (
    Experiment(
        "Static against continuous batching (1,000 requests at once, at most 64 running)",
        offline,
        (
            Variant(
                "static",
                "The batch waits for its longest answer, so on average almost half of it is idle.",
                {"max_running_requests": 64},
                static_batching=True,
            ),
            Variant(
                "continuous",
                "A place that falls free is taken in the next step.",
                {"max_running_requests": 64},
            ),
        ),
        ("out tok/s", "rows a step", "TTFT p50, ms", "TTFT p99"),
        _throughput,
    ),
    Experiment(
        "Whole against chunked prefill (prompts of 16k to 32k tokens beside chats)",
        long_prompts_beside_chats,
        (
            Variant(
                "whole",
                "Every stream stands still while a long prompt is computed in one step.",
                {"chunked_prefill_size": 0, "max_prefill_tokens": 65_536},
            ),
            Variant("chunks of 8192", "A stream waits for a chunk at most, not for a prompt."),
            Variant(
                "chunks of 1024",
                "Smaller chunks, smaller gaps, and the long prompts pay a little for more steps.",
                {"chunked_prefill_size": 1024},
            ),
        ),
        _GAP_COLUMNS,
        _gaps,
    ),
    Experiment(
        "Strict against mixed (the same load, chunks of 2048)",
        long_prompts_beside_chats,
        (
            Variant(
                "strict",
                "Prefill first: streams get nothing until no prompt is left to compute.",
                {"chunked_prefill_size": 2048, "disable_mixed_chunk": True},
            ),
            Variant(
                "mixed",
                "Every step carries every stream, so the largest gap is the longest step.",
                {"chunked_prefill_size": 2048},
            ),
        ),
        _GAP_COLUMNS,
        _gaps,
    ),
    Experiment(
        "Short prompts beside a storm of long ones (20 of 16k to 32k tokens, chunks of 2048)",
        storm_of_long_prompts,
        (
            Variant(
                "in turn",
                "A short prompt waits until all long ones before it are computed.",
                {"chunked_prefill_size": 2048, "prefill_share": 0.0},
            ),
            Variant(
                "a share of 0.25",
                "It goes ahead on saved-up tokens; long ones end a third later at most.",
                {"chunked_prefill_size": 2048},
            ),
        ),
        ("short: TTFT p50, ms", "largest", "long: TTFT p50, ms", "last", "out tok/s"),
        _short_and_long,
    ),
    Experiment(
        f"Fixed against SLO-sized chunks (a backlog, 48 running, target {TARGET_MS:.0f} ms a step)",
        steady_backlog,
        (
            Variant(
                "8192",
                "Hardly a mixed step holds the target.",
                {"max_running_requests": 48},
            ),
            Variant(
                "1024",
                "Near the target, but on the wrong side of it: one size cannot fit every step.",
                {"max_running_requests": 48, "chunked_prefill_size": 1024},
            ),
            Variant(
                "256",
                "Holds it, with room that nobody uses: throughput is lost.",
                {"max_running_requests": 48, "chunked_prefill_size": 256},
            ),
            Variant(
                "SLO",
                "Fills each step up to the target, less a margin for the noise of the last ones.",
                {"max_running_requests": 48, "tpot_slo_ms": TARGET_MS},
            ),
            Variant(
                f"SLO of {TIGHT_MS:.0f} ms",
                "A target close to the decode-only step is held too; this is what it costs.",
                {"max_running_requests": 48, "tpot_slo_ms": TIGHT_MS},
            ),
        ),
        ("steps within", "total tok/s", "ITL p50, ms", "largest gap", "TTFT p50"),
        _target,
    ),
    Experiment(
        "Policies (60 shared prefixes, a twentieth of the prompts without one)",
        shared_prefixes,
        (
            Variant(
                "fcfs",
                "In order of arrival the prefixes evict one another before they are used again.",
                _SMALL_POOL,
            ),
            Variant(
                "lpm",
                "What is cached goes first, while it is cached; nobody is passed over for long.",
                {**_SMALL_POOL, "schedule_policy": "lpm"},
            ),
            Variant(
                "lpm, no age bound",
                "The best mean, paid by prompts without a prefix, which wait for an empty queue.",
                {**_SMALL_POOL, "schedule_policy": "lpm", "max_queue_skip_ms": _NO_AGE_BOUND},
            ),
            Variant(
                "hrrn",
                "Waiting weighs more for little work, cached or short: cold prompts do not starve.",
                {**_SMALL_POOL, "schedule_policy": "hrrn"},
            ),
        ),
        ("TTFT mean, ms", "TTFT p99", "largest, cold", "cached", "out tok/s"),
        _first_tokens,
    ),
    Experiment(
        "A tier below the pool (60 conversations of 8 turns, a minute between turns)",
        conversations,
        (
            Variant(
                "none",
                "A conversation that goes on after a minute finds its prefix evicted.",
                _SMALL_POOL,
            ),
            Variant(
                "host memory, 32 GiB",
                "It holds a third of them: what comes back is often what had to go last.",
                {**_SMALL_POOL, "kv_tier_pages": 16_384, "kv_load_tokens": 64},
            ),
            Variant(
                "host memory, 128 GiB",
                "A turn computes what is new in it, and what is old costs a copy.",
                {**_SMALL_POOL, "kv_tier_pages": 65_536, "kv_load_tokens": 64},
            ),
        ),
        ("later turns: TTFT p50, ms", "p99", "cached", "prompt tokens computed", "device busy"),
        _turns,
    ),
)
