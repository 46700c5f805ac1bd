"""What goes wrong for one request while its tokens are made ends that one alone."""

from __future__ import annotations

import asyncio
import json
from array import array

import pytest

from runtime.errors import EngineDead, GenerationFailed, InvalidRequest
from runtime.request import Request, SamplingParams
from server.generation import metrics, output
from server.generation.output import ChoiceRules
from tests.fakes import deltas_of, fake_runner, fake_server, live, make_fake_service
from tests.server.generation.grammars import Scripted

SECRET = "secret detail"


def broken(*arguments, **options):
    raise ZeroDivisionError(SECRET)


def request_of(prompt, grammar=None, tokens=9):
    params = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    return Request(f"r-{prompt[0]}", array("i", prompt), params, 0.0, grammar=grammar)


async def read(stream):
    return [delta async for delta in deltas_of(stream)]


@pytest.mark.parametrize("disable_overlap", [False, True], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("where", ["fill_mask", "accept", "is_terminated"])
async def test_a_grammar_that_raises_ends_its_request(where, disable_overlap):
    async with fake_server(disable_overlap=disable_overlap) as server:
        engine = server.service.engine
        grammar = Scripted(**{where: broken})
        faulty = engine.submit([request_of([1], grammar)], ChoiceRules())
        good = engine.submit([request_of([2])], ChoiceRules())
        constrained = engine.submit([request_of([3], Scripted())], ChoiceRules())
        with pytest.raises(GenerationFailed) as told:
            await read(faulty)
        assert SECRET not in str(told.value)
        for stream in (good, constrained):
            assert sum(len(delta.token_ids) for delta in await read(stream)) == 9
        await server.wait_idle()
        assert grammar.closed
        assert engine.dead is None
        assert engine.scheduler.statistics().counters.finished == {"error": 1, "length": 2}


@pytest.mark.parametrize("when", ["fill_mask", "accept"])
async def test_a_grammar_that_meets_a_limit_ends_its_request_with_the_reason(when):
    def fail(self, *arguments):
        self.failed = InvalidRequest("the grammar has more states than are allowed")

    async with fake_server() as server:
        stream = server.service.engine.submit(
            [request_of([1], Scripted(**{when: fail}))], ChoiceRules()
        )
        with pytest.raises(InvalidRequest, match="more states than are allowed"):
            await read(stream)
        await server.wait_idle()


def breaks_for_x(original):
    """A function that fails for a sequence whose prompt begins with X."""

    def wrapper(self, *arguments):
        found = next(a for a in (self, *arguments) if isinstance(a, output.ChoiceOutput))
        if found.request.input_ids[0] == ord("X") and found.completion_tokens > 2:
            raise ZeroDivisionError(SECRET)
        return original(self, *arguments)

    return wrapper


@pytest.mark.parametrize("disable_overlap", [False, True], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(output.ChoiceOutput, "_take", id="text"),
        pytest.param(output.ChoiceOutput, "close", id="last-text"),
        pytest.param(output.ChoiceOutput, "fill_mask", id="mask"),
        pytest.param(metrics.Metrics, "tokens", id="metrics"),
    ],
)
async def test_code_that_fails_for_one_request_ends_that_one(
    owner, name, disable_overlap, monkeypatch
):
    monkeypatch.setattr(owner, name, breaks_for_x(getattr(owner, name)))
    async with fake_server(disable_overlap=disable_overlap) as server:

        async def ask(prompt):
            body = {"prompt": prompt, "max_tokens": 12, "bad_words": ["~"], "n": 2, "stream": True}
            async with server.client.post(server.url + "/v1/completions", json=body) as answer:
                return await answer.text()

        bad, good = await asyncio.gather(ask("X"), ask("Y"))
        assert good.endswith("data: [DONE]\n\n")
        assert good.count('"finish_reason":"length"') == 2
        last = json.loads(bad.removesuffix("\n\n").rpartition("data: ")[2])
        assert last["error"]["type"] == "server_error"
        assert SECRET not in bad
        await server.wait_idle()
        assert (await server.get("/health"))[0] == 200


async def test_counting_that_fails_at_the_end_takes_nothing_from_anybody(monkeypatch, caplog):
    monkeypatch.setattr(metrics.Metrics, "finished", breaks_for_x(metrics.Metrics.finished))
    async with fake_server() as server:
        for prompt in "XY":
            body = await server.complete(prompt, max_tokens=5)
            assert body["usage"]["completion_tokens"] == 5
        await server.wait_idle()
    assert "could not be counted" in caplog.text


async def test_leaving_and_stopping_get_over_text_that_cannot_be_ended(monkeypatch):
    monkeypatch.setattr(output.ChoiceOutput, "close", broken)
    async with fake_server() as server:
        engine = server.service.engine
        stream = engine.submit([request_of([1], tokens=500)], ChoiceRules())
        await stream.take()
        engine.abort(stream)
        await server.wait_idle()
        with pytest.raises(GenerationFailed):
            await read(stream)


async def test_a_stop_expression_that_others_would_backtrack_over_is_looked_for():
    fields = {"stop_regex": r"(a|a)*(a|aa)*(aa|a)+c", "max_tokens": 60, "ignore_eos": True}
    async with fake_server(runner=fake_runner(lambda request, index: ord("a"))) as server:
        good, (status, body) = await asyncio.gather(
            server.complete("y", max_tokens=60),
            server.post("/v1/completions", {"prompt": "x", **fields}),
        )
        assert (status, body["choices"][0]["text"]) == (200, "a" * 60)
        assert good["choices"][0]["text"] == "a" * 60
        await server.wait_idle()


async def test_nothing_is_taken_after_the_stop():
    engine = make_fake_service().engine
    engine.start()
    await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(EngineDead, match="stopping"):
        engine.submit([request_of([1])], ChoiceRules())
    assert not engine.scheduler.has_unfinished


async def test_a_request_that_cannot_be_followed_is_not_queued(monkeypatch):
    service = make_fake_service()
    monkeypatch.setattr(service.tokenizer, "detokenizer", broken)
    with pytest.raises(ZeroDivisionError):
        service.engine.submit([request_of([1])], ChoiceRules())
    assert not service.engine.scheduler.has_unfinished
    assert live(service) == 0
    service.tokenizer.close()
    service.model_format.close()


async def test_bad_words_are_bounded_together():
    async with fake_server() as server:
        words = ["w" * 4096, "v" * 4096, "x"]
        status, body = await server.post("/v1/completions", {"prompt": "a", "bad_words": words})
        assert (status, body["error"]["param"]) == (400, "bad_words")
        assert "has 8193 characters in all; at most 8192" in body["error"]["message"]
