"""What a fleet is told: its options, the commands of its processes, and the ports that it takes."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import ConfigError
from server.args import OPTIONS, parse_args
from server.http.sockets import listen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.config import ServerConfig

ROUTER = "sglang-router"


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """What a fleet is told beside the options of its servers.

    Args:
        devices: GPUs, dealt out to the replicas in turn; empty: what each finds.
        words: the servers' options as they were given, which `server` is made of.
        router_words: options of the router, as it documents them.
    """

    replicas: int
    devices: tuple[str, ...]
    server: ServerConfig
    words: tuple[str, ...]
    router_words: tuple[str, ...]

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.server.port + 1 + number}"

    @property
    def router_url(self) -> str:
        anywhere = self.server.host in ("0.0.0.0", "::", "")
        host = "127.0.0.1" if anywhere else self.server.host
        return f"http://{host}:{self.server.port}"

    def replica_command(self, number: int) -> list[str]:
        words = ["--host", "127.0.0.1", "--port", str(self.server.port + 1 + number)]
        if self.devices:
            words += ["--device", "cuda"]  # which refuses where there is none, as auto would not
        elif not self.server.runner.cpu_threads:
            words += ["--cpu-threads", str(self._cores_each)]
        # -P: a folder of this name where the fleet was started is not meant.
        return [sys.executable, "-P", "-m", "server", *self.words, *words]

    def replica_cores(self, number: int) -> frozenset[int]:
        """The cores of its own whose threads are to be bound to some; else empty."""
        if self.devices or not self.server.runner.cpu_pinning:
            return frozenset()
        cores, each = allowed_cores(), self._cores_each
        return frozenset(cores[(number * each + i) % len(cores)] for i in range(each))

    @property
    def _cores_each(self) -> int:
        return max(1, len(allowed_cores()) // self.replicas)

    def replica_environment(self, number: int) -> dict[str, str]:
        environment = dict(os.environ)
        # One process's weights are all the others' too, whatever pages the system keeps them on.
        environment.setdefault(OPTIONS["share_weights"].environment_variable, "true")
        keepalive = OPTIONS["sse_keepalive"]
        if self.server.sse_keepalive == keepalive.default:
            # Nothing goes out before the first token: where a replica dies with a queue, the router
            # asks another one. A value on the command line still goes before this.
            environment.setdefault(keepalive.environment_variable, "0")
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices[number % len(self.devices)]
        return environment

    def router_command(self) -> list[str]:
        drain_s = math.ceil(self.server.drain_timeout)
        return [
            *(router_program(), "launch"),
            *("--host", self.server.host, "--port", str(self.server.port)),
            *("--prometheus-port", str(self.server.port + 1 + self.replicas)),
            *("--worker-startup-check-interval", "1"),
            *("--health-check-endpoint", "/ready", "--health-check-interval-secs", "2"),
            *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
            *("--shutdown-grace-period-secs", str(drain_s), "--log-level", "warn"),
            *self.router_words,
        ]


def allowed_cores() -> list[int]:
    """Those that this process may run on; all, where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def router_program() -> str:
    """Raises: ConfigError: it is not installed."""
    beside = Path(sys.executable).with_name(ROUTER)
    found = shutil.which(ROUTER) or (str(beside) if beside.exists() else None)
    if found is None:
        raise ConfigError(f"{ROUTER} is not installed; pip install -e '.[fleet]'")
    return found


def parse_fleet(argv: Sequence[str], prog: str = "loomserve fleet") -> FleetConfig:
    """What the command line asks for; ends the process with status 2 and one line where it cannot
    be: [--replicas N] [--devices I,J,...] [OPTIONS OF SERVE] [-- THE ROUTER'S]."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    words, router_words = words[:end], tuple(words[end + 1 :])
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--replicas N] [--devices I,J,...] [OPTIONS OF SERVE] [-- THE ROUTER'S]",
        description="Serve a model by several processes behind a router.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--replicas", type=int, default=2, metavar="N", help="processes, each with the whole model"
    )
    parser.add_argument(
        "--devices", default="", metavar="I,J,...", help="GPUs, dealt out to the replicas in turn"
    )
    given, words = parser.parse_known_args(words)
    server = parse_args(words, prog)
    devices = tuple(filter(None, given.devices.split(",")))
    try:
        _check(given.replicas, devices, server)
    except ConfigError as error:
        parser.exit(2, f"{prog}: error: {error}\n")
    return FleetConfig(given.replicas, devices, server, tuple(words), router_words)


def _check(replicas: int, devices: tuple[str, ...], server: ServerConfig) -> None:
    if devices and server.runner.device == "cpu":
        raise ConfigError("devices: they are GPUs, but the device is cpu")
    if replicas < 1:
        raise ConfigError(f"replicas: got {replicas}, must be at least 1")
    last = server.port + 1 + replicas
    if server.port == 0 or last > 65535:
        raise ConfigError(
            f"port {server.port}: the fleet takes it and the {replicas + 1} behind it"
        )
    for name in ("uds", "ssl_certfile", "record", "trace", "kv_events"):
        if getattr(server, name) is not None:
            raise ConfigError(f"{name}: the replicas of a fleet cannot share it")
    if server.runner.kv_offload_path is not None:
        raise ConfigError("kv_offload_path: the replicas of a fleet cannot share it")


def check_ports(config: FleetConfig) -> None:
    """Raises: ConfigError: one that the fleet takes is somebody else's."""
    port, behind = config.server.port, config.replicas + 1
    for one in range(port, port + 1 + behind):
        # The router's metrics are for everybody, as its own option has it.
        host = "0.0.0.0" if one == port + behind else "127.0.0.1"
        for taken in listen(config.server.host if one == port else host, one):
            taken.close()
