"""Starts the server with its options, and ends with an exit status."""

from __future__ import annotations

import gc
import os
import ssl
import sys
import time
from typing import TYPE_CHECKING

import uvloop

from runtime.errors import ConfigError, LoomserveError
from server.console import progress, set_up_logging
from server.http.sockets import allow_files, forget_path, listen, listen_on_path
from server.loading import load
from server.preflight import check_before_loading
from server.service import make_service
from server.serving import serve
from server.startup import answering_probes
from server.stop_signals import StopSignals

if TYPE_CHECKING:
    from server.config import ServerConfig

# Files of a server without connections: its weights, sockets, libraries, and as many again.
OWN_FILES = 128
# Made and not yet gone, from which the garbage collector looks at young objects.
COLLECT_AFTER_OBJECTS = 20_000


def run(config: ServerConfig) -> int:
    """Serves until told to stop. Returns the exit status: 0 after a drain, 2 if it cannot start
    with what it was told."""
    set_up_logging(config)
    signals = StopSignals()
    started = time.perf_counter()
    _allow_connections(config.max_connections)
    try:
        sockets = listen_on_path(config.uds) if config.uds else listen(config.host, config.port)
        context = tls_context(config)
        check_before_loading(config)
        with answering_probes(sockets, context):
            service = make_service(config, load(config))
            signals.check()
            service.model_format.prepare()
        signals.hold()
    except LoomserveError as error:
        signals.check()  # which may be what went wrong
        print(f"loomserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    progress(f"started in {time.perf_counter() - started:.1f} s")
    calm_interpreter()
    # Nor may one client's prompts take all the cores from those who compute.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        signals.check()
        uvloop.run(serve(service, sockets, tls=context, signals=signals))
    finally:
        if config.uds:
            forget_path(config.uds)
    return 0


def calm_interpreter() -> None:
    """Once all is loaded: what the interpreter does of its own accord must not hold up tokens."""
    # What was loaded stays for good; the collector need not walk it again and again. And what a
    # token makes is gone without it: after 700 objects, the default, it looked at them some times
    # in each step of many rows, a tenth of the host's time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER_OBJECTS)
    # Threads that read long bodies and texts let the event loop go on after so long, not 5 ms: it
    # asks for the interpreter several times for each event.
    sys.setswitchinterval(0.001)


def _allow_connections(most: int) -> None:
    files = allow_files(most + OWN_FILES)
    if files < most + OWN_FILES:
        progress(
            f"max_connections {most}: this process may open {files} files (ulimit -n), so fewer"
            " connections can be served"
        )


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The TLS context of the certificate that the options name; None without one.

    Raises: ConfigError: it cannot be used.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ssl_certfile {config.ssl_certfile} with ssl_keyfile {config.ssl_keyfile}: {error}"
        ) from None
    return context
