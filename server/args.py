"""From argv, a config file and one environment variable to a frozen `ServerConfig`.

The options are the fields of `ServerConfig`, `RunnerConfig` and `SchedulerConfig` that were made
with `runtime.config.option`; the parser, the config file's keys and the help text are all derived
from them. Nothing here imports torch, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence  # noqa: TC003 (read by get_type_hints)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.checkpoints.cache_folder import resolve_cache_dir
from runtime.config import RunnerConfig, SchedulerConfig, option
from runtime.errors import ConfigError
from server.formats.reasoning import REASONING_FAMILIES
from server.formats.tools import TOOL_FAMILIES

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything the server is told at start.

    Args:
        runner: options of model and device.
        scheduler: those options of `SchedulerConfig` that were given; the launcher adds what
            follows from model and device.
    """

    runner: RunnerConfig = field(default_factory=RunnerConfig)
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    served_model_name: str | None = option(None, "the model's name in the API; else its folder's")
    log_level: str = option("info", "least severe messages shown", choices=LOG_LEVELS)
    disable_overlap: bool = option(False, "read each step's result before the next step is planned")
    record: str | None = option(
        None,
        "write every input and decision of the scheduler to this file, for scripts/replay.py"
        " and scripts/simulate.py",
        metavar="FILE",
    )

    chat_template: str | None = option(
        None, "a Jinja chat template that replaces the model's", metavar="FILE"
    )
    tool_call_parser: str | None = option(
        None,
        "format of the model's tool calls; else derived from the chat template",
        choices=tuple(TOOL_FAMILIES),
    )
    reasoning_parser: str | None = option(
        None,
        "format of the model's reasoning; without it, reasoning stays in the content",
        choices=tuple(REASONING_FAMILIES),
    )

    api_key: str | None = option(None, "requests must carry this key (Bearer or X-Api-Key)")
    cors_allow_origins: str = option(
        "", "origins that browsers may call from, comma separated; * for any"
    )
    max_body_bytes: int = option(32 * 2**20, "larger request bodies get 413")
    strict_fields: bool = option(
        False, "refuse request fields that nobody reads, instead of naming them in a header"
    )
    max_logprobs: int = option(20, "alternatives per token that a request may ask for")
    max_n: int = option(128, "choices, and prompts, that one request may ask for")
    max_connections: int = option(4096, "open connections; further ones get 503")
    header_timeout: float = option(20.0, "seconds for a new connection to send its request head")
    idle_timeout: float = option(120.0, "seconds that a connection may wait between two requests")
    body_timeout: float = option(60.0, "seconds to receive a request body")
    slow_reader_timeout: float = option(
        60.0, "seconds that a client may leave its answer unread before it is cut off"
    )
    request_timeout: float = option(0.0, "seconds from arrival to the end of an answer; 0: off")
    drain_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM")
    access_log: bool = option(False, "one line of JSON per request on standard error")
    ssl_certfile: str | None = option(None, "certificate chain, for TLS", metavar="FILE")
    ssl_keyfile: str | None = option(None, "private key, for TLS", metavar="FILE")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port}: must be between 0 and 65535")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level {self.log_level!r}: must be one of {LOG_LEVELS}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile: both or neither must be given")
        for name in ("max_body_bytes", "max_n", "max_connections"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")
        for name in ("header_timeout", "idle_timeout", "body_timeout", "slow_reader_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} {getattr(self, name)}: must be above 0 seconds")
        if self.max_logprobs < 0:
            raise ConfigError(f"max_logprobs {self.max_logprobs}: must be at least 0")


@dataclass(frozen=True, slots=True)
class Option:
    """One option as parser and config file see it."""

    name: str  # the field's
    kind: type  # bool, int, float or str
    optional: bool  # None is a value
    default: Any
    help: str
    choices: tuple[str, ...]
    flag: str
    metavar: str | None


GROUPS: tuple[tuple[str, type], ...] = (
    ("server", ServerConfig),
    ("model and device", RunnerConfig),
    ("scheduler", SchedulerConfig),
)


def options_of(record: type) -> list[Option]:
    """The fields of a config record that are options, in order."""
    hints = typing.get_type_hints(record)
    found = []
    for item in dataclasses.fields(record):
        if "help" not in item.metadata:
            continue
        hint, optional = hints[item.name], False
        if isinstance(hint, types.UnionType):
            kinds = [arm for arm in typing.get_args(hint) if arm is not type(None)]
            hint, optional = kinds[0], True
        found.append(
            Option(
                name=item.name,
                kind=hint,
                optional=optional,
                default=item.default,
                help=item.metadata["help"],
                choices=item.metadata["choices"],
                flag=item.metadata["flag"] or "--" + item.name.replace("_", "-"),
                metavar=item.metadata["metavar"],
            )
        )
    return found


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `serve`; absent options stay absent, so that a config file can fill in."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Serve a language model through OpenAI-compatible endpoints.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="read options from a JSON or TOML file")
    for title, record in GROUPS:
        group = parser.add_argument_group(title)
        for item in options_of(record):
            _add_argument(group, item)
    return parser


def _add_argument(group: argparse._ArgumentGroup, item: Option) -> None:
    text = item.help.replace("%", "%%")
    if item.kind is bool:
        group.add_argument(item.flag, dest=item.name, action="store_true", help=text)
        return
    if item.default is not None and item.default != "":
        text += f" (default {item.default})"
    group.add_argument(
        item.flag,
        dest=item.name,
        type=item.kind,
        choices=item.choices or None,
        metavar=item.metavar or (None if item.choices else item.kind.__name__.upper()),
        help=text,
    )


def parse_args(argv: Sequence[str], prog: str = "python -m server") -> ServerConfig:
    """The configuration that argv asks for; ends the process with status 2 where it is wrong."""
    parser = make_parser(prog)
    given = vars(parser.parse_args(argv))
    path = given.pop("config", None)
    try:
        values = {**(read_config_file(Path(path)) if path else {}), **given}
        return make_config(values, os.environ)
    except ConfigError as error:
        parser.error(str(error))


def make_config(values: Mapping[str, Any], environ: Mapping[str, str]) -> ServerConfig:
    """A configuration from option values by field name.

    Raises: ConfigError: a value of the wrong type, or outside what is allowed.
    """
    parts: dict[type, dict[str, Any]] = {record: {} for _, record in GROUPS}
    for _, record in GROUPS:
        for item in options_of(record):
            if item.name in values:
                parts[record][item.name] = _checked(item, values[item.name])
    runner = parts[RunnerConfig]
    runner.setdefault("cache_dir", str(resolve_cache_dir(None, environ)))
    scheduler = parts[SchedulerConfig]
    # Made only to be checked: the launcher adds the model's figures to the same options.
    SchedulerConfig(capacity_tokens=2**31, context_length=2**30, **scheduler)
    return ServerConfig(runner=RunnerConfig(**runner), scheduler=scheduler, **parts[ServerConfig])


def read_config_file(path: Path) -> dict[str, Any]:
    """Option values by field name, from JSON or TOML (by the file's ending).

    Raises: ConfigError: unreadable, not an object, or a key that is no option.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    except ValueError as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ConfigError(f"config file {path}: not valid {kind}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path}: must hold an object of options")
    known = {item.name for _, record in GROUPS for item in options_of(record)}
    named = {key.replace("-", "_"): value for key, value in values.items()}
    for key in named:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"config file {path}: unknown option {key!r}{hint}")
    return named


def _checked(item: Option, value: Any) -> Any:
    """The value, if it is of the option's type (config files may hold anything)."""
    if value is None and item.optional:
        return None
    if item.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not item.kind:
        raise ConfigError(f"{item.name} {value!r}: must be {_KINDS[item.kind]}")
    if item.choices and value not in item.choices:
        raise ConfigError(f"{item.name} {value!r}: must be one of {', '.join(item.choices)}")
    return value


_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def public_options(config: ServerConfig) -> dict[str, Any]:
    """All options by name, secrets left out, for /server_info."""
    values: dict[str, Any] = {}
    for item in options_of(ServerConfig):
        values[item.name] = getattr(config, item.name)
    for item in options_of(RunnerConfig):
        values[item.name] = getattr(config.runner, item.name)
    for item in options_of(SchedulerConfig):
        values[item.name] = config.scheduler.get(item.name, item.default)
    values["api_key"] = config.api_key is not None
    return values
