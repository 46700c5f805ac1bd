"""Answers with known times."""

from __future__ import annotations

from typing import Any

from server.bench.answer import Answer
from server.bench.arrivals import Arrivals
from server.bench.run import Load, Run
from server.bench.target import Target
from server.bench.words import Lengths
from server.bench.workloads import Workload


def answered(start: float, *times: float, end: float | None = None, **fields: Any) -> Answer:
    """A complete answer whose tokens came at these times after its start."""
    ends = start + (times[-1] if end is None else end)
    given = {"completion_tokens": len(times), "prompt_tokens": 10, **fields}
    return Answer(
        wanted_tokens=given.pop("wanted_tokens", len(times)),
        start=start,
        end=ends,
        times=[start + time for time in times],
        **given,
    )


def workload(**fields: Any) -> Workload:
    given = {"requests": 12, "prompt": Lengths("5:9"), "output": Lengths("4"), **fields}
    return Workload(**given)


def load(arrivals: Arrivals | None = None, **fields: Any) -> Load:
    """A closed loop of 3, unless arrivals are given. fields: of the load, or of its workload."""
    own = {name: fields.pop(name) for name in ("max_seconds", "seed") if name in fields}
    clients = fields.pop("concurrency", 0 if arrivals else 3)
    return Load(workload(**fields), arrivals, clients, **own)


def run_of(*answers: Answer, wall_s: float = 2.0, url: str = "http://a:1", **fields: Any) -> Run:
    """A run that began at 100 s on its clock."""
    run = Run(Target(url, "model"), load(), 100.0, wall_s, list(answers), **fields)
    run.client = {"cpu_share": 0.1, "busiest_share": 0.2, "bottleneck": False}
    return run
