"""Bodies and events of /v1/chat/completions, from the deltas of a generation. No HTTP here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from server.api.answer_head import Head, finish_name, usage_body
from server.api.logprobs import chat_logprobs
from server.formats.answer_parser import AnswerParser
from server.formats.events import CallArguments, CallStart, Reasoning, Text
from server.http.sse import event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from runtime.request import Finish, TokenLogprobs
    from server.formats.events import Event
    from server.generation.generator import Generation
    from server.generation.streams import Delta
    from server.http.errors import ErrorAnswer
    from server.text.tokenizer import Tokenizer

_AFTER = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class _Choice:
    """One choice of a chat.

    Attributes:
        opened: its first event has gone out.
        said: its events so far, of a whole answer.
        logprobs: of tokens that no event has carried yet.
        before: bytes of an event up to its delta, left open behind {"content": or the like.
    """

    __slots__ = ("before", "finish", "index", "logprobs", "opened", "parser", "said")

    def __init__(self, index: int, parser: AnswerParser, start: bytes) -> None:
        self.index = index
        self.parser = parser
        self.opened = False
        self.said: list[Event] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish: Finish | None = None
        opening = b"data: " + start + b'{"index":%d,"delta":{' % index
        self.before = {
            Text: opening + b'"content":',
            Reasoning: opening + b'"reasoning_content":',
        }

    def read(self, delta: Delta) -> list[Event]:
        """The events that a delta completes."""
        self.logprobs += delta.logprobs
        self.finish = delta.finish
        return self.parser.read(delta.text, ended=delta.finish is not None)

    def ending(self) -> dict[str, Any]:
        """Why it has ended."""
        return {
            "finish_reason": finish_name(self.finish, self.parser.called_tools),
            "stop_reason": None if self.finish is None else self.finish.matched,
        }


class ChatAnswer:
    """A chat completion, streamed or whole."""

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        generation: Generation,
        tokenizer: Tokenizer,
        new_parser: Callable[[], AnswerParser] = AnswerParser,
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._scored = generation.params.sampling.logprobs is not None
        self._whole_head = Head(request_id, "chat.completion", created, model)
        self._head = Head(request_id, "chat.completion.chunk", created, model)
        start = orjson.dumps(self._head.body([]))[:-2]  # up to the list of choices, left open
        self._choices = [
            _Choice(index, new_parser(), start) for index in range(generation.params.n)
        ]

    def events(self, delta: Delta) -> bytes:
        """The bytes of the events that a delta makes; a choice's first opens with the role."""
        choice = self._choices[delta.index]
        if not choice.opened or delta.finish is not None or self._scored:
            return self._full_events(choice, delta)
        # Nearly every event of a stream is a piece of text: only that is encoded anew.
        if choice.parser.plain:
            return choice.before[Text] + orjson.dumps(delta.text) + _AFTER
        out = b""
        for part in choice.read(delta):
            if isinstance(part, Text | Reasoning):
                out += choice.before[type(part)] + orjson.dumps(part.text) + _AFTER
            else:
                out += self._event(choice, _delta(part))
        return out

    def _full_events(self, choice: _Choice, delta: Delta) -> bytes:
        deltas = [] if choice.opened else [{"role": "assistant", "content": ""}]
        choice.opened = True
        parts = choice.read(delta)
        deltas += map(_delta, parts)
        if delta.finish is not None and not parts:
            deltas.append({})
        more: dict[str, Any] = {}
        if choice.logprobs and (parts or delta.finish is not None):
            more["logprobs"] = chat_logprobs(choice.logprobs, self._tokenizer)
            choice.logprobs = []
        if delta.finish is not None:
            more |= choice.ending()
        last = len(deltas) - 1
        return b"".join(
            self._event(choice, one, **(more if number == last else {}))
            for number, one in enumerate(deltas)
        )

    def _event(self, choice: _Choice, delta: dict[str, Any], **more: Any) -> bytes:
        entry = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return event(self._head.body([entry | more]))

    def closing(self) -> bytes:
        """The events that end the stream."""
        return self._head.closing(self._generation)

    def failure(self, error: ErrorAnswer) -> bytes:
        """The event that ends a stream which cannot go on."""
        return event(error.body)

    async def whole(self) -> dict[str, Any]:
        """The body, once every choice has ended."""
        async for delta in self._generation:
            choice = self._choices[delta.index]
            choice.said += choice.read(delta)
        choices = [self._whole_choice(choice) for choice in self._choices]
        return self._whole_head.body(choices, usage=usage_body(self._generation.usage()))

    def _whole_choice(self, choice: _Choice) -> dict[str, Any]:
        scores = chat_logprobs(choice.logprobs, self._tokenizer) if choice.logprobs else None
        return {
            "index": choice.index,
            "message": message_of(choice.said),
            "logprobs": scores,
            **choice.ending(),
        }


def _delta(part: Event) -> dict[str, Any]:
    """An event as a `delta` of the protocol."""
    match part:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_of(events: Iterable[Event]) -> dict[str, Any]:
    """The whole message that a choice's events amount to."""
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for one in events:
        match one:
            case Text(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(_, call_id, name):
                function = {"name": name, "arguments": ""}
                calls.append({"id": call_id, "type": "function", "function": function})
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = calls
    return message
