"""Bodies and events of the two OpenAI endpoints, from the deltas of a generation. No HTTP here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from server.api.logprobs import CompletionLogprobs, chat_logprobs, merge_completion_logprobs
from server.formats.answer_parser import PlainContent
from server.http.sse import DONE, event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runtime.request import Finish, TokenLogprobs
    from server.formats.answer_parser import MessageParser
    from server.generation.generator import Generation, Usage
    from server.generation.streams import Delta
    from server.http.errors import ErrorAnswer
    from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Head:
    """What every body and event of one answer has in common."""

    id: str
    object: str
    created: int
    model: str

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **usage.waited(),
    }


def _closing(head: Head, generation: Generation) -> bytes:
    if not generation.params.include_usage:
        return DONE
    return event(head.body([], usage=usage_body(generation.usage()))) + DONE


def finish_name(finish: Finish | None, called_tools: bool = False) -> str | None:
    if finish is None:
        return None
    return "tool_calls" if called_tools and finish.reason.value == "stop" else finish.reason.value


class ChatChoice:
    """One choice of a chat, delta by delta."""

    def __init__(self, index: int, parser: MessageParser, tokenizer: Tokenizer) -> None:
        self.index = index
        self._parser = parser
        self._tokenizer = tokenizer
        self._opened = False
        self._logprobs: list[TokenLogprobs] = []  # of tokens that no event has carried yet

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        """The `choices` entries that a delta makes; the first opens with the role."""
        parts = self._parser.feed(delta.text)
        if delta.finish is not None:
            parts += self._parser.finish()
        self._logprobs += delta.logprobs
        found = []
        if not self._opened:
            self._opened = True
            found.append(self._entry({"role": "assistant", "content": ""}))
        found += [self._entry(part) for part in parts]
        if delta.finish is not None:
            if not parts:
                found.append(self._entry({}))
            found[-1]["finish_reason"] = finish_name(delta.finish, self._parser.called_tools)
            found[-1]["stop_reason"] = delta.finish.matched
        if parts or delta.finish is not None:
            self._attach_logprobs(found[-1])
        return found

    def _entry(self, part: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": part, "logprobs": None, "finish_reason": None}

    def _attach_logprobs(self, entry: dict[str, Any]) -> None:
        if self._logprobs:
            entry["logprobs"] = chat_logprobs(self._logprobs, self._tokenizer)
            self._logprobs = []


class ChatAnswer:
    """A chat completion, streamed or whole."""

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        generation: Generation,
        tokenizer: Tokenizer,
        new_parser: Callable[[], MessageParser] = PlainContent,
    ) -> None:
        self._generation = generation
        self._whole_head = Head(request_id, "chat.completion", created, model)
        self._head = Head(request_id, "chat.completion.chunk", created, model)
        self._choices = [
            ChatChoice(index, new_parser(), tokenizer) for index in range(generation.params.n)
        ]
        self._plain = new_parser is PlainContent and generation.params.sampling.logprobs is None
        start = orjson.dumps(self._head.body([]))[:-2]  # up to the list of choices, left open
        self._fast = [
            (
                b"data: " + start + b'{"index":%d,"delta":{"content":' % index,
                b'},"logprobs":null,"finish_reason":null}]}\n\n',
            )
            for index in range(generation.params.n)
        ]
        self._opened: set[int] = set()

    def events(self, delta: Delta) -> bytes:
        """The bytes of the events that a delta makes."""
        # Nearly every event of a stream is a piece of content: only its text is encoded anew.
        if self._plain and delta.finish is None and delta.index in self._opened:
            before, after = self._fast[delta.index]
            return before + orjson.dumps(delta.text) + after
        self._opened.add(delta.index)
        entries = self._choices[delta.index].events(delta)
        return b"".join(event(self._head.body([entry])) for entry in entries)

    def closing(self) -> bytes:
        """The events that end the stream."""
        return _closing(self._head, self._generation)

    def failure(self, error: ErrorAnswer) -> bytes:
        """The event that ends a stream which cannot go on."""
        return event(error.body)

    async def whole(self) -> dict[str, Any]:
        """The body, once every choice has ended."""
        parts: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        async for delta in self._generation:
            parts[delta.index] += self._choices[delta.index].events(delta)
        choices = [_whole_chat_choice(index, entries) for index, entries in enumerate(parts)]
        return self._whole_head.body(choices, usage=usage_body(self._generation.usage()))


def _whole_chat_choice(index: int, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    last = entries[-1]
    tokens = [
        token for entry in entries if entry["logprobs"] for token in entry["logprobs"]["content"]
    ]
    return {
        "index": index,
        "message": join_message([entry["delta"] for entry in entries]),
        "logprobs": {"content": tokens, "refusal": None} if tokens else None,
        "finish_reason": last["finish_reason"],
        "stop_reason": last["stop_reason"],
    }


def join_message(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole message that a stream of deltas amounts to."""
    content = "".join(delta.get("content") or "" for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for piece in delta.get("tool_calls", ()):
            call = calls.setdefault(
                piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}}
            )
            if "id" in piece:
                call["id"] = piece["id"]
            for key, text in piece.get("function", {}).items():
                call["function"][key] += text or ""
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


class CompletionChoice:
    """One choice of a completion, delta by delta."""

    def __init__(
        self,
        index: int,
        prompt_ids: Sequence[int],
        prompt_text: str,
        generation: Generation,
        tokenizer: Tokenizer,
    ) -> None:
        params = generation.params
        self.index = index
        self.mean_logprob = 0.0
        self._prompt_ids = prompt_ids
        self._echoed = prompt_text if params.echo else None
        self._top = params.sampling.logprobs
        self._logprobs: CompletionLogprobs | None = None
        self._sum, self._count = 0.0, 0
        if self._top is not None:
            detokenizer = tokenizer.detokenizer(
                () if params.echo else prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
            )
            self._logprobs = CompletionLogprobs(tokenizer, detokenizer)

    def entry(self, delta: Delta) -> dict[str, Any]:
        """The `choices` entry of a delta. The first one of an echo begins with the prompt."""
        text, parts = delta.text, []
        if self._logprobs is not None:
            top = self._top or 0
            if delta.prompt_logprobs is not None:
                parts.append(self._logprobs.add(self._prompt_ids, delta.prompt_logprobs, top=top))
            parts.append(self._logprobs.add(delta.token_ids, delta.logprobs, top=top))
            self._sum += sum(entry.logprob for entry in delta.logprobs)
            self._count += len(delta.logprobs)
            self.mean_logprob = self._sum / max(1, self._count)
        if self._echoed is not None:
            text, self._echoed = self._echoed + text, None
        return {
            "index": self.index,
            "text": text,
            "logprobs": merge_completion_logprobs(parts) if parts else None,
            "finish_reason": finish_name(delta.finish),
            "stop_reason": None if delta.finish is None else delta.finish.matched,
        }


class CompletionAnswer:
    """A text completion, streamed or whole.

    Args: prompt_texts: of each prompt, for echo.
    """

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        generation: Generation,
        tokenizer: Tokenizer,
        prompt_texts: Sequence[str],
    ) -> None:
        self._generation = generation
        self._head = Head(request_id, "text_completion", created, model)
        width = generation.params.best_of
        self._choices = [
            CompletionChoice(
                index,
                generation.prompts[index // width],
                prompt_texts[index // width],
                generation,
                tokenizer,
            )
            for index in range(width * len(generation.prompts))
        ]
        self._plain = generation.params.sampling.logprobs is None and not generation.params.echo
        start = orjson.dumps(self._head.body([]))[:-2]
        self._fast = (
            b"data: " + start + b'{"index":',
            b',"text":',
            b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n',
        )

    def events(self, delta: Delta) -> bytes:
        """The bytes of a delta's event."""
        if self._plain and delta.finish is None:
            before, middle, after = self._fast
            return before + b"%d" % delta.index + middle + orjson.dumps(delta.text) + after
        return event(self._head.body([self._choices[delta.index].entry(delta)]))

    def closing(self) -> bytes:
        """The events that end the stream."""
        return _closing(self._head, self._generation)

    def failure(self, error: ErrorAnswer) -> bytes:
        """The event that ends a stream which cannot go on."""
        return event(error.body)

    async def whole(self) -> dict[str, Any]:
        """The body, once every choice has ended: of each prompt, the n likeliest choices."""
        entries: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        async for delta in self._generation:
            entries[delta.index].append(self._choices[delta.index].entry(delta))
        params = self._generation.params
        chosen: list[dict[str, Any]] = []
        for first in range(0, len(self._choices), params.best_of):
            group = list(range(first, first + params.best_of))
            if params.best_of > params.n:
                group.sort(key=lambda index: -self._choices[index].mean_logprob)
            for index in group[: params.n]:
                chosen.append(_whole_completion_choice(len(chosen), entries[index]))
        if params.best_of > params.n and params.hide_logprobs:
            for choice in chosen:
                choice["logprobs"] = None
        return self._head.body(chosen, usage=usage_body(self._generation.usage()))


def _whole_completion_choice(index: int, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    logprobs = [entry["logprobs"] for entry in entries if entry["logprobs"] is not None]
    return {
        "index": index,
        "text": "".join(entry["text"] for entry in entries),
        "logprobs": merge_completion_logprobs(logprobs) if logprobs else None,
        "finish_reason": entries[-1]["finish_reason"],
        "stop_reason": entries[-1]["stop_reason"],
    }
