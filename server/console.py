"""What the server tells its operator on the terminal: progress, the ready line, logs."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from server.config import ServerConfig
    from server.service import Service


_COUNTED = re.compile(r"(?P<what>[^:]+): (?P<done>\d+) of (?P<all>\d+) .+")
_BAR_CELLS = 20
_EVERY_S = 2.0


class Progress:
    """Tells what is being done: lines, and for what can be counted ("converting: 3 of 9 tensors") a
    bar on a terminal, elsewhere a line every two seconds. Several things may go on at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bars: dict[str, str] = {}
        self._told_s: dict[str, float] = {}

    def __call__(self, message: str) -> None:
        counted = _COUNTED.fullmatch(message)
        with self._lock:
            if counted is None:
                self._bars.clear()  # what still goes on is drawn again with its next report
                self._write(f"loomserve: {message}\n")
            elif counted["done"] == counted["all"]:
                self._bars.pop(counted["what"], None)
                self._write(f"loomserve: {message}\n")
            elif sys.stderr.isatty():
                self._bars[counted["what"]] = _bar(counted)
                self._write("")
            elif time.monotonic() - self._told_s.get(counted["what"], -_EVERY_S) >= _EVERY_S:
                self._told_s[counted["what"]] = time.monotonic()
                self._write(f"loomserve: {message}\n")

    def _write(self, lines: str) -> None:
        """Lines above the bars."""
        clear = "\r\033[K" if sys.stderr.isatty() else ""
        bars = "loomserve: " + "  ".join(self._bars.values()) if self._bars else ""
        print(f"{clear}{lines}{bars}", end="", file=sys.stderr, flush=True)


def _bar(counted: re.Match[str]) -> str:
    done, total = int(counted["done"]), int(counted["all"])
    full = _BAR_CELLS * done // max(1, total)
    return f"{counted['what']} [{'#' * full}{'.' * (_BAR_CELLS - full)}] {done}/{total}"


progress = Progress()


def set_up_logging(config: ServerConfig) -> None:
    """Logs go to stderr; the access log has its own form, one JSON object a line."""
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    access = logging.getLogger("loomserve.access")
    access.propagate = False
    access.setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(handler)


def announce(url: str, service: Service) -> None:
    """The ready line of a server."""
    chat = service.tokenizer.chat_template is not None
    tell_ready("loomserve", url, service.limits.model, service.config, chat=chat)


def tell_ready(who: str, url: str, model: str, config: ServerConfig, *, chat: bool) -> None:
    """A ready line, and a command to try it with."""
    body: dict[str, Any] = {"model": model, "stream": True, "temperature": 0}
    if chat:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "Why is the sky blue?"}]
    else:
        path = "/v1/completions"
        body |= {"prompt": "The capital of France is", "max_tokens": 32}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key else ""
    how = " -k" if url.startswith("https") else ""
    uds = config.uds
    if uds is not None:
        how += f" --unix-socket {shlex.quote(uds)}"
    print(f"{who} is ready on {uds or url} with model {model}. Try:\n")
    print(
        f"  curl -N{how} {url}{path}{key} -H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'\n",
        flush=True,
    )
