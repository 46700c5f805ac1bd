"""The stream between engine and handler."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from runtime.errors import EngineDead
from runtime.request import (
    Finish,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from server.generation.output import (
    MOST_TOKENS,
    ChoiceOutput,
    ChoiceRules,
    Delta,
    RequestStream,
)
from server.generation.stop_rules import compile_stops
from tests.fakes import IM_END, byte_tokenizer, deltas_of


def stream_of(choices: int) -> RequestStream:
    requests = [Request(str(i), array("i", [1]), SamplingParams(), 0.0) for i in range(choices)]
    return RequestStream(requests, 0.0)


STOP = Finish(FinishReason.STOP)


async def test_news_that_nobody_takes_merge_per_choice():
    stream = stream_of(2)
    for index, text in ((0, "a"), (1, "x"), (0, "b"), (0, "c")):
        stream.put_nowait(Delta(index, text, [ord(text)], [TokenLogprobs(ord(text), -1.0)]))
    stream.put_nowait(Delta(0, "d", [ord("d")], finish=STOP))
    news = {delta.index: delta for delta in await stream.take()}
    assert (news[0].text, news[0].token_ids, news[0].finish) == ("abcd", list(b"abcd"), STOP)
    assert (news[1].text, news[1].finish) == ("x", None)
    assert [one.token_id for one in news[0].logprobs] == list(b"abc")


async def test_what_a_slow_reader_missed_comes_in_pieces_of_a_bounded_length():
    stream = stream_of(1)
    for number in range(1000):
        stream.put_nowait(Delta(0, f"{number} ", [number]))
    stream.put_nowait(Delta(0, "end", finish=STOP))
    news = await stream.take()
    assert max(len(delta.token_ids) for delta in news) == MOST_TOKENS
    assert [i for delta in news for i in delta.token_ids] == list(range(1000))
    assert "".join(delta.text for delta in news) == " ".join(map(str, range(1000))) + " end"
    assert [delta.finish for delta in news] == [None] * (len(news) - 1) + [STOP]


async def test_a_scored_prompt_comes_in_pieces_before_the_first_token():
    stream = stream_of(1)
    scored = [None, *(TokenLogprobs(i, -1.0 * i) for i in range(1, 1000))]
    stream.put_nowait(Delta(0, "x", [7], prompt_logprobs=scored, finish=STOP))
    news = await stream.take()
    assert max(len(delta.prompt_logprobs or ()) for delta in news) == MOST_TOKENS
    assert [entry for delta in news for entry in delta.prompt_logprobs or ()] == scored
    assert [delta.token_ids for delta in news] == [[]] * (len(news) - 1) + [[7]]


async def test_the_stream_ends_when_every_choice_has():
    stream = stream_of(2)
    stream.put_nowait(Delta(1, "x", finish=STOP))
    reader = asyncio.create_task(_all(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put_nowait(Delta(0, "y", finish=STOP))
    assert await reader == [(1, "x"), (0, "y")]
    assert await stream.take() == []


async def test_a_failure_comes_after_what_is_pending():
    stream = stream_of(1)
    stream.put_nowait(Delta(0, "last words"))
    stream.fail(EngineDead("over"))
    assert [delta.text for delta in await stream.take()] == ["last words"]
    with pytest.raises(EngineDead, match="over"):
        await stream.take()


async def test_a_failure_wakes_a_waiting_reader():
    stream = stream_of(1)
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.fail(EngineDead("over"))
    with pytest.raises(EngineDead):
        await reader


async def test_a_reader_that_is_cancelled_loses_nothing():
    stream = stream_of(1)
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    stream.put_nowait(Delta(0, "still here"))
    assert [delta.text for delta in await stream.take()] == ["still here"]


class Letters:
    """A grammar that is complete after so many tokens."""

    failed = None

    def __init__(self, count: int) -> None:
        self.left = count

    def accept(self, token_id: int) -> None:
        self.left -= 1

    def is_terminated(self) -> bool:
        return self.left == 0


async def told(
    tokens: list[int], finish: Finish | None, grammar: Any = None, min_tokens: int = 0, **rules: Any
) -> tuple[str, Finish | None]:
    """What a choice shows of tokens that come one by one, and how it ends."""
    sampling = SamplingParams(min_tokens=min_tokens)
    request = Request("r", array("i", [1]), sampling, 0.0, grammar=grammar)
    stream = RequestStream([request], 0.0)
    choice = ChoiceOutput(0, stream, ChoiceRules(**rules), byte_tokenizer())
    for token in tokens[:-1]:
        assert choice.advance(RequestOutput(request, [token])) is None
    choice.advance(RequestOutput(request, tokens[-1:], finish=finish))
    (delta,) = await stream.take()
    assert delta.token_ids == tokens
    return delta.text, delta.finish


LENGTH = Finish(FinishReason.LENGTH)


async def test_what_was_held_back_for_a_stop_is_shown_at_the_end():
    assert await told(list(b"ax"), LENGTH, stops=compile_stops(("xyz",))) == ("ax", LENGTH)


async def test_a_stop_counts_from_the_token_that_is_the_last_of_min_tokens():
    stopped = Finish(FinishReason.STOP, matched="c")
    stops = compile_stops(("c",))
    assert await told(list(b"abc"), None, min_tokens=3, stops=stops) == ("ab", stopped)
    assert await told(list(b"abc"), LENGTH, min_tokens=4, stops=stops) == ("abc", LENGTH)


@pytest.mark.parametrize(("include", "text"), [(True, "a<|im_end|>"), (False, "a")])
async def test_the_token_that_ends_an_answer_is_shown_where_that_is_asked_for(include, text):
    tokens = [ord("a"), IM_END]
    shown, _ = await told(tokens, STOP, include_stop=include, skip_special_tokens=False)
    assert shown == text


async def test_a_grammar_that_is_complete_with_the_last_allowed_token_is_not_cut():
    assert (await told(list(b"abc"), LENGTH, Letters(3)))[1] == STOP
    assert (await told(list(b"abc"), LENGTH, Letters(4)))[1] == LENGTH


async def _all(stream: RequestStream) -> list[tuple[int, str]]:
    return [(delta.index, delta.text) async for delta in deltas_of(stream)]
