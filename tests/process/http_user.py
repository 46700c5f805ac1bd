"""Asks a server as its users do, and checks the form of what comes back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from time import monotonic
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PATIENCE_S = 120.0
COUNTING = "Count: one two three four five six seven eight nine ten eleven twelve thirteen"

_numbers = itertools.count()


def unseen() -> str:
    """A word that no prompt had before, so that no cache knows what begins with it."""
    return f"k{next(_numbers)}x"


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def text_of(choice: dict) -> str:
    """The text of a choice, whole or a piece of it, of either protocol."""
    if "text" in choice:
        return choice["text"]
    part = choice["delta"] if "delta" in choice else choice["message"]
    return (part.get("reasoning_content") or "") + (part.get("content") or "")


class Answer:
    """What came back for a request that was not streamed."""

    def __init__(self, response: requests.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self.json = strict_json(response.content.decode())
        if self.status == 200:
            self.choices: list[dict] = self.json["choices"]
            self.usage: dict = self.json["usage"]

    def text(self, index: int = 0) -> str:
        return text_of(self.choices[index])

    def assert_refused(self, *, naming: str = "") -> None:
        """A 400 in OpenAI's form, which names the field."""
        assert self.status == 400, self.json
        assert isinstance(self.json["error"]["message"], str)
        if naming:
            assert (self.json["error"]["param"] or "").endswith(naming), self.json


class Streamed:
    """A stream that was read to its end: framed as server-sent events, [DONE] last, no error."""

    def __init__(self, response: requests.Response) -> None:
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        self.headers = response.headers
        *blocks, nothing = response.content.decode().split("\n\n")
        assert nothing == ""
        events = [block for block in blocks if not block.startswith(":")]
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        *data, done = [event.removeprefix("data: ") for event in events]
        assert done == "[DONE]"
        self.chunks = [strict_json(one) for one in data]
        assert not any("error" in chunk for chunk in self.chunks)

    def pieces(self, index: int = 0) -> list[dict]:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return [choice for choice in choices if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(text_of(piece) for piece in self.pieces(index))

    @property
    def finish_reason(self) -> str | None:
        """Asserts that the last piece has it, and no other."""
        *before, last = [piece["finish_reason"] for piece in self.pieces()]
        assert not any(before)
        return last

    @property
    def usage(self) -> dict:
        return self.chunks[-1]["usage"]


class User:
    """One who knows a server's address; greedy unless asked otherwise."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.model: str = self.get("/v1/models").json()["data"][0]["id"]
        self.context_length: int = self.get("/v1/models").json()["data"][0]["max_model_len"]

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=PATIENCE_S)

    def post(self, path: str, body: dict, **options: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=PATIENCE_S, **options)

    def body(self, kind: str, prompt: Any, **fields: Any) -> dict:
        """prompt: a chat's messages, or the text of its only one."""
        if kind == "chat" and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        name = "prompt" if kind == "completions" else "messages"
        return {"model": self.model, name: prompt, "temperature": 0, "max_tokens": 8, **fields}

    def ask(self, kind: str, prompt: Any, headers: dict | None = None, **fields: Any) -> Answer:
        """Whatever its status is, but never 5xx."""
        body = self.body(kind, prompt, **fields)
        answer = Answer(self.post(PATHS[kind], body, headers=headers))
        assert answer.status < 500, answer.json
        return answer

    def generate(self, kind: str, prompt: Any, **fields: Any) -> Answer:
        answer = self.ask(kind, prompt, **fields)
        assert answer.status == 200, answer.json
        return answer

    def stream(
        self, kind: str, prompt: Any, headers: dict | None = None, **fields: Any
    ) -> Streamed:
        body = self.body(kind, prompt, stream=True, **fields)
        return Streamed(self.post(PATHS[kind], body, headers=headers))

    @contextmanager
    def events(self, kind: str, prompt: Any, **fields: Any) -> Iterator[Iterator[bytes]]:
        """The events of a stream, as they come; who leaves the block leaves the server."""
        body = self.body(kind, prompt, stream=True, **fields)
        with self.post(PATHS[kind], body, stream=True) as response:
            assert response.status_code == 200
            yield (line for line in response.iter_lines() if line.startswith(b"data: "))

    def tokens(self, text: str) -> list[int]:
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return self.post("/tokenize", body).json()["tokens"]

    def metrics(self) -> dict[str, float]:
        """Each metric, with the sum over its labels."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def assert_idle_soon(self) -> None:
        """Nothing runs and nothing waits, once what was left has been noticed; and it serves."""
        gauges = ("loomserve:requests_running", "loomserve:requests_waiting")
        end = monotonic() + PATIENCE_S
        while any((metrics := self.metrics())[gauge] for gauge in gauges):
            assert monotonic() < end, {gauge: metrics[gauge] for gauge in gauges}
        self.generate("completions", "Hello", max_tokens=2)


def together(functions: list[Callable[[], Any]]) -> list[Any]:
    """Calls them at the same moment; what they return, in order."""
    gate = Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        gate.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))
