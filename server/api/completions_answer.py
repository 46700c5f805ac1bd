"""Bodies and events of /v1/completions, from the deltas of a generation. No HTTP here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from server.api.answer_head import Head, finish_name, usage_body
from server.api.logprobs import CompletionLogprobs, merge_completion_logprobs
from server.http.sse import event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.generation.generator import Generation
    from server.generation.streams import Delta
    from server.http.errors import ErrorAnswer
    from server.text.tokenizer import Tokenizer


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
        return self._head.closing(self._generation)

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
