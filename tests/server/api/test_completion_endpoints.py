"""Both OpenAI endpoints, whole and streamed, on scripted tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from runtime.request import TokenLogprobs
from runtime.rope_layout import LongPrompts
from runtime.simulation.sim_runner import SimRunner
from tests.fakes import IM_END, fake_runner, fake_server, says
from tests.values import present


def texts(events):
    """Joined text of each choice of a stream, finish reasons, and the usage event's usage."""
    joined: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    assert events[-1] == "[DONE]"
    for event in map(json.loads, events[:-1]):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined[choice["index"]] = joined.get(choice["index"], "") + piece
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    return joined, reasons, usage


async def test_whole_and_streamed_answers_are_the_same():
    async with fake_server(runner=fake_runner(says("Grüße, 世界 🙂!"))) as server:
        for path, ask in (
            ("/v1/completions", server.complete),
            ("/v1/chat/completions", server.chat),
        ):
            whole = await ask(max_tokens=64)
            choice = whole["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            body = {"max_tokens": 64, "stream_options": {"include_usage": True}}
            body |= (
                {"prompt": "hello"}
                if path == "/v1/completions"
                else {"messages": [{"role": "user", "content": "hello"}]}
            )
            joined, reasons, usage = texts(await server.events(path, body))
            assert joined == {0: text} == {0: "Grüße, 世界 🙂!"}
            assert reasons == {0: choice["finish_reason"]} == {0: "stop"}
            streamed, first = dict(usage), dict(whole["usage"])
            # The second request finds the first one's prompt in the cache.
            assert streamed.pop("prompt_tokens_details")["cached_tokens"] >= 0
            first.pop("prompt_tokens_details")
            assert streamed == first


async def test_usage_counts_the_prompt_once_and_every_choice():
    async with fake_server() as server:
        one = (await server.complete("12345", max_tokens=7))["usage"]
        two = (await server.complete("12345", max_tokens=7, n=2))["usage"]
        assert (one["prompt_tokens"], one["completion_tokens"], one["total_tokens"]) == (5, 7, 12)
        assert (two["prompt_tokens"], two["completion_tokens"], two["total_tokens"]) == (5, 14, 19)


async def test_cached_tokens_are_whole_pages_of_a_known_prompt():
    async with fake_server() as server:
        prompt = "x" * 100
        first = await server.complete(prompt, max_tokens=2)
        again = await server.complete(prompt, max_tokens=2)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        # 99 of 100 tokens may be found (one is left to compute), in pages of 16.
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_cache_salt_keeps_prompts_apart():
    async with fake_server() as server:
        for salt, cached in (("a", 0), ("b", 0), ("a", 48)):
            body = await server.complete("y" * 50, max_tokens=1, cache_salt=salt)
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_prompts_of_other_rotary_frequencies_share_no_cached_prefix():
    runner = fake_runner()
    runner.info = replace(runner.info, long_prompts=LongPrompts(60, by_length=True))
    async with fake_server(runner=runner) as server:
        for tokens, cached in ((50, 0), (60, 48), (61, 0), (62, 0), (61, 48)):
            body = await server.complete("y" * tokens, max_tokens=1)
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_several_prompts_and_choices_are_numbered_prompt_by_prompt():
    async with fake_server() as server:
        body = await server.complete(["a", "b", [99]], max_tokens=3, n=2)
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        pairs = [choice["text"] for choice in body["choices"]]
        assert pairs[0] == pairs[1] != pairs[2] == pairs[3] != pairs[4] == pairs[5]
        joined, _, _ = texts(
            await server.events(
                "/v1/completions", {"prompt": ["a", "b", [99]], "max_tokens": 3, "n": 2}
            )
        )
        assert [joined[i] for i in range(6)] == pairs


async def test_echo_begins_with_the_prompt_and_scores_it():
    async with fake_server() as server:
        prompt = "The quick brown fox"
        whole = await server.complete(prompt, max_tokens=1, echo=True, logprobs=2)
        choice = whole["choices"][0]
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(prompt)
        assert len(choice["text"]) == len(prompt) + 1
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert len(logprobs[name]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        assert logprobs["text_offset"] == list(range(len(prompt) + 1))
        assert "".join(logprobs["tokens"]) == choice["text"]

        events = await server.events(
            "/v1/completions", {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 2}
        )
        parts = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        streamed = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
        assert streamed == logprobs["token_logprobs"]


async def test_echo_with_no_tokens_only_scores_the_prompt():
    async with fake_server() as server:
        body = await server.complete("score me", max_tokens=0, echo=True, logprobs=0)
        assert body["choices"][0]["text"] == "score me"
        assert len(body["choices"][0]["logprobs"]["token_logprobs"]) == 8
        assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("top", [0, 3])
async def test_chat_logprobs_have_an_entry_for_each_token(top):
    async with fake_server(runner=fake_runner(says("é!"))) as server:
        body = await server.chat(logprobs=True, top_logprobs=top, max_tokens=16)
        content = body["choices"][0]["logprobs"]["content"]
        # Two bytes of é, the mark, and the token that ended the turn.
        assert len(content) == body["usage"]["completion_tokens"] == 4
        assert bytes(content[0]["bytes"] + content[1]["bytes"]).decode() == "é"
        assert all(len(entry["top_logprobs"]) == top for entry in content)
        events = await server.events(
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hello"}],
                "logprobs": True,
                "top_logprobs": top,
                "max_tokens": 16,
            },
        )
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        streamed = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
        assert streamed == content


async def test_stream_opens_each_choice_with_the_role():
    async with fake_server() as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 4}
        events = await server.events("/v1/chat/completions", body)
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        for index in (0, 1):
            deltas = [c["delta"] for c in choices if c["index"] == index]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert not any("role" in delta for delta in deltas[1:])


async def test_events_of_a_stream_share_their_head():
    async with fake_server() as server:
        events = await server.events("/v1/completions", {"prompt": "hi", "max_tokens": 5})
        parsed = [json.loads(event) for event in events[:-1]]
        for name in ("id", "object", "created", "model"):
            assert len({event[name] for event in parsed}) == 1


async def test_end_of_turn_is_counted_but_not_shown():
    async with fake_server(runner=fake_runner(says("ok"))) as server:
        body = await server.chat(max_tokens=16)
        assert body["choices"][0]["message"]["content"] == "ok"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["stop_reason"] == IM_END
        assert body["usage"]["completion_tokens"] == 3


async def test_ignore_eos_goes_on_to_the_limit_but_stops_at_the_users_ids():
    async with fake_server(runner=fake_runner(says("ok"))) as server:
        body = await server.chat(max_tokens=9, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == 9
        assert body["choices"][0]["finish_reason"] == "length"
        body = await server.chat(max_tokens=9, ignore_eos=True, stop_token_ids=[ord("k")])
        assert body["choices"][0]["message"]["content"] == "o"
        assert body["choices"][0]["finish_reason"] == "stop"


async def test_best_of_returns_the_likeliest_choices():
    class Weighted(SimRunner):
        """Choice i of a request gets tokens of log-probability -i."""

        def run(self, batch, masks):
            output = super().run(batch, masks)
            logprobs = present(output.logprobs)
            for i, row in enumerate(batch.sampled):
                choice = int(batch.requests[row].request_id.rpartition("-")[2])
                entry = present(logprobs[i])
                logprobs[i] = TokenLogprobs(entry.token_id, -float((choice + 2) % 4))
                output.token_ids[i] = ord("A") + choice
            return output

    async with fake_server(runner=Weighted(vocab_size=258)) as server:
        body = await server.complete(max_tokens=3, n=2, best_of=4)
        assert [choice["text"] for choice in body["choices"]] == ["CCC", "DDD"]
        assert body["choices"][0]["logprobs"] is None
        assert body["usage"]["completion_tokens"] == 12


async def test_empty_prompt_needs_a_beginning_token():
    async with fake_server() as server:
        status, body = await server.post("/v1/completions", {"prompt": ""})
        assert status == 400
        assert body["error"]["type"] == "invalid_request_error"
        assert "empty" in body["error"]["message"]


async def test_tokenize_counts_what_usage_counts():
    async with fake_server() as server:
        _, found = await server.post("/tokenize", {"prompt": "naïve"})
        used = (await server.complete("naïve", max_tokens=1))["usage"]["prompt_tokens"]
        assert found["count"] == len(found["tokens"]) == used == 6
        messages = [{"role": "user", "content": "hi"}]
        _, found = await server.post("/tokenize", {"messages": messages})
        used = (await server.chat(messages, max_tokens=1))["usage"]["prompt_tokens"]
        assert found["count"] == used
        _, back = await server.post("/detokenize", {"tokens": found["tokens"]})
        assert back["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
