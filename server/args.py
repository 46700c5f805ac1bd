"""Reads argv, the environment and a config file into a frozen `ServerConfig`.

An option is a field of `ServerConfig`, `RunnerConfig` or `SchedulerOptions` that was made with
`runtime.options.option`; the parser, the variables, the file's keys and the help are derived from
them. The command line goes before the environment, and that before the file. Nothing here imports
torch, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from runtime.config import RunnerConfig, SchedulerOptions
from runtime.errors import ConfigError
from runtime.options import LARGEST_INTEGER, Option, options_of
from server.config import ServerConfig
from server.version import version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GROUPS: tuple[tuple[str, type], ...] = (
    ("server", ServerConfig),
    ("model and device", RunnerConfig),
    ("scheduler", SchedulerOptions),
)
OPTIONS = {item.name: item for _, record in GROUPS for item in options_of(record)}

# Kubernetes sets these where a service is called loomserve; the tests have their own.
_FOREIGN = re.compile(r"SERVICE_|PORT_\d|TEST_|CLIENTS_")
_PREFIX = "LOOMSERVE_"
_EPILOG = f"""\
Each option is also a key of the file given with --config, in JSON or TOML (YAML is not read), and
an environment variable: LOOMSERVE_PORT for --port. The command line goes before the environment,
the environment before the file. Integers without a bound of their own are at most
{LARGEST_INTEGER}."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `serve`. It gives texts, and nothing for what is absent: what a text means is
    the same wherever it comes from (`Option.read`)."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [MODEL] [OPTIONS]",
        description="Serve a language model through OpenAI-compatible endpoints.",
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("folder", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--version", action="version", version=f"loomserve {version()}")
    parser.add_argument("--config", metavar="FILE", help="read options from a JSON or TOML file")
    for title, record in GROUPS:
        group = parser.add_argument_group(title)
        for item in options_of(record):
            _add_argument(group, item)
    return parser


def _add_argument(group: argparse._ArgumentGroup, item: Option) -> None:
    text = item.description.replace("%", "%%")
    if item.kind is bool:
        group.add_argument(item.flag, dest=item.name, action="store_true", help=text)
        return
    group.add_argument(
        item.flag,
        dest=item.name,
        nargs="+" if item.several else None,
        action="extend" if item.several else "store",
        metavar=item.metavar or ("CHOICE" if item.choices else item.kind.__name__.upper()),
        help=text,
    )


def parse_args(argv: Sequence[str], prog: str = "python -m server") -> ServerConfig:
    """The configuration that argv, the environment and the config file ask for; ends the process
    with status 2 and one line where it cannot be."""
    parser = make_parser(prog)
    given, unknown = parser.parse_known_args(argv)
    for warning in unknown_variables(os.environ):
        print(f"{prog}: warning: {warning}", file=sys.stderr)
    try:
        return _configuration(vars(given), unknown)
    except ConfigError as error:
        parser.error(str(error))


def _configuration(given: dict[str, Any], unknown: Sequence[str]) -> ServerConfig:
    for word in unknown:
        flag = word.partition("=")[0]
        if flag.startswith("-"):
            raise ConfigError(f"unknown option {flag}" + _hint(flag, ["--config", *_FLAGS]))
    if unknown:
        raise ConfigError(f"one model can be served, got {unknown[0]!r} as a second")
    path = given.pop("config", None)
    folder = given.pop("folder", None)
    if folder is not None and given.setdefault("model", folder) != folder:
        raise ConfigError(f"model: given as {folder!r} and as --model {given['model']!r}")
    values = read_config_file(Path(path)) if path else {}
    values |= read_environment(os.environ)
    values |= {name: OPTIONS[name].read(value) for name, value in given.items()}
    return make_config(values)


def make_config(values: Mapping[str, Any]) -> ServerConfig:
    """A configuration from option values by field name.

    Raises: ConfigError: a value of the wrong type, or outside what is allowed.
    """
    runner, scheduler, server = (
        {item.name: values[item.name] for item in options_of(record) if item.name in values}
        for record in (RunnerConfig, SchedulerOptions, ServerConfig)
    )
    return ServerConfig(
        runner=RunnerConfig(**runner), scheduler=SchedulerOptions(**scheduler), **server
    )


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Option values by field name, from the variables that are set.

    Raises: ConfigError: names the variable.
    """
    values = {}
    for item in OPTIONS.values():
        text = environ.get(item.environment_variable)
        # Where a Kubernetes service is called loomserve, LOOMSERVE_PORT is set to its address.
        if text is None or (item.name == "port" and text.startswith("tcp://")):
            continue
        try:
            values[item.name] = item.read(text)
        except ConfigError as error:
            raise ConfigError(f"${item.environment_variable}: {error}") from None
    return values


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """What to say of variables that look like options and are none."""
    known = {item.environment_variable.removeprefix(_PREFIX) for item in OPTIONS.values()}
    given = (name.removeprefix(_PREFIX) for name in sorted(environ) if name.startswith(_PREFIX))
    return [
        f"${_PREFIX}{name} is no option" + _hint(name, sorted(known), f"${_PREFIX}")
        for name in given
        if name not in known and not _FOREIGN.match(name)
    ]


def read_config_file(path: Path) -> dict[str, Any]:
    """Option values by field name, from JSON or TOML (by the file's ending).

    Raises: ConfigError: unreadable, not an object, or a key that is no option.
    """
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"config file {path}: YAML is not read; write the same keys as TOML (key = value)"
            " or JSON"
        )
    kind = "TOML" if path.suffix == ".toml" else "JSON"
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if kind == "TOML" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path}: not valid {kind}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path}: must hold an object of options")
    found = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            raise ConfigError(f"config file {path}: unknown option {key!r}" + _hint(name, OPTIONS))
        if name in found:
            raise ConfigError(f"config file {path}: option {name!r} is there twice")
        try:
            found[name] = OPTIONS[name].accept(value)
        except ConfigError as error:
            raise ConfigError(f"config file {path}: {error}") from None
    return found


_FLAGS = {item.flag: item for item in OPTIONS.values()}


def _hint(word: str, known: Sequence[str] | Mapping[str, Any], before: str = "") -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {before}{near[0]}?" if near else ""


def public_options(config: ServerConfig) -> dict[str, Any]:
    """All options by name, for /server_info; of a secret only whether there is one."""
    values: dict[str, Any] = {}
    for record in (config, config.runner, config.scheduler):
        kind: type = type(record)
        for item in options_of(kind):
            value = getattr(record, item.name)
            values[item.name] = value is not None if item.secret else value
    return values
