"""Two devices that share a load: each computing prompts and decoding, or one for either.

Disaggregated, the prefill device gives a request's first token; its KV then crosses a link, and the
decode device gives the rest. Both run the scheduler that serves. What it would have to learn for
this is left out where it costs nothing in time: on the decode device a prompt whose KV has crossed
is admitted, and takes its pages, as any prompt is, and its row is charged as a decode row
(`docs/prefill-elsewhere.md`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from runtime.scheduling.scheduler import Scheduler
from runtime.simulation.cost_model import StepTimer, StepWork
from runtime.simulation.machines import machine
from runtime.simulation.report import markdown_table
from runtime.simulation.simulator import FILLER_TOKEN_ID, Simulator, completed
from runtime.simulation.trace import config_from
from runtime.simulation.workloads import Workload, in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runtime.simulation.cost_model import CostModel
    from runtime.simulation.machines import Machine
    from runtime.simulation.simulator import RequestStats
    from runtime.simulation.workloads import Arrival, Span

MACHINE = "h200-llama-8b"
GOOD_SHARE = 0.9  # of the requests that must be within the SLO
PRECISION = 0.04  # of a rate that is found, as a share of it
ROOM_TOKENS = 1_000_000  # more than a device holds


@dataclass(frozen=True, slots=True)
class Link:
    """What KV crosses between the devices, one prompt after the other.

    Args: bytes_per_s, latency_s: of a transfer. token_bytes: of a prompt's KV.
    """

    bytes_per_s: float = 50e9  # a 400 Gb/s network adapter
    latency_s: float = 1e-3
    token_bytes: int = 131_072  # 32 layers, 8 heads of 128, K and V, two bytes


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds of a request: to its first token, and of the mean time of each one after it."""

    ttft_s: float
    tpot_s: float

    def met(self, request: RequestStats) -> bool:
        return request.ttft_s <= self.ttft_s and request.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked, and how fast it must be answered.

    Args: guess: a rate, in requests a second, to begin a search with.
    """

    name: str
    requests: int
    guess: float
    input_tokens: Span
    output_tokens: Span
    slo: Slo

    def arrivals(self, rate: float) -> list[Arrival]:
        """The same requests in the same order at every rate."""
        return Workload(
            requests=self.requests,
            rate=rate,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
        ).arrivals()


@dataclass(frozen=True, slots=True)
class Layout:
    """How two devices share a load.

    Args:
        options: of both schedulers.
        timed: chunks are the largest whose step keeps the bound of a token.
        disaggregated: the first one computes all prompts.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    timed: bool = False
    disaggregated: bool = False

    def run(self, load: Load, rate: float, where: Machine, link: Link) -> list[RequestStats]:
        """What the clients see; every request ends."""
        arrivals, options = load.arrivals(rate), dict(self.options)
        if self.timed:
            options["tpot_slo_ms"] = 1e3 * load.slo.tpot_s
        if self.disaggregated:
            return _disaggregated(arrivals, where, options, link)
        dealt = _dealt_out(arrivals, where.cost)
        return [stats for one in dealt for stats in _served(one, where, options).values()]


class TransferredTimer(StepTimer):
    """Step times of a device to which prompts come with their KV."""

    def seconds(self, work: StepWork) -> float:
        """As for decode rows alone: a prompt that is admitted has one token to compute, which
        attends to all of it."""
        read = work.context_tokens + work.prefill_tokens
        return super().seconds(StepWork(decode_rows=work.decode_rows, context_tokens=read))


def _served(
    arrivals: Sequence[Arrival],
    where: Machine,
    options: dict[str, Any],
    timer: StepTimer | None = None,
) -> dict[str, RequestStats]:
    scheduler = Scheduler(config_from({**where.options, **options}))
    simulator = Simulator(scheduler, timer or StepTimer(where.cost), host=where.host)
    return {stats.request_id: stats for stats in completed(simulator.run(arrivals).requests)}


def _dealt_out(arrivals: Sequence[Arrival], cost: CostModel) -> tuple[list[Arrival], list[Arrival]]:
    """Each to the device with the least work ahead of it, as a router would guess."""
    dealt: tuple[list[Arrival], list[Arrival]] = ([], [])
    free_s = [0.0, 0.0]
    for arrival in arrivals:
        device = free_s.index(min(free_s))
        # A decode row's share of a step, at batches where the weights' trip is shared by many.
        tokens = len(arrival.input_ids) + arrival.output_tokens
        free_s[device] = max(free_s[device], arrival.arrival_s) + cost.token_s * tokens
        dealt[device].append(arrival)
    return dealt


def _disaggregated(
    arrivals: Sequence[Arrival], where: Machine, options: dict[str, Any], link: Link
) -> list[RequestStats]:
    prompts = [replace(one, output_tokens=1, max_new_tokens=1) for one in arrivals]
    first = _served(prompts, where, options)
    crossed = _crossed(arrivals, first, link)
    # Newcomers are admitted whole, as many at once as there is room for.
    whole = {**options, "chunked_prefill_size": 0, "max_prefill_tokens": ROOM_TOKENS}
    rest = _served(crossed, where, whole, TransferredTimer(where.cost))
    return [_joined(first[one.request_id], rest.get(one.request_id)) for one in arrivals]


def _crossed(
    arrivals: Sequence[Arrival], first: dict[str, RequestStats], link: Link
) -> list[Arrival]:
    """The requests as the decode device gets them, when their KV is there."""
    by_id = {one.request_id: one for one in arrivals if one.output_tokens > 1}
    free_s = 0.0
    crossed = []
    for stats in sorted(first.values(), key=lambda stats: stats.first_s):
        arrival = by_id.get(stats.request_id)
        if arrival is None:
            continue
        tokens = len(arrival.input_ids)
        free_s = max(free_s, stats.first_s) + tokens * link.token_bytes / link.bytes_per_s
        left = arrival.output_tokens - 1
        crossed.append(
            replace(
                arrival,
                arrival_s=free_s + link.latency_s,
                input_ids=arrival.input_ids + array("i", [FILLER_TOKEN_ID]),
                output_tokens=left,
                max_new_tokens=left,
            )
        )
    return in_order(crossed)


def _joined(first: RequestStats, rest: RequestStats | None) -> RequestStats:
    """What the client of a request sees of the two devices."""
    if rest is None:
        return first
    return replace(
        first,
        last_s=rest.last_s,
        tokens=first.tokens + rest.tokens,
        longest_gap_s=max(rest.longest_gap_s, rest.first_s - first.first_s),
        finish=rest.finish,
    )


def goodput(load: Load, layout: Layout, where: Machine, link: Link) -> float:
    """The highest rate, in requests a second for both devices, at which so many are within the SLO
    as must be."""

    def holds(rate: float) -> bool:
        seen = layout.run(load, rate, where, link)
        return sum(map(load.slo.met, seen)) >= GOOD_SHARE * load.requests

    low, high = 0.0, load.guess
    while holds(high):
        low, high = high, 1.5 * high
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


LAYOUTS = (
    Layout("mixed, whole prompts", {"chunked_prefill_size": 0, "max_prefill_tokens": 65_536}),
    Layout("mixed, chunks of 2048", {"chunked_prefill_size": 2048}),
    Layout("mixed, chunks by time", timed=True),
    Layout("disaggregated", disaggregated=True),
)
_SHORT, _LONG, _ANSWER = (200, 2000), (4000, 12_000), (100, 400)
LOADS = (
    Load("chats", 1000, 50.0, _SHORT, _ANSWER, Slo(1.0, 0.040)),
    Load("chats", 1000, 40.0, _SHORT, _ANSWER, Slo(1.0, 0.012)),
    Load("long prompts", 300, 6.0, _LONG, _ANSWER, Slo(3.0, 0.040)),
    Load("long prompts", 300, 4.0, _LONG, _ANSWER, Slo(3.0, 0.012)),
    Load("long answers", 600, 10.0, _SHORT, (1000, 2000), Slo(1.0, 0.012)),
)


def goodput_table(progress: Callable[[str], None] = lambda _: None) -> str:
    """Goodput of every layout under every load, as a markdown table."""
    where, link = machine(MACHINE), Link()
    rows = []
    for load in LOADS:
        cells = []
        for layout in LAYOUTS:
            progress(f"{load.name}: {layout.name}")
            cells.append(f"{goodput(load, layout, where, link):.1f}")
        bounds = f"{load.slo.ttft_s:g} s, {1e3 * load.slo.tpot_s:g} ms"
        rows.append([load.name, bounds, *cells])
    return markdown_table(["load", "TTFT, TPOT", *(one.name for one in LAYOUTS)], rows, left=(0, 1))
