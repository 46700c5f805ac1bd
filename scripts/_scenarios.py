"""The five situations of bench_cpu.py: each sends its requests and returns one record.

A record is `server.bench.figures.summarize`'s, with what the situation is about beside it:
"floor_ratios" says how many times longer than its floor (_floors.py) the headline figure took.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from typing import Any

from scripts._floors import Floors
from server.bench.answer import Answer
from server.bench.figures import spread_ms, summarize
from server.bench.run import closed_loop
from server.bench.words import random_words

Ask = Callable[..., Awaitable[Answer]]
Figures = dict[str, Any]


async def measured(
    work: Awaitable[list[Answer]], keep: list[Answer] | None = None
) -> dict[str, Any]:
    """Awaits the answers and sums them up; `keep` receives them too."""
    start = time.perf_counter()
    answers = await work
    figures = summarize(answers, time.perf_counter() - start)
    if keep is not None:
        keep.extend(answers)
    return figures


def ratio(value: float | None, floor: float) -> float | None:
    return round(value / floor, 2) if value else None


async def single(ask_: Ask, rng: random.Random, floors: Floors) -> Figures:
    prompts = [random_words(rng, 128) for _ in range(6)]
    figures = await measured(closed_loop([partial(ask_, p, 128) for p in prompts], 1))
    tpot, ttft = figures["tpot_ms"], figures["ttft_ms"]
    return figures | {
        "floor_ratios": {
            "tpot_p50": ratio(tpot and tpot["p50"], floors.decode_step(1) * 1e3),
            "ttft_p50": ratio(ttft and ttft["p50"], floors.prefill(128) * 1e3),
        }
    }


async def batch(ask_: Ask, rng: random.Random, floors: Floors) -> Figures:
    lengths = [rng.randint(64, 256) for _ in range(64)]
    prompts = [random_words(rng, length) for length in lengths]
    figures = await measured(closed_loop([partial(ask_, p, 64) for p in prompts], 16))
    floor = sum(map(floors.prefill, lengths)) + 64 * 64 / 16 * floors.decode_step(16)
    return figures | {"floor_ratios": {"wall": ratio(figures["wall_s"], floor)}}


async def interfere(ask_: Ask, rng: random.Random, floors: Floors) -> Figures:
    """The gaps of running streams from the arrival of long prompts to their last first token."""
    streams, warm_tokens = 8, 32
    prompts = [random_words(rng, 32) for _ in range(streams)]
    long_prompts = [random_words(rng, 1500) for _ in range(4)]
    not_warm, all_warm = set(range(streams)), asyncio.Event()

    def warmed(index: int) -> None:
        not_warm.discard(index)
        if not not_warm:
            all_warm.set()

    def watch(index: int) -> Callable[[Answer], None]:
        return lambda answer: warmed(index) if len(answer.times) >= warm_tokens else None

    async def stream(index: int) -> Answer:
        answer = await ask_(prompts[index], 256, tag="stream", on_token=watch(index))
        warmed(index)  # one that failed must not hold up the start
        return answer

    async def long_after_warm() -> list[Answer]:
        await all_warm.wait()
        return await asyncio.gather(*(ask_(p, 16, tag="long") for p in long_prompts))

    async def both() -> list[Answer]:
        steady = [asyncio.create_task(stream(index)) for index in range(streams)]
        late = await long_after_warm()
        return [*await asyncio.gather(*steady), *late]

    answers: list[Answer] = []
    figures = await measured(both(), answers)
    late = [answer for answer in answers if answer.tag == "long" and answer.ok]
    begin = min((answer.start for answer in late), default=0.0)
    end = max((answer.times[0] for answer in late), default=0.0)
    before, during = _gaps([one for one in answers if one.tag == "stream"], begin, end)
    ttft = spread_ms([answer.ttft for answer in late])
    floor = 4 * floors.prefill(1500) * 1e3
    return figures | {
        "gap_before_ms": spread_ms(before),
        "gap_during_ms": spread_ms(during),
        "long_ttft_ms": ttft,
        "tokens_during": len(during),
        "floor_ratios": {"long_ttft_max": ratio(ttft["max"] if ttft else None, floor)},
    }


def _gaps(streams: list[Answer], begin: float, end: float) -> tuple[list[float], list[float]]:
    """Seconds between the tokens of streams: before `begin`, and from then until `end`."""
    before, during = [], []
    for answer in streams:
        for start, stop in pairwise(answer.times):
            if stop <= begin:
                before.append(stop - start)
            elif start <= end:
                during.append(stop - start)
    return before, during


async def shared_prefix(ask_: Ask, rng: random.Random, floors: Floors) -> Figures:
    prefix = random_words(rng, 1024)
    prompts = [f"{prefix} {random_words(rng, 32)}" for _ in range(32)]
    answers: list[Answer] = []
    work = closed_loop([partial(ask_, p, 16) for p in prompts], 8)
    figures = await measured(work, answers)
    good = [answer for answer in answers if answer.ok]
    floor = floors.prefill(1024) + 32 * floors.prefill(32, 1024) + 64 * floors.decode_step(8)
    return figures | {
        "first_ttft_ms": spread_ms([answer.ttft for answer in good[:8]]),
        "later_ttft_ms": spread_ms([answer.ttft for answer in good[8:]]),
        "floor_ratios": {"wall": ratio(figures["wall_s"], floor)},
    }


async def overload(ask_: Ask, rng: random.Random, floors: Floors) -> Figures:
    prompts = [random_words(rng, 32) for _ in range(200)]
    figures = await measured(closed_loop([partial(ask_, p, 16) for p in prompts], 200))
    floor = 200 * floors.prefill(32) + 16 * floors.decode_step(200)
    return figures | {"floor_ratios": {"wall": ratio(figures["wall_s"], floor)}}


SCENARIOS = {
    "s1": ("single", single),
    "s2": ("batch", batch),
    "s3": ("interfere", interfere),
    "s4": ("prefix", shared_prefix),
    "s5": ("overload", overload),
}
