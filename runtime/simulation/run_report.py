"""One simulated run as plain JSON: what a page draws."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from runtime.percentiles import percentile
from runtime.scheduling.accounting import BlockingTerm
from runtime.simulation.report import summarize

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runtime.simulation.observation import Observation
    from runtime.simulation.simulator import RequestStats, SimulationResult

# Where the distribution of gaps is told: evenly, and closer where its tail is.
GAP_SHARES = (*(i / 100 for i in range(1, 100)), 0.995, 0.999, 0.9995, 0.9999, 1.0)
TERMS = tuple(term.value for term in BlockingTerm)


def run_report(
    name: str, options: dict[str, Any], result: SimulationResult, seen: Observation
) -> dict[str, Any]:
    """Figures, steps and requests of a run; times in seconds, to the microsecond.

    Args: options: those that the run differs by, told as they are.
    Returns: `summary` as `report.Summary`; `steps` as parallel columns, `blocked` as indices into
        `reasons`; `gaps`, the percentiles of all gaps at `shares`; `requests` in order
        of arrival; `refused` ones with the reason. What there is no figure for is None."""
    return {
        "name": name,
        "options": options,
        "summary": _plain(asdict(summarize(result))),
        "capacity_tokens": result.statistics.capacity_tokens,
        "reasons": TERMS,
        "steps": _steps(result, seen),
        "gaps": _gaps(result.gaps_s),
        "requests": [_request(stats, seen) for stats in result.requests],
        "refused": result.refused,
    }


def _steps(result: SimulationResult, seen: Observation) -> dict[str, list[Any]]:
    steps = result.steps
    decode_rows = [
        rows - prefill for rows, prefill in zip(steps.rows, steps.prefill_rows, strict=True)
    ]
    return {
        "kind": steps.kinds,
        "start_s": _micro(steps.starts_s),
        "seconds": _micro(steps.seconds),
        "prefill_tokens": list(steps.prefill_tokens),
        "prefill_rows": list(steps.prefill_rows),
        "decode_rows": decode_rows,
        "waiting": list(seen.waiting),
        "running": list(seen.running),
        "free_tokens": list(seen.free_tokens),
        "cached_tokens": list(seen.cached_tokens),
        "private_tokens": list(seen.private_tokens),
        "blocked": [TERMS.index(term) for term in seen.blocked],
    }


def _gaps(gaps_s: Iterable[float]) -> dict[str, Any]:
    ordered = sorted(gaps_s)
    seconds = [percentile(ordered, share) for share in GAP_SHARES] if ordered else []
    return {"count": len(ordered), "shares": GAP_SHARES, "seconds": _micro(seconds)}


def _request(stats: RequestStats, seen: Observation) -> dict[str, Any]:
    answered = stats.tokens > 0
    times = {"arrival_s": stats.arrival_s, "longest_gap_s": stats.longest_gap_s}
    return {
        "id": stats.request_id,
        **{name: round(seconds, 6) for name, seconds in times.items()},
        "first_s": round(stats.first_s, 6) if answered else None,
        "last_s": round(stats.last_s, 6) if answered else None,
        "ttft_s": round(stats.ttft_s, 6) if answered else None,
        "tpot_s": round(stats.tpot_s, 6) if stats.tokens > 1 else None,
        "gap_end_s": round(stats.gap_end_s, 6) if stats.longest_gap_s else None,
        "input_tokens": stats.input_tokens,
        "cached_tokens": stats.cached_tokens,
        "tokens": stats.tokens,
        "retractions": stats.retractions,
        "finish": stats.finish.reason.value if stats.finish else None,
        "prefills": [[p.step, p.start, p.tokens] for p in seen.prefills.get(stats.request_id, ())],
        "waited_s": _plain(seen.waited_s.get(stats.request_id, {})),
    }


def _micro(seconds: Iterable[float]) -> list[float]:
    return [round(value, 6) for value in seconds]


def _plain(value: Any) -> Any:
    """The value with None in place of NaN and infinity, which JSON cannot hold."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
