"""A recorded trace without what was said: enough to simulate its load again, and no more.

Token ids are replaced by hashes under a secret that is forgotten: whoever reads them learns how
long prompts and answers are, and which begin with the same whole pages, since that is what the
scheduler decides by. Texts, stop strings and messages are left out, as are the decisions; times and
lengths of steps stay, to fit costs to. Such a trace can be simulated, but not replayed.

    python disguise.py TRACE        writes it to stdout; needs the standard library only
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from array import array
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Event = dict[str, Any]
_SAMPLING = ("max_new_tokens", "ignore_eos")
_TIMES = ("event", "now")
_SECRET_BYTES = 32


def disguise(path: Path, secret: bytes | None = None) -> Iterator[str]:
    """The lines of the trace as it is now, be it written to meanwhile.

    Args: secret: one that nobody knows, unless it is given.
    Raises: OSError: it cannot be read. ValueError: it is no trace."""
    size = path.stat().st_size
    answers = _answers(path, size)
    events = _events(path, size)
    head = next(events, {})
    if head.get("event") != "options":
        raise ValueError(f"{path}: not a scheduler trace (no options in the first line)")
    yield _line(head)
    disguised = _Disguise(
        secret or os.urandom(_SECRET_BYTES), head["options"]["page_size"], answers
    )
    for event in events:
        told = disguised.event(event)
        if told is not None:
            yield _line(told)


class _Disguise:
    """Rewrites events in their order."""

    def __init__(
        self, secret: bytes, page_size: int, answers: dict[str, deque[array[int]]]
    ) -> None:
        self._secret = secret
        self._page_size = page_size
        self._answers = answers
        self._namespaces: dict[str, str] = {"": ""}
        self._keys: dict[str, str] = {"": ""}  # of pins
        self._rest: dict[str, deque[int]] = {}  # of an answer, what has not been told yet

    def event(self, event: Event) -> Event | None:
        """The event as it may be told; None: not at all."""
        kind = event["event"]
        told = {name: event[name] for name in _TIMES if name in event}
        if kind == "add" and "error" not in event:
            told["request"] = self._request(event["request"])
        elif kind == "add_group" and "error" not in event:
            told["requests"] = [self._request(request) for request in event["requests"]]
        elif kind == "abort":
            told |= {"id": event["id"], "result": event.get("result")}
        elif kind == "plan":
            told["batch"] = batch = event.get("batch")
            if batch:
                names = ("step", "num_prefill", "prefix_lens", "extend_lens")
                told["batch"] = {name: batch[name] for name in names}
        elif kind == "commit":
            told |= {"step": event["step"], "device_s": event["device_s"]}
        elif kind not in ("abort_all", "fail"):
            return None
        for name in ("outputs", "ended"):
            if event.get(name):
                told[name] = [self._output(*output) for output in event[name]]
        return told

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        given, name = request["sampling"], request["namespace"]
        namespace = self._namespaces.setdefault(name, f"n{len(self._namespaces)}")
        prompt = array("i", request["input_ids"])
        ids = self._ids(name, prompt + self._answers[request["id"]].popleft())
        self._rest[request["id"]] = deque(ids[len(prompt) :])
        return {
            **{name: request[name] for name in ("id", "arrival_s", "priority", "deadline_s")},
            "input_ids": ids[: len(prompt)].tolist(),
            "sampling": {name: given[name] for name in _SAMPLING if name in given},
            "namespace": namespace,
            "grammar": None,
            "pins": [
                [tokens, ttl_s, self._keys.setdefault(key, f"k{len(self._keys)}")]
                for tokens, ttl_s, key in request.get("pins", ())
            ],
        }

    def _output(self, request_id: str, tokens: list[int], finish: list[Any] | None) -> list[Any]:
        rest = self._rest[request_id]
        reason = None if finish is None else [finish[0], None, None]
        return [request_id, [rest.popleft() for _ in tokens], reason]

    def _ids(self, namespace: str, tokens: array[int]) -> array[int]:
        """As many ids of 16 bits as tokens; those of a page follow from all pages up to it."""
        ids = array("i")
        state = self._hash(namespace.encode())
        for start in range(0, len(tokens), self._page_size):
            page = tokens[start : start + self._page_size]
            state = self._hash(state + page.tobytes())
            ids += array("i", array("H", hashlib.shake_128(state).digest(2 * len(page))))
        return ids

    def _hash(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._secret, digest_size=32).digest()


def _answers(path: Path, size: int) -> dict[str, deque[array[int]]]:
    """For each request id, the answers of the requests that had it, in order."""
    every: dict[str, deque[array[int]]] = {}
    for event in _events(path, size):
        if "error" not in event:
            for request in event.get("requests") or filter(None, [event.get("request")]):
                every.setdefault(request["id"], deque()).append(array("i"))
        for request_id, tokens, _ in event.get("outputs") or event.get("ended") or ():
            every[request_id][-1].extend(tokens)
    return every


def _events(path: Path, size: int) -> Iterator[Event]:
    """Those within the first `size` bytes. The last line may be about to be written."""
    with path.open("rb") as lines:
        for line in lines:
            size -= len(line)
            if size < 0 or not line.endswith(b"\n"):
                return
            yield json.loads(line)


def _line(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False) + "\n"


if __name__ == "__main__":
    with suppress(OSError):
        os.nice(10)  # the server goes first
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        sys.stdout.writelines(disguise(Path(sys.argv[1])))
    except BrokenPipeError:
        os._exit(1)
