"""A step that fails: only who is guilty ends, and nobody else's tokens change."""

from __future__ import annotations

import asyncio
import random
from array import array

import pytest

from runtime.errors import EngineDead, GenerationFailed
from runtime.request import FinishReason, Request, SamplingParams
from server.generation.bad_words import BadWords
from server.generation.output import ChoiceRules
from tests.fakes import deltas_of, fake_server, make_fake_service
from tests.server.generation.faulty_runner import PARTS, FaultyRunner
from tests.server.generation.grammars import Scripted
from tests.values import present

GUILTY = 100  # the first token of its prompt
LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
MIXING = pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "strict"])


class EveryThird(Scripted):
    """The token after k tokens is one of every third id; a token taken twice or not at all shows."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def fill_mask(self, bits) -> None:
        allowed = [t for t in range(258) if t % 3 == self.taken % 3]
        bits[:] = 0
        for token in allowed:
            bits.view("uint32")[token // 32] |= 1 << (token % 32)

    def accept(self, token_id) -> None:
        assert token_id % 3 == self.taken % 3
        self.taken += 1


def requests():
    """Short prompts, one in chunks, one under a grammar, and whose first token is GUILTY."""
    prompts = {
        "short": [1, 2, 3],
        "other": [9] * 30,
        "chunks": [5] * 200,
        "grammar": [7, 7],
        "guilty": [GUILTY] * 150,
        "more": [8] * 40,
    }
    return [
        Request(
            name,
            array("i", ids),
            SamplingParams(max_new_tokens=14, seed=seed),
            0.0,
            grammar=EveryThird() if name == "grammar" else None,
        )
        for seed, (name, ids) in enumerate(prompts.items())
    ]


async def read(stream):
    ids = []
    async for delta in deltas_of(stream):
        ids += delta.token_ids
        if delta.finish is not None and delta.finish.reason is FinishReason.ERROR:
            raise GenerationFailed(present(delta.finish.message))
    return ids


async def generate(fails, *, overlap=True, mixed=True):
    """What every request got, tokens or an error, and the engine's records and runner."""
    runner = FaultyRunner(fails)
    options = {"disable_mixed_chunk": not mixed, "chunked_prefill_size": 64}
    service = make_fake_service(runner, scheduler=options, disable_overlap=not overlap)
    async with fake_server(service) as server:
        engine = service.engine
        rules = ChoiceRules(bad_words=BadWords([(3,), (5, 6)]))
        asked = requests()
        streams = [engine.submit([request], rules) for request in asked]
        found = await asyncio.gather(*map(read, streams), return_exceptions=True)
        await server.wait_idle()
        assert engine.dead is None
        names = [request.request_id for request in asked]
        return dict(zip(names, found, strict=True)), list(engine.records), runner


@pytest.fixture(scope="module")
def undisturbed():
    return asyncio.run(generate(lambda batch, part: False))[0]


def guilty_at(part, moment):
    """A step fails in a part, whenever the guilty row is in it at a moment of its life."""

    def fails(batch, at):
        for row, request in enumerate(batch.requests):
            if request.input_ids[0] != GUILTY or at != part:
                continue
            sampled = row in batch.sampled
            if moment == "middle-chunk":
                # The last but one: two pieces in flight would fail together, and count as one.
                end = batch.prefix_lens[row] + batch.extend_lens[row]
                return row < batch.num_prefill and 0 < len(request.input_ids) - end <= 50
            if sampled and moment == "first-token":
                return row < batch.num_prefill
            if sampled and moment == "later-token":
                return batch.output_counts[list(batch.sampled).index(row)] == 5
        return False

    return fails


@LOOPS
@MIXING
@pytest.mark.parametrize("moment", ["middle-chunk", "first-token", "later-token"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.sampled(12)
async def test_only_the_guilty_row_ends(undisturbed, part, moment, mixed, overlap):
    found, records, runner = await generate(guilty_at(part, moment), overlap=overlap, mixed=mixed)
    error = found.pop("guilty")
    assert isinstance(error, GenerationFailed), error
    assert "secret" not in str(error)
    assert found == {name: ids for name, ids in undisturbed.items() if name != "guilty"}
    assert runner.failures >= 1
    assert sum(record.failed is not None for record in records) == runner.failures
    assert any(record.retry for record in records) is (runner.failures > 1)


@LOOPS
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sampled(3)
async def test_steps_that_fail_by_chance_change_nobody_s_tokens(undisturbed, seed, overlap):
    draw = random.Random(seed)
    failing = set()

    def fails(batch, part):
        # A step of one row is not tried again, and a part that is tried again does not fail twice.
        chosen = len(batch.requests) > 1 and not batch.retry and draw.random() < 0.06
        failing.add(part) if chosen else None
        return chosen

    found, records, runner = await generate(fails, overlap=overlap, mixed=seed % 2 == 0)
    assert found == undisturbed
    assert runner.failures > 0
    assert failing
    assert any(record.retry for record in records)


async def test_all_rows_may_be_guilty():
    found, _, runner = await generate(lambda batch, part: part == "forward")
    assert all(isinstance(error, GenerationFailed) for error in found.values())
    assert len(found) == 6
    assert runner.failures >= 6


@LOOPS
async def test_a_device_that_is_gone_ends_the_engine_and_is_said(overlap):
    class Gone(FaultyRunner):
        probes = 0

        def probe(self):
            self.probes += 1
            raise RuntimeError("secret: an illegal memory access was encountered")

    runner = Gone(guilty_at("result", "later-token"))
    async with fake_server(make_fake_service(runner, disable_overlap=not overlap)) as server:
        engine = server.service.engine
        streams = [engine.submit([request], ChoiceRules()) for request in requests()]
        found = await asyncio.gather(*map(read, streams), return_exceptions=True)
        assert all(isinstance(error, EngineDead) for error in found), found
        assert runner.probes == 1, "there is no retry"
        status, body = await server.get("/health")
        assert status == 503
        assert body["error"]["message"] == (
            "the engine has stopped: the device is gone (RuntimeError)"
        )
        status, body = await server.post("/v1/completions", {"prompt": "x"})
        assert (status, body["error"]["code"]) == (503, "engine_dead")


async def test_who_leaves_while_a_step_is_taken_back_is_gone(undisturbed):
    """The probe waits in a thread; meanwhile the loop serves."""
    service = make_fake_service(runner := FaultyRunner(guilty_at("sample", "later-token")))
    async with fake_server(service) as server:
        engine = service.engine
        streams = {r.request_id: engine.submit([r], ChoiceRules()) for r in requests()}
        loop = asyncio.get_running_loop()

        def probe() -> None:
            loop.call_soon_threadsafe(engine.abort, streams["other"])

        runner.probe = probe
        found = await asyncio.gather(*map(read, streams.values()), return_exceptions=True)
        await server.wait_idle()
    by_name = dict(zip(streams, found, strict=True))
    assert isinstance(by_name.pop("guilty"), GenerationFailed)
    assert len(by_name.pop("other")) < 14
    assert all(len(ids) == 14 for ids in by_name.values())
