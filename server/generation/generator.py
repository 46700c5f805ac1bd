"""The generation core that every endpoint is a thin form of.

    generation = await generator.start(prompts, params, request_id)
    async for news in generation: ...       # deltas: choice index, text, tokens, logprobs, finish
    generation.usage()

Knows no HTTP and no JSON. A generation that is left early must be aborted; use it as a context.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runtime.errors import GenerationFailed, InvalidRequest, QueueFull
from runtime.request import FinishReason, Request
from server.generation.bad_words import BadWords
from server.generation.output import MOST_TOKENS, ChoiceRules
from server.generation.timeline import Laps, timings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from types import TracebackType

    from runtime.errors import LoomserveError
    from runtime.request import Finish, SamplingParams
    from server.generation.engine import Engine
    from server.generation.output import Delta, RequestStream
    from server.generation.params import ApiLimits, GenerationParams
    from server.generation.timeline import Timeline, Timings
    from server.text.tokenizer import Tokenizer

# Choices of one seeded request get seeds this far apart (2**64 / golden ratio, made odd).
SEED_STEP = 0x9E3779B97F4A7C15
SEED_MASK = 2**63 - 1
# Tokenizing takes up to 1 us a character, twice, on the event loop.
MAX_BAD_CHARACTERS = 8192


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. The prompt of several choices counts once.

    Args:
        cached_tokens: prompt tokens whose KV was found in the prefix cache.
        written_tokens: prompt tokens that were computed and are kept there because the request
            asked for it, by the seconds for which they are.
        wait_seconds: what the choices waited for and how long, summed; None: not asked for.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    written_tokens: Mapping[float, int]
    wait_seconds: dict[str, float] | None = None

    @property
    def kept_tokens(self) -> int:
        """All that were written."""
        return sum(self.written_tokens.values())

    def waited(self) -> dict[str, dict[str, float]]:
        """What a protocol's usage says of waiting, where that was asked for."""
        return {} if self.wait_seconds is None else {"wait_seconds": self.wait_seconds}


class Generation:
    """One request being generated: `prompts` times `best_of` choices.

    Choice `c` of prompt `p` has the index p * params.best_of + c.

    Args: request_id, client_id: as `Generator.start` has them; /abort_request knows it by both.
    Attributes:
        reads: how often there was news.
        writes: of its answer, where they are timed (see `Delivery.timed`).
    """

    def __init__(
        self,
        generator: Generator,
        stream: RequestStream,
        prompts: Sequence[Sequence[int]],
        params: GenerationParams,
        request_id: str,
        client_id: str | None,
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.request_id = request_id
        self.names = frozenset((request_id, client_id) if client_id else (request_id,))
        self._generator = generator
        self._stream = stream
        self._completion_tokens = 0
        self.reads = 0
        self.writes = Laps()

    @property
    def requests(self) -> Sequence[Request]:
        """The engine's requests, by choice index."""
        return self._stream.requests

    @property
    def unread_tokens(self) -> int:
        """Tokens that are there, and that its client has not made room for."""
        return self._stream.unread_tokens

    @property
    def timelines(self) -> Sequence[Timeline]:
        """What is noted of each choice's time, parallel to `requests`."""
        return self._stream.timelines

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        """Deltas of all choices as they come, those together that are there at once, until every
        choice has ended.

        Raises: GenerationFailed: a choice could not be completed. InvalidRequest: it turned out
            that one cannot be. QueueFull: one had to make room for a request of higher priority.
            EngineDead.
        """
        hide = self.params.hide_output
        tokens = 0
        while news := await self._stream.take():
            together: list[Delta] = []
            for delta in news:
                failure = None if delta.finish is None else _failure(delta.finish)
                if failure is not None:
                    if together:
                        yield together
                    raise failure
                if hide:
                    delta.text = ""
                    delta.token_ids.clear()
                    delta.logprobs.clear()
                together.append(delta)
                self._completion_tokens += len(delta.token_ids)
                tokens += len(delta.token_ids) + len(delta.prompt_logprobs or ())
                if tokens >= MOST_TOKENS:
                    yield together
                    together, tokens = [], 0
                    await asyncio.sleep(0)  # it may have been written out at length
            if together:
                yield together
            self.reads += 1

    @property
    def ready(self) -> bool:
        """No choice waits for its grammar to be compiled, which may turn out to be impossible."""
        grammars = (request.grammar for request in self._stream.requests)
        return all(grammar is None or grammar.ready for grammar in grammars)

    def usage(self) -> Usage:
        """Tokens so far; complete once the iteration has ended."""
        return Usage(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens(),
            written_tokens=self._written_tokens(),
            wait_seconds=self._wait_seconds() if self.params.include_wait_times else None,
        )

    def timings(self, choice: int | None = None) -> Timings:
        """Where the time of all choices has gone, or of one; complete once it has ended."""
        now = self._generator.engine.clock()
        if choice is None:
            return timings(self.timelines, self._cached_tokens(), now)
        return timings([self.timelines[choice]], self.requests[choice].cached_tokens, now)

    def _cached_tokens(self) -> int:
        first_choices = self._stream.requests[:: self.params.best_of]
        return sum(request.cached_tokens for request in first_choices)

    def _written_tokens(self) -> dict[float, int]:
        found: dict[float, int] = {}
        for request in self._stream.requests[:: self.params.best_of] if self.params.pins else ():
            done = request.cached_tokens
            for pin in request.pins:
                end = min(pin.tokens, request.pinned_tokens)
                if end > done:
                    found[pin.ttl_s] = found.get(pin.ttl_s, 0) + end - done
                    done = end
        return found

    def _wait_seconds(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for request in self._stream.requests:
            for term, seconds in self._generator.engine.scheduler.waited_seconds(request).items():
                total[term] = total.get(term, 0.0) + seconds
        return total

    def abort(self, message: str | None = None) -> None:
        """Ends the choices that are still running. Does nothing once all have ended."""
        self._generator.engine.abort(self._stream, message)

    def __enter__(self) -> Generation:
        self._generator.live[self] = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._generator.live.pop(self, None)
        if self.params.goes_on and self.reads:
            cached, prompt = self._cached_tokens(), sum(map(len, self.prompts))
            self._generator.engine.metrics.turn(cached / prompt)
        self.abort("the client has gone away")


class Generator:
    """Starts generations.

    Args:
        seed: of the generator that draws the seeds of requests that give none.
        request_timeout_s: for requests that give no time-out; 0: none.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        limits: ApiLimits,
        *,
        seed: int = 0,
        request_timeout_s: float = 0.0,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = limits
        self.live: dict[Generation, None] = {}  # in the order in which they came
        self._random = random.Random(seed)
        self._request_timeout_s = request_timeout_s

    def start(
        self,
        prompts: Sequence[list[int]],
        params: GenerationParams,
        request_id: str,
        client_id: str | None = None,
        *,
        received_s: float | None = None,
    ) -> Generation:
        """Queues a request.

        Args:
            prompts: token ids, each in the vocabulary.
            request_id: the server's own, unique; also the name to abort it by.
            client_id: a name that the client gave; need not be unique, rules nothing.
            received_s: when its request was read, on the engine's clock; None: now.

        Raises: InvalidRequest, ContextTooLong, QueueFull, EngineDead; then nothing is queued.
        """
        for ids in prompts:
            if not ids:
                raise InvalidRequest("prompt: is empty; it must have at least one token")
        rules = ChoiceRules(
            stops=params.stops,
            include_stop=params.include_stop,
            bad_words=self._bad_words(params.bad_words) if params.bad_words else None,
            skip_special_tokens=params.skip_special_tokens,
        )
        requests = self._requests(prompts, params, request_id)
        stream = self.engine.submit(requests, rules, received_s)
        return Generation(self, stream, prompts, params, request_id, client_id)

    def _requests(
        self, prompts: Sequence[list[int]], params: GenerationParams, request_id: str
    ) -> list[Request]:
        """The engine's requests, by choice index."""
        now = self.engine.clock()
        timeout = params.timeout_s or self._request_timeout_s
        stops = params.sampling.stop_token_ids | self._special_stops(params)
        sampling = replace(params.sampling, stop_token_ids=stops)
        requests: list[Request] = []
        for prompt in prompts:
            ids = array("i", prompt)
            most = self._most_tokens(params, len(prompt))
            long_prompts, namespace = self.engine.runner.info.long_prompts, params.cache_salt
            if long_prompts is not None:
                namespace = long_prompts.namespace(namespace, len(prompt))
            requests += [
                Request(
                    request_id=f"{request_id}-{len(requests) + choice}",
                    input_ids=ids,
                    sampling=replace(
                        sampling, max_new_tokens=most, seed=self._seed(sampling, choice)
                    ),
                    arrival_s=now,
                    priority=params.priority,
                    namespace=namespace,
                    deadline_s=now + timeout if timeout else None,
                    grammar=params.new_matcher() if params.new_matcher is not None else None,
                    pins=params.pins,
                )
                for choice in range(params.best_of)
            ]
        return requests

    @property
    def unread_tokens(self) -> list[int]:
        """For each live generation, the tokens that its client has not made room for."""
        return [generation.unread_tokens for generation in self.live]

    def abort(self, name: str | None) -> int:
        """Ends the generations of that name, or all (None); how many there were."""
        found = [one for one in self.live if name is None or name in one.names]
        for generation in found:
            generation.abort("aborted by request")
        return len(found)

    def _most_tokens(self, params: GenerationParams, inputs: int) -> int | None:
        """Tokens that an answer may have. A default gives way to what fits; a wish does not."""
        given, default = params.sampling.max_new_tokens, params.default_tokens
        if given is not None or default is None:
            return given
        return max(1, min(default, self.engine.scheduler.room_for_output(inputs)))

    def _seed(self, sampling: SamplingParams, choice: int) -> int:
        if sampling.seed is None:
            return self._random.getrandbits(63)
        return (sampling.seed + choice * SEED_STEP) & SEED_MASK

    def _special_stops(self, params: GenerationParams) -> set[int]:
        """Ids of stop strings that are one special token: hidden in the text, they stop by id."""
        strings = () if params.stops is None else params.stops.strings
        found = (self.tokenizer.special_id(stop) for stop in strings)
        return {i for i in found if i is not None}

    def _bad_words(self, words: Sequence[str]) -> BadWords | None:
        """Each word as it is tokenized at the start of a text and after a blank."""
        total = sum(map(len, words))
        if total > MAX_BAD_CHARACTERS:
            raise InvalidRequest(
                f"bad_words: has {total} characters in all; at most {MAX_BAD_CHARACTERS} are"
                " allowed",
                param="bad_words",
            )
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        if not texts:
            return None
        ids = self.tokenizer.encode_all(texts, add_special_tokens=False, param="bad_words")
        found = dict.fromkeys(tuple(one) for one in ids if one)
        return BadWords(found) if found else None


def _failure(finish: Finish) -> LoomserveError | None:
    """The error for a choice that ended in a way that must not look like an answer."""
    if finish.reason not in (FinishReason.ERROR, FinishReason.TIMEOUT):
        return None
    message = finish.message or "the request could not be completed"
    if finish.retry_after_s is not None:
        return QueueFull(message, retry_after_s=finish.retry_after_s)
    return GenerationFailed(message, timed_out=finish.reason is FinishReason.TIMEOUT)
