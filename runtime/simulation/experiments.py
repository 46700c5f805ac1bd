"""The comparisons that the README shows: one mechanism of the scheduler off and on at a time.

All runs are Llama-3.1-8B on one H200 as `runtime.simulation.machines` models it, from fixed seeds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runtime.simulation.machines import machine
from runtime.simulation.report import Summary, markdown_table, share_within, summarize
from runtime.simulation.scenario import simulate
from runtime.simulation.workloads import Workload, in_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.simulation.simulator import SimulationResult
    from runtime.simulation.workloads import Arrival

MACHINE = "h200-llama-8b"
TARGET_MS = 25.0


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
    figures: Callable[[SimulationResult, Summary], tuple[str, ...]]


def readme_tables(progress: Callable[[str], None] = lambda _: None) -> str:
    """Every comparison as a titled markdown table, with a sentence on each line of it."""
    parts = []
    for experiment in EXPERIMENTS:
        arrivals = experiment.arrivals()
        rows = []
        for variant in experiment.variants:
            progress(f"{experiment.title}: {variant.name}")
            result = simulate(
                machine(MACHINE),
                arrivals,
                variant.options,
                static_batching=variant.static_batching,
            )
            figures = experiment.figures(result, summarize(result))
            rows.append([variant.name, *figures, variant.why])
        table = markdown_table(["", *experiment.columns, "why"], rows)
        parts.append(f"**{experiment.title}**\n\n{table}")
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


def shared_prefixes() -> list[Arrival]:
    """100 common prefixes of 4,000 tokens, more than the pool of this run can keep, a tenth of
    the requests without one, arriving faster than they can be served."""
    return Workload(
        requests=2000,
        rate=60.0,
        input_tokens=(50, 400),
        output_tokens=(20, 100),
        prefix_groups=100,
        prefix_tokens=4000,
        cold_share=0.1,
    ).arrivals()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _throughput(result: SimulationResult, summary: Summary) -> tuple[str, ...]:
    rows = [r for r, kind in zip(result.steps.rows, result.steps.kinds, strict=True) if kind]
    return (
        f"{summary.output_tokens_per_s:,.0f}",
        f"{sum(rows) / len(rows):.0f}",
        _ms(summary.ttft.p50),
        _ms(summary.ttft.p99),
    )


def _gaps(result: SimulationResult, summary: Summary) -> tuple[str, ...]:
    return (
        f"{summary.output_tokens_per_s:,.0f}",
        _ms(summary.itl.p50),
        _ms(summary.itl.p99),
        _ms(summary.itl.max),
        _ms(summary.ttft.p99),
    )


def _target(result: SimulationResult, summary: Summary) -> tuple[str, ...]:
    return (
        f"{share_within(result, TARGET_MS / 1e3):.1%}",
        f"{summary.total_tokens_per_s:,.0f}",
        _ms(summary.itl.max),
        _ms(summary.ttft.p50),
        _ms(summary.ttft.p99),
    )


def _first_tokens(result: SimulationResult, summary: Summary) -> tuple[str, ...]:
    cold = [r.ttft_s for r in result.requests if r.input_tokens < 1000]
    return (
        _ms(summary.ttft.mean),
        _ms(summary.ttft.p99),
        _ms(max(cold)),
        f"{summary.cached_share:.0%}",
        f"{summary.output_tokens_per_s:,.0f}",
    )


_GAP_COLUMNS = ("out tok/s", "ITL p50, ms", "ITL p99", "largest gap", "TTFT p99")
_NO_AGE_BOUND = 1e12

EXPERIMENTS = (
    Experiment(
        "Static against continuous batching (1,000 requests at once, at most 64 running)",
        offline,
        (
            Variant("static", "x", {"max_running_requests": 64}, static_batching=True),
            Variant("continuous", "x", {"max_running_requests": 64}),
        ),
        ("out tok/s", "rows a step", "TTFT p50, ms", "TTFT p99"),
        _throughput,
    ),
    Experiment(
        "Whole against chunked prefill (prompts of 16k-32k tokens beside chats)",
        long_prompts_beside_chats,
        (
            Variant("whole", "x", {"chunked_prefill_size": 0, "max_prefill_tokens": 65_536}),
            Variant("chunks of 8192", "x"),
            Variant("chunks of 1024", "x", {"chunked_prefill_size": 1024}),
        ),
        _GAP_COLUMNS,
        _gaps,
    ),
    Experiment(
        "Strict against mixed (the same load, chunks of 2048)",
        long_prompts_beside_chats,
        (
            Variant("strict", "x", {"chunked_prefill_size": 2048, "disable_mixed_chunk": True}),
            Variant("mixed", "x", {"chunked_prefill_size": 2048}),
        ),
        _GAP_COLUMNS,
        _gaps,
    ),
    Experiment(
        f"Fixed against SLO-sized chunks (the same load, target {TARGET_MS:.0f} ms a step)",
        long_prompts_beside_chats,
        (
            Variant("8192", "x"),
            Variant("1024", "x", {"chunked_prefill_size": 1024}),
            Variant("SLO", "x", {"tpot_slo_ms": TARGET_MS}),
        ),
        ("steps within", "total tok/s", "largest gap, ms", "TTFT p50", "TTFT p99"),
        _target,
    ),
    Experiment(
        "Policies (prompts with 100 shared prefixes, a tenth without one)",
        shared_prefixes,
        tuple(
            Variant(name, "x", {"capacity_tokens": 204_800, **options})
            for name, options in (
                ("fcfs", {}),
                ("lpm", {"schedule_policy": "lpm"}),
                (
                    "lpm, no age bound",
                    {"schedule_policy": "lpm", "max_queue_skip_ms": _NO_AGE_BOUND},
                ),
                ("hrrn", {"schedule_policy": "hrrn"}),
            )
        ),
        ("TTFT mean, ms", "TTFT p99", "largest, cold", "cached", "out tok/s"),
        _first_tokens,
    ),
)
