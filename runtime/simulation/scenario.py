"""One simulated run from a machine, options and arrivals, and the static batching it replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.scheduling.scheduler import Scheduler
from runtime.simulation.cost_model import StepTimer
from runtime.simulation.simulator import Schedules, SimulationResult, Simulator
from runtime.simulation.trace import config_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request, RequestOutput
    from runtime.runner import StepOutput
    from runtime.scheduling.plan import Plan
    from runtime.scheduling.schedule_batch import ScheduleBatch
    from runtime.scheduling.statistics import SchedulerStatistics
    from runtime.simulation.machines import Machine
    from runtime.simulation.workloads import Arrival


def simulate(
    machine: Machine,
    arrivals: Sequence[Arrival],
    options: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    overlap: bool = True,
    static_batching: bool = False,
) -> SimulationResult:
    """Serves arrivals on a machine.

    Args:
        options: scheduler options that differ from the machine's and the defaults.
        seed: of the noise in the step times.

    Raises: ConfigError: options that cannot be served, an option of no such name."""
    config = config_from({**machine.options, **(options or {})})
    scheduler: Schedules = Scheduler(config)
    if static_batching:
        scheduler = StaticBatching(scheduler, config.max_running_requests)
    simulator = Simulator(
        scheduler,
        StepTimer(machine.cost, seed),
        overlap=overlap,
        host=machine.host,
        tier=machine.tier,
    )
    return simulator.run(arrivals)


class StaticBatching:
    """A scheduler to which nobody is added while anybody runs: what servers did before Orca (Yu et
    al., OSDI 2022). Requests that come meanwhile wait here for the last of the batch to end."""

    def __init__(self, inner: Schedules, batch_size: int) -> None:
        self._inner = inner
        self._batch_size = batch_size
        self._held: list[Request] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._held) or self._inner.has_unfinished

    def add(self, request: Request, now: float) -> list[RequestOutput]:
        self._held.append(request)
        return []

    def abort(self, request_id: str, message: str | None = None) -> bool:
        before = len(self._held)
        self._held = [r for r in self._held if r.request_id != request_id]
        return len(self._held) < before or self._inner.abort(request_id, message)

    def plan(self, now: float) -> Plan:
        if self._held and not self._inner.has_unfinished:
            size = self._batch_size
            batch, self._held = self._held[:size], self._held[size:]
            for request in batch:
                self._inner.add(request, now)
        return self._inner.plan(now)

    def commit(self, batch: ScheduleBatch, output: StepOutput, now: float) -> list[RequestOutput]:
        return self._inner.commit(batch, output, now)

    def stored(self, copy_id: int, pages: int) -> int:
        return self._inner.stored(copy_id, pages)

    def loaded(self, load_id: int, pages: int) -> None:
        self._inner.loaded(load_id, pages)

    def statistics(self) -> SchedulerStatistics:
        return self._inner.statistics()
