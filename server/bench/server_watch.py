"""The server's queue and KV over time, from /metrics of whatever server has it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from server.bench.target import Target

# What stands behind the colon in the names of vLLM, SGLang, llama.cpp and loomserve.
RUNNING = ("requests_running", "num_requests_running", "num_running_reqs", "requests_processing")
WAITING = ("requests_waiting", "num_requests_waiting", "num_queue_reqs", "requests_deferred")
KV_USAGE = (
    "kv_usage",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "token_usage",
    "kv_cache_usage_ratio",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment. None: it does not tell.

    Args:
        time: of this process's monotonic clock.
        kv_usage: share of the KV pool that running requests hold, 0 to 1.
    """

    time: float
    running: float | None
    waiting: float | None
    kv_usage: float | None


def read_sample(exposition: str, now: float) -> Sample | None:
    """The sample in Prometheus text; None if it has none of these figures. Several series of a name
    (of engines behind one address) are added up, usages averaged."""
    wanted = {*RUNNING, *WAITING, *KV_USAGE}
    # Of the thousands of lines that a server may have, few are worth parsing.
    lines = [x for x in exposition.splitlines() if _short_name(x) in wanted]
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for series in family.samples:
            found.setdefault(series.name, []).append(series.value)

    def values(names: tuple[str, ...]) -> list[float] | None:
        return next((found[n] for short in names for n in found if _short_name(n) == short), None)

    running, waiting, usage = values(RUNNING), values(WAITING), values(KV_USAGE)
    if running is None and waiting is None and usage is None:
        return None
    return Sample(
        now,
        None if running is None else sum(running),
        None if waiting is None else sum(waiting),
        None if usage is None else sum(usage) / len(usage),
    )


def _short_name(line: str) -> str:
    """The name of a line's series without the server's own part before the colon."""
    name = line.partition("{")[0].partition(" ")[0]
    return name.rpartition(":")[2]


async def watch_server(
    session: aiohttp.ClientSession, target: Target, into: list[Sample], every_s: float
) -> None:
    """Samples until it is cancelled; ends by itself where the server has nothing to tell."""
    timeout = aiohttp.ClientTimeout(total=10)
    while True:
        try:
            async with session.get(target.url("/metrics"), timeout=timeout) as response:
                if response.status != 200:
                    return
                sample = read_sample(await response.text(), time.perf_counter())
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return
        if sample is None:
            return
        into.append(sample)
        await asyncio.sleep(every_s)
