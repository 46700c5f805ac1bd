"""/v1/chat/completions: the model's next message in a conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from runtime.errors import InvalidRequest
from server.api.answers import OpenAIAnswer, finish_name
from server.api.chat_messages import MESSAGES, TOOL_CHOICE, TOOLS
from server.api.chat_plan import EFFORTS, Conversation, LastMessageFields, answer_chat
from server.api.fields.bodies import ignored, refused, required, served
from server.api.fields.caching import PromptCacheFields
from server.api.fields.generation import OpenAIFields
from server.api.fields.kinds import MAX_LOGPROBS, Boolean, Choice, Integer
from server.api.incoming import read_body
from server.api.logprobs import JsonList, chat_logprobs
from server.formats.events import CallArguments, CallStart, Reasoning, Text
from server.http.sse import event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from runtime.request import Finish, TokenLogprobs
    from server.formats.events import Event
    from server.formats.model_format import AnswerParser
    from server.generation.generator import Generation
    from server.generation.output import Delta
    from server.generation.params import ApiLimits, GenerationParams
    from server.service import Service


class ChatBody(LastMessageFields, PromptCacheFields, OpenAIFields):
    """The body of /v1/chat/completions."""

    messages = required(MESSAGES, "the conversation so far")
    max_completion_tokens = served(
        Integer(1),
        "tokens of the answer at most; else the model's default, or what the context leaves",
        names=("max_completion_tokens", "max_tokens", "n_predict"),
    )
    logprobs = served(Boolean(), "tokens have their log-probabilities", default=False)
    top_logprobs = served(
        Integer(0, MAX_LOGPROBS), "also those of so many likeliest tokens; needs logprobs"
    )
    tools = served(TOOLS, "functions that the model may call")
    tool_choice = served(TOOL_CHOICE, "whether and which tools are called; default auto")
    parallel_tool_calls = served(Boolean(), "an answer may call several tools", default=True)
    reasoning_effort = served(
        Choice(*EFFORTS),
        "a variable of the chat template, where it has it; none also sets enable_thinking to false",
    )
    unserved = (
        *refused("use tools and tool_choice", "function_call", "functions"),
        *refused("the model reads and writes text alone", "audio", modalities=["text"]),
        *refused("there is no search", "web_search_options"),
        *refused("nothing is moderated", "moderation"),
        *refused("ask for it in a message", verbosity="medium"),
        *refused("use continue_final_message, and join the texts", "echo"),
        *ignored("it would only be faster", "prediction", "service_tier"),
        *ignored("nothing is stored", "metadata", "store"),
        *ignored("names nobody to this server", "safety_identifier"),
    )

    def check(self, where: str, limits: ApiLimits) -> None:
        super().check(where, limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")

    def conversation(self) -> Conversation:
        """The conversation that is to be gone on with."""
        return Conversation(
            messages=self.messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            caching=self.caching(),
            render=self.render(self.messages, self.reasoning_effort),
        )

    def generation(self, limits: ApiLimits) -> GenerationParams:
        """What it asks of the generation core."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params = self.params(limits, self.max_completion_tokens, logprobs=logprobs)
        return replace(
            params,
            n=self.n,
            best_of=self.n,
            include_usage=self.include_usage,
            include_timings=self.include_timings,
            include_progress=self.include_progress,
        )


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    body = await read_body(request, ChatBody)
    return await answer_chat(request, body, ChatAnswer, prefix="chatcmpl")


_AFTER = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class _Choice:
    """One choice of a chat.

    Attributes:
        opened: its first event has gone out.
        said: its events so far, of a whole answer.
        logprobs: of tokens that no event has carried yet.
        scores: of a whole answer, written out.
        before: bytes of an event up to its delta, left open behind {"content": or the like.
    """

    __slots__ = ("before", "finish", "index", "logprobs", "opened", "parser", "said", "scores")

    def __init__(self, index: int, parser: AnswerParser, start: bytes) -> None:
        self.index = index
        self.parser = parser
        self.opened = False
        self.said: list[Event] = []
        self.logprobs: list[TokenLogprobs] = []
        self.scores = JsonList()
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


class ChatAnswer(OpenAIAnswer):
    """A chat completion, streamed or whole."""

    object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __init__(
        self, generation: Generation, service: Service, new_parser: Callable[[], AnswerParser]
    ) -> None:
        super().__init__(generation, service)
        self._tokenizer = service.tokenizer
        self._scored = generation.params.sampling.logprobs is not None
        # Up to the list of choices, left open.
        start = orjson.dumps(self.of_choices([], self.event_object))[:-2]
        self._choices = [
            _Choice(index, new_parser(), start) for index in range(generation.params.n)
        ]

    def events(self, delta: Delta) -> bytes:
        """As every answer's; a choice's first event opens with the role."""
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
            content = chat_logprobs(choice.logprobs, self._tokenizer)
            more["logprobs"] = {"content": content, "refusal": None}
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
        return event(self.of_choices([entry | more], self.event_object))

    def add(self, delta: Delta) -> None:
        choice = self._choices[delta.index]
        choice.said += choice.read(delta)
        choice.scores.extend(chat_logprobs(choice.logprobs, self._tokenizer))
        choice.logprobs = []

    def body(self) -> dict[str, Any]:
        choices = [self._whole_choice(choice) for choice in self._choices]
        return self.of_choices(choices, self.object, **self.figures(usage=True))

    def _whole_choice(self, choice: _Choice) -> dict[str, Any]:
        content = choice.scores.json() if self._scored else None
        return {
            "index": choice.index,
            "message": message_of(choice.said),
            "logprobs": None if content is None else {"content": content, "refusal": None},
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
    arguments: list[list[str]] = []
    for one in events:
        match one:
            case Text(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(_, call_id, name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name}})
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    for call, texts in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = calls
    return message


ROUTES = [web.post("/v1/chat/completions", chat_completions)]
