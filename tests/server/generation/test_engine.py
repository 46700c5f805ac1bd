"""The step loop on scripted tokens: order, failures, ends, and that the books balance after all."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from runtime.errors import EngineDead
from runtime.request import SamplingParams
from runtime.simulation.sim_runner import SimRunner
from server.generation.output import ChoiceRules
from server.generation.params import GenerationParams
from tests.fakes import VOCAB_SIZE, counts, fake_runner, fake_server, live, says


class Faulty(SimRunner):
    """Fails, in the way given, the first step that holds a prompt which begins with X, or every
    one that does."""

    def __init__(self, how: str, *, always: bool = False) -> None:
        super().__init__(counts, vocab_size=VOCAB_SIZE)
        self.how = how
        self.always = always
        self.failed = False

    def _hit(self, batch, after: int) -> bool:
        marked = [r for r in batch.requests if r.input_ids[0] == ord("X")]
        hit = any(len(r.output_ids) >= after for r in marked) and (self.always or not self.failed)
        self.failed |= hit
        return hit

    def launch(self, batch):
        if self.how == "launch" and self._hit(batch, 2):
            raise RuntimeError("secret detail of the launch")
        return super().launch(batch)

    def run(self, batch, masks):
        if self.how == "result" and self._hit(batch, 2):
            raise RuntimeError("secret detail of the step")
        output = super().run(batch, masks)
        if self.how == "row":
            for i, row in enumerate(batch.sampled):
                request = batch.requests[row]
                if request.input_ids[0] == ord("X") and len(request.output_ids) >= 2:
                    output.failed[i] = "the model gave no usable number"
        return output


async def stream(server, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 12, **fields}
    return [
        json.loads(e) if e != "[DONE]" else e for e in await server.events("/v1/completions", body)
    ]


@pytest.mark.parametrize("how", ["launch", "result"])
async def test_a_failing_step_ends_its_requests_and_no_others(how):
    async with fake_server(runner=Faulty(how)) as server:
        broken = await stream(server, "X")
        assert broken[-1]["error"]["type"] == "server_error"
        assert "secret" not in json.dumps(broken)
        assert not any(c.get("finish_reason") for e in broken for c in e.get("choices", ()))
        await server.wait_idle()
        assert (await stream(server, "Y"))[-1] == "[DONE]"
        assert [r.failed for r in server.service.engine.records if r.failed] == ["RuntimeError"]
        status, _ = await server.get("/health")
        assert status == 200


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
@pytest.mark.parametrize("how", ["launch", "result"])
async def test_a_prompt_that_every_step_fails_for_ends_alone(how, overlap):
    runner = Faulty(how, always=True)
    async with fake_server(runner=runner, disable_overlap=not overlap) as server:
        prompts = ["Ya", "X", "Zbcd", "Wef"]
        broken = await asyncio.gather(*(stream(server, prompt) for prompt in prompts))
        async with fake_server() as healthy:
            whole = [await stream(healthy, prompt) for prompt in prompts]
        for prompt, got, expected in zip(prompts, broken, whole, strict=True):
            if prompt == "X":
                assert got[-1]["error"]["type"] == "server_error"
                assert "secret" not in json.dumps(got)
            else:
                assert got[-1] == "[DONE]"
                assert text_of(got) == text_of(expected)
        await server.wait_idle()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
@pytest.mark.parametrize("how", ["launch", "result"])
async def test_a_step_that_fails_once_ends_nobody_where_there_are_others(how, overlap):
    async with fake_server(runner=Faulty(how), disable_overlap=not overlap) as server:
        answers = await asyncio.gather(*(stream(server, prompt) for prompt in ("Ya", "X", "Z")))
        assert [answer[-1] for answer in answers] == ["[DONE]"] * 3
        await server.wait_idle()


def text_of(events):
    choices = [c for e in events if isinstance(e, dict) for c in e.get("choices", ())]
    return "".join(choice["text"] for choice in choices)


async def test_a_row_that_gives_no_token_ends_alone():
    async with fake_server(runner=Faulty("row")) as server:
        broken, good = await asyncio.gather(stream(server, "X"), stream(server, "Y"))
        assert broken[-1]["error"]["message"] == "the model gave no usable number"
        assert good[-1] == "[DONE]"
        await server.wait_idle()


async def test_a_whole_answer_that_fails_is_a_500_without_details():
    async with fake_server(runner=Faulty("result")) as server:
        status, body = await server.post("/v1/completions", {"prompt": "X", "max_tokens": 9})
        assert status == 500
        assert "secret" not in json.dumps(body)


async def test_a_dead_engine_answers_503_everywhere_at_once():
    async def text_of(prompt):
        body = {"prompt": prompt, "max_tokens": 1500, "stream": True}
        async with server.client.post(server.url + "/v1/completions", json=body) as answer:
            return await answer.text()

    def broken_plan(now):
        raise ZeroDivisionError("secret")

    async with asyncio.timeout(10), fake_server() as server:
        running = [asyncio.create_task(text_of(prompt)) for prompt in "ab"]
        # No event says "both run": whatever has to happen happens between two turns of the loop.
        while live(server.service) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        server.service.engine.scheduler.plan = broken_plan
        for text in await asyncio.gather(*running):
            assert '"code":"engine_dead"' in text
            assert "[DONE]" not in text
            assert "secret" not in text
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = {"prompt": "c", "messages": [{"role": "user", "content": "c"}]}
            status, answer = await server.post(path, body)
            assert (status, answer["error"]["code"]) == (503, "engine_dead")
            assert "secret" not in json.dumps(answer)
        assert (await server.get("/health"))[0] == 503
        assert (await server.get("/health_generate"))[0] == 503
        with pytest.raises(EngineDead):
            server.service.engine.submit([], ChoiceRules())


async def test_who_comes_after_the_end_is_told_so_at_once():
    async with asyncio.timeout(10), fake_server() as server:
        await server.service.engine.stop()
        status, answer = await server.post("/v1/completions", {"prompt": "c"})
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert live(server.service) == 0


@pytest.mark.parametrize("disable_overlap", [False, True], ids=["overlap", "no-overlap"])
async def test_overlap_gives_the_same_tokens_and_launches_ahead(disable_overlap):
    async with fake_server(disable_overlap=disable_overlap) as server:
        asked = [server.complete("p" * size, max_tokens=20) for size in (1, 30, 100, 200)]
        bodies = await asyncio.gather(*asked)
        got = [body["choices"][0]["text"] for body in bodies]
        wanted = []
        for size in (1, 30, 100, 200):
            start = size * ord("p") % 26
            wanted.append("".join(chr(ord("a") + (start + i) % 26) for i in range(20)))
        assert got == wanted
        records = list(server.service.engine.records)
        pairs = itertools.pairwise(records)
        ahead = sum(later.launched_s < earlier.done_s for earlier, later in pairs)
        assert (ahead == 0) is disable_overlap
        assert any(record.kind == "mixed" for record in records)


async def test_a_stop_text_on_the_last_allowed_token_is_a_stop():
    async with fake_server(runner=fake_runner(says("one STOP two"))) as server:
        for limit, reason, text in ((8, "stop", "one "), (7, "length", "one STO")):
            body = await server.complete(max_tokens=limit, stop="STOP")
            choice = body["choices"][0]
            assert (choice["finish_reason"], choice["text"]) == (reason, text)
            assert body["usage"]["completion_tokens"] == limit
            await server.wait_idle()


async def test_stop_text_ends_generation_and_names_the_stop():
    async with fake_server(runner=fake_runner(says("one STOP two"))) as server:
        body = await server.complete(max_tokens=64, stop=["zzz", "STOP"])
        assert body["choices"][0]["text"] == "one "
        assert body["choices"][0]["stop_reason"] == "STOP"
        assert body["usage"]["completion_tokens"] == 8
        body = await server.complete(max_tokens=64, stop=["STOP"], include_stop_str_in_output=True)
        assert body["choices"][0]["text"] == "one STOP"
        await server.wait_idle()
        steps = len(server.service.engine.records)
        assert steps <= 2 * (8 + 2), "tokens behind a stop are computed"


async def test_stop_texts_do_not_count_before_min_tokens():
    async with fake_server(runner=fake_runner(says("a.b.c.d"))) as server:
        for least, text in ((0, "a"), (2, "a"), (3, "a.b"), (5, "a.b.c")):
            body = await server.complete(max_tokens=7, min_tokens=least, stop=".")
            assert body["choices"][0]["text"] == text, least


async def test_a_stop_that_is_a_special_token_stops_by_id():
    script = says("hi<|im_start|>never")
    special = 256

    def with_special(request, index):
        return special if index == 2 else script(request, index)

    async with fake_server(runner=fake_runner(with_special)) as server:
        body = await server.chat(max_tokens=16, stop=["<|im_start|>"])
        assert body["choices"][0]["message"]["content"] == "hi"
        assert body["usage"]["completion_tokens"] == 3


async def test_a_stop_does_not_hold_back_text_in_empty_events():
    async with fake_server() as server:
        body = {"prompt": "hello", "max_tokens": 24, "stop": ["@@@@@@@@"]}
        events = await server.events("/v1/completions", body)
        pieces = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert len(pieces) == 24
        assert all(pieces)


async def test_bad_words_are_never_completed():
    async with fake_server(runner=fake_runner(says("abcabc abd"))) as server:
        body = await server.complete(max_tokens=10, bad_words=["abc", "d"], ignore_eos=True)
        text = body["choices"][0]["text"]
        assert "abc" not in text
        assert "d" not in text
        assert text.startswith("ab")
        masked = [r.masked_rows for r in server.service.engine.records]
        assert masked == [1] * len(masked)


async def test_abort_by_id_ends_with_what_there_is():
    async with fake_server() as server:
        body = {"prompt": "x", "max_tokens": 1500, "stream": True}
        headers = {"X-Request-Id": "client-42"}
        async with server.client.post(
            server.url + "/v1/completions", json=body, headers=headers
        ) as answer:
            assert answer.headers["X-Request-Id"] == "client-42"
            await answer.content.readline()
            _, found = await server.post("/abort_request", {"rid": "client-42"})
            assert found == {"aborted": 1}
            rest = (await answer.read()).decode()
        assert '"finish_reason":"abort"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        await server.wait_idle()
        _, found = await server.post("/abort_request", {"rid": "client-42"})
        assert found == {"aborted": 0}


async def test_flush_empties_the_cache_only_when_idle():
    async with fake_server() as server:
        await server.complete("z" * 64, max_tokens=2)
        await server.wait_idle()
        assert server.service.engine.scheduler.statistics().cached_tokens >= 64
        status, _ = await server.post("/flush_cache", {})
        assert status == 200
        assert server.service.engine.scheduler.statistics().cached_tokens == 0


async def test_a_request_past_its_time_ends_with_a_timeout():
    async with fake_server(runner=fake_runner(step_seconds=lambda batch: 0.01)) as server:
        status, body = await server.post(
            "/v1/completions", {"prompt": "x", "max_tokens": 1500, "timeout": 0.05}
        )
        assert (status, body["error"]["code"]) == (504, "timeout")
        await server.wait_idle()


async def test_the_last_tokens_go_out_before_the_recount():
    async with fake_server() as server:
        scheduler = server.service.engine.scheduler
        order = []
        original = scheduler.check_some

        def check_some():
            order.append("recount")
            return original()

        scheduler.check_some = check_some
        generator = server.service.generator
        params = GenerationParams(sampling=SamplingParams(max_new_tokens=3, temperature=0.0))
        with generator.start([[1, 2]], params, "r") as generation:
            order.clear()
            async for news in generation:
                order += ["last tokens"] * (news[-1].finish is not None)
        await server.wait_idle()
        assert order[0] == "last tokens"
        await server.complete(max_tokens=1)  # the loop has been through a rest by then
        assert "recount" in order


async def test_a_broken_recount_is_reported_and_serving_goes_on(caplog):
    async with fake_server() as server:
        scheduler = server.service.engine.scheduler
        await server.complete(max_tokens=2)
        await server.wait_idle()
        scheduler._recount.error = "one page too many"
        await server.complete(max_tokens=2)
        await server.wait_idle()
        await server.complete(max_tokens=2)
        async with server.client.get(server.url + "/metrics") as answer:
            text = await answer.text()
        assert 'loomserve:invariant_broken{model_name="fake"} 1.0' in text
        assert "one page too many" in caplog.text


async def test_a_watcher_sees_every_step_and_one_that_raises_harms_nobody(caplog):
    seen: list[object] = []

    def broken(record):
        raise RuntimeError("a watcher's own fault")

    async with fake_server() as server:
        engine = server.service.engine
        end = engine.watch_steps(seen.append)
        engine.watch_steps(broken)
        assert (await stream(server, "Y"))[-1] == "[DONE]"
        await server.wait_idle()
        assert seen == list(engine.records)
        assert caplog.text.count("a watcher failed") == 1
        end()
        end()
        watched = len(seen)
        await stream(server, "Y")
        await server.wait_idle()
        assert len(seen) == watched < len(engine.records)
