"""What came back, read by the rules of HTTP, of event streams and of each protocol.

Nothing of the server is used here: HTTP is read by h11, JSON by the standard library.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import h11


@dataclass
class Answer:
    """One response, as far as it came."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False
    closes: bool = False


class Reader:
    """Reads the responses of one connection out of the bytes that arrive."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._answer = Answer()
        self._asking = False
        self._waiting: list[tuple[str, str]] = []
        self.done: list[Answer] = []

    def ask(self, method: str, path: str) -> None:
        """A request is sent, whose answer comes after those of earlier ones."""
        self._waiting.append((method, path))
        self._next()

    def _next(self) -> None:
        if self._waiting and not self._asking and self._http.our_state is h11.IDLE:
            method, path = self._waiting.pop(0)
            self._asking = True
            self._http.send(h11.Request(method=method, target=path, headers=[("Host", "world")]))
            self._http.send(h11.EndOfMessage())

    @property
    def current(self) -> Answer:
        """The one that is coming."""
        return self._answer

    def feed(self, data: bytes) -> None:
        """Takes bytes; none: the connection has ended.

        Raises: h11.RemoteProtocolError: they are no HTTP, or a response is cut short.
        """
        self._http.receive_data(data)
        while self._asking:
            event = self._http.next_event()
            match event:
                case h11.Response():
                    self._answer.status = event.status_code
                    self._answer.headers = {k.decode(): v.decode() for k, v in event.headers}
                case h11.Data():
                    self._answer.body += bytes(event.data)
                case h11.EndOfMessage():
                    self._end()
                case h11.InformationalResponse():
                    assert event.status_code == 100
                case _:
                    return
        assert not self._http.trailing_data[0], "an answer that nobody asked for"

    def _end(self) -> None:
        self._answer.complete = True
        self._answer.closes = self._http.their_state is h11.MUST_CLOSE
        self.done.append(self._answer)
        self._answer = Answer()
        self._asking = False
        if not self.done[-1].closes:
            self._http.start_next_cycle()
            self._next()


@dataclass
class Said:
    """What an answer to a generating request says.

    Args:
        texts, finishes: by choice. error: the message of what ended it early.
        usage: of whole bodies, (prompt tokens, completion tokens).
    """

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    error: str = ""
    usage: tuple[int, int] | None = None


def events_of(body: bytes, *, complete: bool) -> list[tuple[str, str]]:
    """(name, data) of every event that is there as a whole."""
    assert b"\r" not in body
    *whole, rest = body.decode(errors="strict" if complete else "ignore").split("\n\n")
    assert not complete or not rest, f"the stream ends within an event: {rest!r}"
    found = []
    for block in whole:
        if all(line.startswith(":") for line in block.split("\n")):
            continue  # a comment, which keeps the connection alive
        name, data = "", None
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line[7:]
            else:
                assert line.startswith("data: "), line
                assert data is None, "an event has two lines of data"
                data = line[6:]
        assert data is not None
        found.append((name, data))
    return found


def read_stream(form: str, body: bytes, *, complete: bool) -> Said:
    """Checks a stream by its protocol's rules, and gives what it says."""
    found = events_of(body, complete=complete)
    reader = {"messages": _messages, "responses": _responses}.get(form, _choices)
    return reader(form, found, complete)


def _choices(form: str, found: list[tuple[str, str]], complete: bool) -> Said:
    """OpenAI's two older forms, and /generate, whose events repeat all that came before."""
    said = Said()
    ids = set()
    done = False
    for name, data in found:
        assert not name
        assert not done, "something follows [DONE]"
        assert not said.error, "something follows an error"
        if data == "[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            said.error = event["error"]["message"]
            continue
        if form == "generate":
            index, finish = event.get("index", 0), event["meta_info"]["finish_reason"]
            ids.add(event["meta_info"]["id"])
            text = event["text"]
            assert text.startswith(said.texts.get(index, "")), "a stream takes something back"
            said.texts[index] = text
            finish = finish and finish["type"]
        else:
            ids.add(event["id"])
            assert (
                event["object"]
                == {"chat": "chat.completion.chunk", "completions": "text_completion"}[form]
            )
            if "progress" in event:
                assert not said.texts, "it begins after its first token"
                assert event["choices"] == []
                _check_progress(event["progress"])
                continue
            (choice,) = event["choices"]
            index, finish = choice["index"], choice["finish_reason"]
            if form == "chat" and index not in said.texts:
                assert choice["delta"].get("role") == "assistant", "the first event has no role"
            text = choice["delta"].get("content") or "" if form == "chat" else choice["text"]
            assert index not in said.finishes, "a choice goes on after its end"
            said.texts[index] = said.texts.get(index, "") + text
        if finish is not None:
            assert index not in said.finishes, "a choice ends twice"
            said.finishes[index] = finish
    assert len(ids) <= 1
    if complete:
        assert done != bool(said.error), "a stream ends by [DONE] or by an error, one of them"
    return said


def _check_progress(told: dict[str, Any]) -> None:
    assert 0 <= told["prefilled_tokens"] <= told["prompt_tokens"]
    assert told["queue_position"] is None or told["queue_position"] >= 0
    expected = told["expected_first_token_s"]
    assert expected is None or expected >= 0


_ENDS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "pause_turn": "abort"}


def _messages(form: str, found: list[tuple[str, str]], complete: bool) -> Said:
    said = Said()
    state = "new"
    text = ""
    for name, data in found:
        event = json.loads(data)
        assert event["type"] == name
        assert state != "over", f"{name} after the end"
        match name:
            case "ping":
                pass
            case "error":
                said.error = event["error"]["message"]
                state = "over"
            case "message_start":
                assert state == "new"
                state = "open"
            case "content_block_start":
                assert state == "open"
                state = "block"
            case "content_block_delta":
                assert state == "block"
                text += event["delta"]["text"]
            case "content_block_stop":
                assert state == "block"
                state = "open"
            case "message_delta":
                assert state == "open"
                said.finishes[0] = _ENDS[event["delta"]["stop_reason"]]
                state = "told"
            case "message_stop":
                assert state == "told"
                state = "over"
            case _:
                raise AssertionError(f"an event {name}")
    said.texts[0] = text
    assert not complete or state == "over", f"the stream ends in the state {state}"
    return said


def _responses(form: str, found: list[tuple[str, str]], complete: bool) -> Said:
    said = Said()
    text = ""
    over = False
    for number, (name, data) in enumerate(found):
        event = json.loads(data)
        assert not over
        assert event["type"] == name
        assert event["sequence_number"] == number
        assert (number == 0) == (name == "response.created") or name == "error"
        if name == "error":
            assert not text
            said.error, over = event["message"], True
        elif name == "response.in_progress" and "progress" in event:
            assert not text, "it begins after its first token"
            _check_progress(event["progress"])
        elif name == "response.output_text.delta":
            text += event["delta"]
        elif name == "response.output_text.done":
            assert event["text"] == text
        elif name in ("response.completed", "response.incomplete"):
            over = True
            said.finishes[0] = _response_end(event["response"])
        elif name == "response.failed":
            over = True
            said.error = event["response"]["error"]["message"]
    said.texts[0] = text
    assert over or not complete
    return said


def _response_end(response: dict[str, Any]) -> str:
    if response["status"] == "completed":
        return "stop"
    assert response["status"] == "incomplete"
    return "length" if response["incomplete_details"]["reason"] else "abort"


def read_whole(form: str, body: bytes) -> Said:
    """What a whole answer says."""
    found = json.loads(body)
    said = Said()
    match form:
        case "messages":
            said.texts[0] = "".join(block["text"] for block in found["content"])
            said.finishes[0] = _ENDS[found["stop_reason"]]
            usage = found["usage"]
            names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
            said.usage = sum(usage[name] for name in names), usage["output_tokens"]
        case "responses":
            said.texts[0] = "".join(
                part["text"] for item in found["output"] for part in item["content"]
            )
            said.finishes[0] = _response_end(found)
            said.usage = found["usage"]["input_tokens"], found["usage"]["output_tokens"]
        case "generate":
            bodies = found if isinstance(found, list) else [found]
            for index, one in enumerate(bodies):
                said.texts[index] = one["text"]
                said.finishes[index] = one["meta_info"]["finish_reason"]["type"]
            meta = [one["meta_info"] for one in bodies]
            said.usage = meta[0]["prompt_tokens"], sum(one["completion_tokens"] for one in meta)
        case _:
            for choice in found["choices"]:
                text = choice["message"]["content"] if form == "chat" else choice["text"]
                said.texts[choice["index"]] = text
                said.finishes[choice["index"]] = choice["finish_reason"]
            said.usage = found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]
    return said
