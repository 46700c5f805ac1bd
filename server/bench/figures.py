"""Many answers in a few numbers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from runtime.percentiles import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.bench.answer import Answer
    from server.bench.slo import Slo

PERCENTILES = (50, 90, 99)


def spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and max in milliseconds; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    spread = {"mean": sum(ordered) / len(ordered), "max": ordered[-1]}
    spread |= {f"p{p}": percentile(ordered, p / 100) for p in PERCENTILES}
    return {name: round(value * 1e3, 3) for name, value in spread.items()}


def summarize(answers: Sequence[Answer], wall_s: float, slo: Slo | None = None) -> dict[str, Any]:
    """Counts, rates and spreads of many answers, as JSON.

    Latencies are those of complete answers; rates count the tokens of cut ones too, since the
    server made them.
    """
    good = [answer for answer in answers if answer.ok]
    served = [answer for answer in answers if answer.error is None]
    prompt_tokens = sum(answer.prompt_tokens for answer in served)
    output_tokens = sum(answer.completion_tokens for answer in served)
    cached = [answer.cached_tokens for answer in good if answer.cached_tokens is not None]
    late = [a.start - a.due for a in answers if a.due is not None and a.start]
    return {
        "requests": len(answers),
        "completed": len(good),
        "cut": sum(answer.cut for answer in answers),
        "errors": dict(Counter(a.error_kind for a in answers if a.error)),
        "error_examples": _examples(answers),
        "wall_s": round(wall_s, 6),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": output_tokens,
        "short_answers": sum(a.completion_tokens < a.wanted_tokens for a in good),
        "usage_missing": sum(answer.usage_missing for answer in good),
        "requests_per_s": round(len(good) / wall_s, 3),
        "output_tokens_per_s": round(output_tokens / wall_s, 2),
        "total_tokens_per_s": round((prompt_tokens + output_tokens) / wall_s, 2),
        "ttft_ms": spread_ms([answer.ttft for answer in good]),
        "itl_ms": spread_ms([gap for answer in good for gap in answer.gaps]),
        "tpot_ms": spread_ms([answer.tpot for answer in good if answer.tpot is not None]),
        "e2e_ms": spread_ms([answer.e2e for answer in good]),
        "late_ms": spread_ms(late),
        **({} if slo is None else goodput(answers, wall_s, slo)),
    }


def goodput(answers: Sequence[Answer], wall_s: float, slo: Slo) -> dict[str, Any]:
    """How many answers a second met the SLO, and what share did of all that could be judged."""
    met, judged = slo.judge(answers)
    return {
        "slo": str(slo),
        "goodput_per_s": round(met / wall_s, 3),
        "slo_attainment": round(met / judged, 4) if judged else None,
    }


def _examples(answers: Sequence[Answer]) -> dict[str, str]:
    """For each kind of error, the text of the first one."""
    examples: dict[str, str] = {}
    for answer in answers:
        if answer.error is not None:
            examples.setdefault(answer.error_kind, answer.error)
    return examples
