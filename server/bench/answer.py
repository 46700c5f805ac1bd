"""One streamed answer as its client saw it.

All times are of this process's monotonic clock, so HTTP and SSE parsing are included:

- TTFT: request written -> first chunk that stands for a token.
- ITL: gap between two such chunks of one answer. A server that puts several tokens into one
  chunk shows fewer, longer gaps.
- TPOT: (last token chunk - first token chunk) / (completion tokens - 1).
- E2E: request written -> end of the stream.

Token counts come from the server's `usage`; without one, chunks are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class Answer:
    """One request and what came back.

    Args:
        tag: what the request is called in its workload.
        due: when it should have been written, where arrivals are timed.
        times: arrival of each chunk that stands for a token.
        pieces: of the text.
        usage_missing: the server gave no usage, so completion_tokens counts chunks.
        error: why it failed, as "kind: detail"; None for one that did not.
        cut: the run ended before it did; neither a failure nor complete.
    """

    wanted_tokens: int
    tag: str = ""
    due: float | None = None
    start: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    completion_tokens: int = 0
    usage_missing: bool = False
    finish_reason: str | None = None
    error: str | None = None
    cut: bool = False

    @property
    def ok(self) -> bool:
        """It is complete."""
        return self.error is None and not self.cut

    @property
    def error_kind(self) -> str:
        return (self.error or "").partition(": ")[0]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def tpot(self) -> float | None:
        if self.completion_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.completion_tokens - 1)

    @property
    def e2e(self) -> float:
        return self.end - self.start

    def record(self, origin: float) -> dict[str, Any]:
        """As a line of JSON; all seconds from the run's beginning, `origin`."""
        return {
            "tag": self.tag,
            "due_s": None if self.due is None else round(self.due - origin, 6),
            "start_s": round(self.start - origin, 6),
            "end_s": round(self.end - origin, 6),
            "ttft_s": round(self.ttft, 6) if self.times else None,
            "tpot_s": round(self.tpot, 6) if self.ok and self.tpot is not None else None,
            "e2e_s": round(self.e2e, 6),
            "token_times_s": [round(time - origin, 6) for time in self.times],
            "wanted_tokens": self.wanted_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "cut": self.cut,
        }
