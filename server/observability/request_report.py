"""What is known of a request whose answer is over: what the access log, traces and spans tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.generation.timeline import timings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from server.generation.generator import Generation, Usage
    from server.generation.timeline import Laps, Timeline, Timings


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One client's request for text. Moments are seconds on the engine's clock.

    Args:
        answer_id: such as chatcmpl-0f3a...; request_id: the client's own, or the server's.
        status: of the answer; 499 where the client left before there was one, 0 while it goes on.
        ended_s: when the last of its answer was handed to the connection.
        headers: of the request.
        choices: what is noted of each choice's time.
        writes: how long making the answer's bytes and handing them over took, where it is noted.
    """

    answer_id: str
    request_id: str
    path: str
    status: int
    received_s: float
    ended_s: float
    headers: Mapping[str, str]
    choices: Sequence[Timeline]
    usage: Usage
    writes: Laps

    @property
    def timings(self) -> Timings:
        return timings(self.choices, self.usage.cached_tokens, self.ended_s)


def report_of(
    generation: Generation,
    *,
    request_id: str = "",
    path: str = "",
    status: int = 0,
    ended_s: float,
    headers: Mapping[str, str] | None = None,
) -> RequestReport:
    """The report of a generation as it stands."""
    return RequestReport(
        answer_id=generation.request_id,
        request_id=request_id,
        path=path,
        status=status,
        received_s=generation.timelines[0].received_s,
        ended_s=ended_s,
        headers=headers or {},
        choices=generation.timelines,
        usage=generation.usage(),
        writes=generation.writes,
    )
