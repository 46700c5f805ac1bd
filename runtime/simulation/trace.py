"""The file that `--record` writes: every input and every decision of a scheduler, as JSON lines.

The first line holds the version and the scheduler's options; each later line is one call, with its
arguments (the inputs) and what it returned (the decision):

    {"event":"add","now":…,"request":{…},"outputs":[…]}      or "error":[type, message]
    {"event":"add_group","now":…,"requests":[{…},…],"outputs":[…]}            likewise
    {"event":"abort" | "abort_all" | "finish" | "flush", …,"result":…}
    {"event":"change_options","changes":{…}}                  options changed while serving
    {"event":"grammar","id":…,"ready":true}                   before the call that sees it
    {"event":"plan","now":…,"batch":{…} | null,"reason":…,"ended":[…],…}
    {"event":"commit","now":…,"step":…,"tokens":[…],"failed":{…},"device_s":…,"outputs":[…]}
    {"event":"fail","now":…,"step":…,"message":…,"outputs":[…]}    later steps in flight go with it
    {"event":"adopt","prefixes":[[namespace, tokens, frames],…]}    in the tier from before
    {"event":"stored","copy":…,"pages":…,"result":…}          a copy to the tier is done
    {"event":"loaded","load":…,"pages":…}                     a load from it is done

Times are the engine's clock readings, written so that reading gives the same float. What the
scheduler never looks at (temperatures, log-probabilities, texts) is not recorded.
"""

from __future__ import annotations

import contextlib
import json
import logging
from array import array
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, TextIO

from runtime.config import SchedulerConfig
from runtime.errors import ConfigError
from runtime.private_files import open_private
from runtime.request import (
    Finish,
    FinishReason,
    PromptPin,
    Request,
    RequestOutput,
    SamplingParams,
)
from runtime.scheduling.kv_tier import TierPrefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from runtime.scheduling.plan import Plan
    from runtime.scheduling.schedule_batch import ScheduleBatch

log = logging.getLogger("loomserve.record")

VERSION = 2
Event = dict[str, Any]

_BATCH_ARRAYS = (
    "rows",
    "prefix_lens",
    "extend_lens",
    "input_ids",
    "sampled",
    "sample_positions",
    "output_counts",
    "table_rows",
    "table_indices",
    "table_pages",
)
_STATE_ARRAYS = ("state_rows", "state_slots", "save_rows", "save_tokens", "save_slots")
# What the arrays of a batch were called in version 1.
_NAMES_OF_VERSION_1 = {
    "starts": "prefix_lens",
    "lengths": "extend_lens",
    "positions": "sample_positions",
}
# The sampling fields that a scheduler may look at.
_SAMPLING_FIELDS = (
    "max_new_tokens",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
)


def to_line(event: Event) -> str:
    """The one spelling of an event: what "the same to the byte" compares."""
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


class TraceWriter:
    """Appends events to a file that only its owner can read; each is on its way to the disk when
    `write` returns, so that the trace of a server that dies ends at the call that killed it.

    Where the file cannot be written any more (a full disk) the trace ends there, with a warning:
    what is served goes on.

    Raises: ConfigError: the file cannot be written at all.
    """

    def __init__(self, path: Path, config: SchedulerConfig) -> None:
        self._path = path
        self._file: TextIO | None = None
        try:
            self._file = open(path, "w", encoding="utf-8", opener=open_private)  # noqa: SIM115
            self._append(head_event(config))
        except OSError as error:
            self.close()
            raise ConfigError(f"record {path}: cannot be written: {error}") from error

    def write(self, event: Event) -> None:
        if self._file is None:
            return
        try:
            self._append(event)
        except Exception as error:
            log.warning("record %s: ends here, since it cannot be written: %s", self._path, error)
            self.close()

    def _append(self, event: Event) -> None:
        assert self._file is not None
        self._file.write(to_line(event) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what is still in its buffer is lost
                file.close()


@dataclass(slots=True)
class Trace:
    """A recorded run: the options and the events that followed, each with its line number."""

    options: dict[str, Any]
    events: list[tuple[int, Event]]


def read_trace(path: Path) -> Trace:
    """The whole trace.

    A last line cut off by the death of the server is left out.

    Raises: ConfigError: not a trace, of another version, or a damaged line, with its number."""
    try:
        with path.open(encoding="utf-8") as lines:
            events = list(_parse(lines, path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not events or events[0][1].get("event") != "options":
        raise ConfigError(f"{path}: not a scheduler trace (no options in the first line)")
    head = events[0][1]
    version = head.get("version")
    if version not in (1, VERSION):
        raise ConfigError(f"{path}: trace version {version!r}: must be 1 or {VERSION}")
    # What a trace without the option was recorded by.
    head["options"].setdefault("prefill_share", 0.0)
    if version == 1:
        for _, event in events:
            _upgrade(event)
    return Trace(head["options"], events[1:])


def _upgrade(event: Event) -> None:
    """Gives an event of version 1 the names of this one."""
    if event.get("batch"):
        event["batch"] = {
            _NAMES_OF_VERSION_1.get(name, name): value for name, value in event["batch"].items()
        }
    if event.get("reason") == "slots":
        event["reason"] = "rows"


def _parse(lines: Iterator[str], path: Path) -> Iterator[tuple[int, Event]]:
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError as error:
            if not line.endswith("\n"):
                return
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(event, dict):
            raise ConfigError(f"{path}:{number}: must be an object, is {type(event).__name__}")
        yield number, event


def head_event(config: SchedulerConfig) -> Event:
    """The first line of a trace."""
    options = {**asdict(config), "eos_token_ids": sorted(config.eos_token_ids)}
    return {"event": "options", "version": VERSION, "options": options}


def config_from(record: dict[str, Any], overrides: dict[str, Any] | None = None) -> SchedulerConfig:
    """The options of a trace. Options that this version does not know, or that the trace does not
    have, are an error and the default.

    Raises: ConfigError: names the option."""
    known = {f.name for f in fields(SchedulerConfig)}
    given = {**record, **(overrides or {})}
    for name in given:
        if name not in known:
            raise ConfigError(f"option {name!r}: not an option of the scheduler")
    given["eos_token_ids"] = frozenset(given.get("eos_token_ids", ()))
    given["measured_steps"] = tuple(tuple(step) for step in given.get("measured_steps", ()))
    return SchedulerConfig(**given)


def parse_override(text: str) -> tuple[str, Any]:
    """`name=value` as an option of the scheduler, dashes allowed.

    Raises: ConfigError: an unknown name, or a value of another type than the option's."""
    name, separator, value = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    kinds = {f.name: str(f.type) for f in fields(SchedulerConfig) if str(f.type) in _READERS}
    if not separator or name not in kinds:
        names = ", ".join(sorted(kinds))
        raise ConfigError(f"{text!r}: must be NAME=VALUE with NAME one of {names}")
    try:
        return name, _READERS[kinds[name]](value)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{name} {value!r}: must be a value of type {kinds[name]}") from error


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_READERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda text: _BOOLEANS[text.lower()],
}


def request_record(request: Request) -> dict[str, Any]:
    """A request as it is before `add`."""
    plain = SamplingParams()
    sampling = {}
    for name in _SAMPLING_FIELDS:
        value = getattr(request.sampling, name)
        if value != getattr(plain, name):
            sampling[name] = sorted(value) if isinstance(value, frozenset) else value
    record = {
        "id": request.request_id,
        "input_ids": list(request.input_ids),
        "sampling": sampling,
        "arrival_s": request.arrival_s,
        "priority": request.priority,
        "namespace": request.namespace,
        "deadline_s": request.deadline_s,
        "grammar": None if request.grammar is None else request.grammar.ready,
    }
    if request.pins:  # traces of before there were any have no such entry
        record["pins"] = [[pin.tokens, pin.ttl_s, pin.key] for pin in request.pins]
    return record


def pins_from(record: dict[str, Any]) -> tuple[PromptPin, ...]:
    """What a request's record says is to be kept of its prompt."""
    return tuple(PromptPin(*pin) for pin in record.get("pins", ()))


def sampling_from(record: dict[str, Any]) -> SamplingParams:
    given = dict(record)
    given["stop_token_ids"] = frozenset(given.get("stop_token_ids", ()))
    return SamplingParams(**given)


def batch_record(batch: ScheduleBatch) -> dict[str, Any]:
    """Every int of a planned step, and the ids of its requests."""
    record: dict[str, Any] = {
        "step": batch.step,
        "num_prefill": batch.num_prefill,
        "requests": [request.request_id for request in batch.requests],
    }
    for name in _BATCH_ARRAYS:
        record[name] = list(getattr(batch, name))
    for name in _STATE_ARRAYS:  # of models with a recurrent state
        if getattr(batch, name):
            record[name] = list(getattr(batch, name))
    if batch.retry:
        record["retry"] = True
    if batch.restore:
        record["restore"] = [request.request_id for request in batch.restore]
    return record


def copies_record(plan: Plan) -> dict[str, Any]:
    """What a pass names of copies and loads, where it names any."""
    record: dict[str, Any] = {}
    if plan.copies:
        record["copies"] = [
            [copy.copy_id, list(copy.pages), list(copy.frames), copy.before] for copy in plan.copies
        ]
    if plan.loads:
        record["loads"] = [
            [load.load_id, list(load.frames), list(load.pages)] for load in plan.loads
        ]
    return record


def prefixes_record(prefixes: Sequence[TierPrefix]) -> list[list[Any]]:
    """[namespace, tokens, frames] of each."""
    return [[item.namespace, list(item.token_ids), list(item.frames)] for item in prefixes]


def prefixes_from(records: list[list[Any]]) -> list[TierPrefix]:
    return [TierPrefix(name, ids_from(ids), ids_from(frames)) for name, ids, frames in records]


def outputs_record(outputs: list[RequestOutput]) -> list[list[Any]]:
    """[id, tokens, finish] of each."""
    return [
        [output.request.request_id, list(output.token_ids), finish_record(output.finish)]
        for output in outputs
    ]


def finish_record(finish: Finish | None) -> list[Any] | None:
    return None if finish is None else [finish.reason.value, finish.matched, finish.message]


def finish_from(record: list[Any]) -> Finish:
    reason, matched, message = record
    return Finish(FinishReason(reason), matched, message)


def ids_from(record: list[int]) -> array[int]:
    return array("i", record)
