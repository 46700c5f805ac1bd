"""Simulations asked for and told in JSON: what the page in the browser runs, a few turns at a time.

The page has no Python of its own: it loads this package and talks to one `Session`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.config import SchedulerOptions
from runtime.errors import ConfigError, LoomserveError
from runtime.options import options_of
from runtime.scheduling.scheduler import Scheduler
from runtime.simulation.cost_fit import fit_cost_model
from runtime.simulation.cost_model import StepTimer
from runtime.simulation.live_run import read_live_run
from runtime.simulation.machines import MACHINE_NAMES, Machine, machine
from runtime.simulation.observation import Observation
from runtime.simulation.recorder import RecordingScheduler
from runtime.simulation.run_report import run_report
from runtime.simulation.simulator import HostCost, Simulator
from runtime.simulation.trace import config_from, head_event, parse_override, read_trace, to_line
from runtime.simulation.workloads import Arrival, Workload, in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from runtime.config import SchedulerConfig
    from runtime.simulation.trace import Event

# Beside the options of a server: what it derives from the machine, and one may want to change.
DERIVED_OPTIONS = {
    "capacity_tokens": "KV tokens of the pool",
    "context_length": "tokens of a sequence",
}


@dataclass(slots=True)
class Load:
    """What is served, and where.

    Args: note: how the machine's costs were found, for the reader.
    """

    arrivals: list[Arrival]
    machine: Machine
    note: str


class ObservedRun:
    """A simulation that can stand still, and tells in the end how it went from inside.

    Raises: ConfigError: options that cannot be served, an option of no such name."""

    def __init__(
        self,
        where: Machine,
        arrivals: Sequence[Arrival],
        options: dict[str, Any],
        *,
        seed: int = 0,
        overlap: bool = True,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.options = options
        scheduler = scheduler or Scheduler(config_of(where, options))
        self._seen = Observation(scheduler)
        timer = StepTimer(where.cost, seed)
        self.simulator = Simulator(
            scheduler, timer, overlap=overlap, host=where.host, watch=self._seen
        )
        self._turns = self.simulator.turns(arrivals)

    def advance(self, steps: int) -> bool:
        """Goes on until that many more steps are launched; whether it has come to its end."""
        until = self.simulator.steps + steps
        return all(self.simulator.steps < until for _ in self._turns)

    def finish(self) -> None:
        """Goes on to the end."""
        for _ in self._turns:
            pass

    def report(self, name: str) -> dict[str, Any]:
        """See `run_report`."""
        return run_report(name, self.options, self.simulator.result(), self._seen)


def config_of(where: Machine, options: dict[str, Any]) -> SchedulerConfig:
    """What the scheduler of a machine decides by, some options changed."""
    return config_from({**where.options, **options})


class Session:
    """One load at a time, and one run of it after another. Every method takes and gives JSON; what
    cannot be done is told as {"error": message}."""

    def __init__(self) -> None:
        self._load: Load | None = None
        self._run: ObservedRun | None = None

    def describe(self) -> str:
        """The machines and options there are."""
        return to_line({"machines": MACHINE_NAMES, "options": list(_described_options())})

    def load(self, text: str) -> str:
        """Reads or makes what is to be served.

        Args: text: {"trace": PATH} or {"workloads": [fields of Workload, and "name"]}; with both,
            "machine": its name, or null for costs fitted to the trace.
        Returns: how many requests over how long, the options there, a note."""
        return _answer(self._open, text)

    def start(self, text: str) -> str:
        """Begins a run of the load.

        Args: text: {"options": {name: text}, "seed": 0, "overlap": true}, each may be left out."""
        return _answer(self._start, text)

    def advance(self, steps: int) -> str:
        """Goes on with the run, until so many more steps are launched or all is served.

        Returns: {"done": …, "steps": …, "ended": …, "requests": …, "simulated_s": …}, of which
            "ended" is of all "requests"; once done with "report"."""
        return _answer(self._advance, json.dumps(steps))

    def _open(self, record: dict[str, Any]) -> dict[str, Any]:
        self._run = None
        self._load = load = open_load(record)
        config = config_of(load.machine, {})
        names = [option["name"] for option in _described_options()]
        return {
            "requests": len(load.arrivals),
            "seconds": load.arrivals[-1].arrival_s if load.arrivals else 0.0,
            "input_tokens": sum(len(arrival.input_ids) for arrival in load.arrivals),
            "options": {name: getattr(config, name) for name in names},
            "note": load.note,
        }

    def _start(self, record: dict[str, Any]) -> dict[str, Any]:
        if self._load is None:
            raise ConfigError("there is nothing to serve yet: load a trace or a workload")
        options = read_options(record.get("options", {}))
        self._run = ObservedRun(
            self._load.machine,
            self._load.arrivals,
            options,
            seed=record.get("seed", 0),
            overlap=record.get("overlap", True),
        )
        return {"requests": len(self._load.arrivals)}

    def _advance(self, steps: int) -> dict[str, Any]:
        if self._run is None or self._load is None:
            raise ConfigError("there is no run to go on with")
        done = self._run.advance(steps)
        simulator = self._run.simulator
        told: dict[str, Any] = {
            "done": done,
            "steps": simulator.steps,
            "ended": simulator.ended,
            "requests": len(self._load.arrivals),
            "simulated_s": simulator.clock.now,
        }
        if done:
            told["report"] = self._run.report("")
        return told


def open_load(record: dict[str, Any]) -> Load:
    """What `Session.load` describes.

    Raises: ConfigError: names the field or the line of the trace that is wrong; a trace of too few
        steps to fit costs to, without a machine."""
    name = record.get("machine")
    if "trace" in record:
        return _recorded(Path(record["trace"]), name)
    workloads = record.get("workloads")
    if not isinstance(workloads, list) or not workloads:
        raise ConfigError(f"workloads {workloads!r}: must be a list of one or more")
    arrivals = in_order(arrival for one in workloads for arrival in _made(dict(one)))
    where = machine(name or MACHINE_NAMES[0])
    return Load(arrivals, where, f"step times of {name or MACHINE_NAMES[0]}")


def read_options(texts: dict[str, Any]) -> dict[str, Any]:
    """Options given as texts. Raises: ConfigError: see `parse_override`."""
    return dict(parse_override(f"{name}={text}") for name, text in texts.items())


def decisions(text: str) -> str:
    """A run as a trace: every call and decision of the scheduler, which must be the same to the
    byte wherever Python runs.

    Args: text: what `Session.load` and `Session.start` take, in one.
    Raises: ConfigError: as they tell."""
    record = json.loads(text)
    load = open_load(record)
    options = read_options(record.get("options", {}))
    config = config_of(load.machine, options)
    lines = _Lines()
    lines.write(head_event(config))
    scheduler = RecordingScheduler(config, lines)
    run = ObservedRun(load.machine, load.arrivals, options, scheduler=scheduler)
    run.finish()
    return "".join(lines.lines)


class _Lines:
    """Takes the events of a recording scheduler as lines of text."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, event: Event) -> None:
        self.lines.append(to_line(event) + "\n")

    def close(self) -> None:
        """Nothing to close."""


def _answer(act: Callable[[Any], dict[str, Any]], text: str) -> str:
    try:
        return to_line(act(json.loads(text)))
    except (LoomserveError, OSError) as error:
        return to_line({"error": str(error)})


def _recorded(path: Path, name: str | None) -> Load:
    trace = read_trace(path)
    live = read_live_run(trace)
    if name is not None:
        where, note = machine(name), f"step times of {name}"
    else:
        fit = fit_cost_model(live.step_times)
        # A trace does not tell the host's time from waiting for the device: taken as hidden.
        where = Machine(fit.model, HostCost(), {})
        note = f"step times fitted to {fit.steps} recorded steps, median error {fit.error:.1%}"
    return Load(live.arrivals, replace(where, options=trace.options), note)


def _made(record: dict[str, Any]) -> list[Arrival]:
    """The requests of one workload, their ids starting with its name."""
    name = record.pop("name", "r")
    kinds = {f.name: str(f.type) for f in fields(Workload) if f.init}
    given: dict[str, Any] = {}
    for field_name, value in record.items():
        if field_name not in kinds:
            raise ConfigError(f"workload field {field_name!r}: must be one of {', '.join(kinds)}")
        given[field_name] = _checked(field_name, kinds[field_name], value)
    if "requests" not in given:
        raise ConfigError("workload: must say how many requests")
    arrivals = Workload(**given).arrivals()
    for index, arrival in enumerate(arrivals):
        arrival.request_id = f"{name}{index}"
    return arrivals


def _checked(name: str, kind: str, value: Any) -> Any:
    """The value as the workload holds it. Raises: ConfigError: of another kind."""
    if kind == "Span" and isinstance(value, list) and [type(one) for one in value] == [int, int]:
        return tuple(value)
    if kind == "int" and type(value) is int:
        return value
    if kind == "float" and type(value) in (int, float):
        return value
    wanted = {"Span": "two whole numbers", "int": "a whole number", "float": "a number"}[kind]
    raise ConfigError(f"{name} {value!r}: must be {wanted}")


def _described_options() -> Iterator[dict[str, Any]]:
    for name, help_text in DERIVED_OPTIONS.items():
        yield {"name": name, "kind": "int", "help": help_text, "choices": (), "at_least": 1}
    for option in options_of(SchedulerOptions):
        yield {
            "name": option.name,
            "kind": option.kind.__name__,
            "help": option.help,
            "choices": option.choices,
            "at_least": option.at_least,
            "at_most": option.at_most,
        }
