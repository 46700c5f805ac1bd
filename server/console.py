"""What the server tells its operator on the terminal: progress, the ready line, logs."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from server.config import ServerConfig
    from server.service import Service


def progress(message: str) -> None:
    """A line of what is being done."""
    print(f"loomserve: {message}", file=sys.stderr, flush=True)


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
    """The ready line, and a command to try it with."""
    body: dict[str, Any] = {"model": service.limits.model, "stream": True, "temperature": 0}
    if service.tokenizer.chat_template is not None:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    else:
        path = "/v1/completions"
        body |= {"prompt": "The capital of France is", "max_tokens": 32}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if service.config.api_key else ""
    how = " -k" if url.startswith("https") else ""
    uds = service.config.uds
    if uds is not None:
        how += f" --unix-socket {shlex.quote(uds)}"
    print(f"loomserve is ready on {uds or url} with model {service.limits.model}. Try:\n")
    print(
        f"  curl -N{how} {url}{path}{key} -H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'\n",
        flush=True,
    )
