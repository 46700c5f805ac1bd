"""What can be told of the options before a model is loaded, which may take minutes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from server.config import ServerConfig


def check_before_loading(config: ServerConfig) -> None:
    """Raises: ConfigError: an option that could not be kept once everything is loaded."""
    if config.record is not None:
        _check_writable("record", Path(config.record))
    if config.trace is not None:
        _check_writable("trace", Path(config.trace))
    if config.otlp_endpoint is not None:
        try:
            from server.observability.spans import traces_url
        except ImportError:
            raise ConfigError(
                "otlp_endpoint: needs OpenTelemetry; pip install -e '.[otel]'"
            ) from None
        traces_url(config.otlp_endpoint)
    _check_memory(config.runner.kv_offload_gb)
    if config.kv_events is not None:
        try:
            from server.generation.kv_events import check_endpoints
        except ImportError:
            raise ConfigError(
                "kv_events: needs pyzmq and msgspec; pip install -e '.[kv-events]'"
            ) from None
        check_endpoints(config.kv_events, config.kv_events_replay)


def _check_memory(offload_gb: float) -> None:
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    if offload_gb >= there:
        raise ConfigError(
            f"kv_offload_gb {offload_gb:g}: this machine has {there:.1f} GiB of memory in all"
        )


def _check_writable(option: str, path: Path) -> None:
    """Changes nothing: a file that is there is only emptied when it is written."""
    found = path.exists()
    try:
        with path.open("a"):
            pass
        if not found:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None
