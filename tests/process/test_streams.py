"""Streams of servers in processes of their own, as published faults of other servers tell to look at
them."""

from __future__ import annotations

import json
from time import monotonic

import pytest

from tests.process.http_user import COUNTING, text_of, together, unseen

pytestmark = pytest.mark.slow

UNICODE = "🙂🙃🙂🙃 你好，世界 你好，世界 ñandú ñandú 🙂🙃🙂🙃 你好，世界 ñandú 🙂🙃🙂🙃 你好"


def test_prompts_that_arrive_together_all_start_before_one_ends(user, kind):
    def first_and_last():
        prompt = f"{unseen()} {COUNTING * 10}"
        with user.events(kind, prompt, max_tokens=64, ignore_eos=True) as events:
            times = [monotonic() for event in events if has_text(event)]
        return times[0], times[-1]

    times = together([first_and_last] * 4)
    assert max(first for first, _ in times) < min(last for _, last in times)


def has_text(event: bytes) -> bool:
    data = event.removeprefix(b"data: ")
    return data != b"[DONE]" and any(text_of(one) for one in json.loads(data)["choices"])


def test_one_who_leaves_at_the_very_end_leaves_nothing_behind(user, kind):
    for number in range(40):
        with user.events(kind, COUNTING, max_tokens=4) as events:
            for _ in range(number % 4 + 1):
                next(events, None)
    user.assert_idle_soon()


def test_a_cut_inside_a_character_is_the_same_streamed_and_whole(user, kind):
    before = ""
    for limit in range(1, 13):
        whole = user.generate(kind, UNICODE, max_tokens=limit).text()
        assert user.stream(kind, UNICODE, max_tokens=limit).text() == whole
        text = whole.rstrip("\ufffd")
        assert text.startswith(before)
        before = text


def test_a_pending_stop_string_sends_no_empty_events(user, kind):
    fields = {"max_tokens": 24, "stop": ["@@@@@@@@"]}
    streamed = user.stream(kind, COUNTING, **fields)
    empty = [
        piece
        for piece in streamed.pieces()
        if not (
            piece.get("text")
            or piece["finish_reason"]
            or any(value for value in piece.get("delta", {}).values())
        )
    ]
    assert len(empty) <= 2
    assert streamed.text() == user.generate(kind, COUNTING, **fields).text()


@pytest.mark.parametrize("choices", [1, 2])
def test_usage_of_a_stream_is_that_of_a_whole_answer(user, kind, choices):
    whole = user.generate(kind, COUNTING, n=choices).usage
    streamed = user.stream(kind, COUNTING, n=choices, stream_options={"include_usage": True}).usage
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [streamed[name] for name in counts] == [whole[name] for name in counts]
    assert whole["prompt_tokens"] == user.generate(kind, COUNTING).usage["prompt_tokens"]


@pytest.mark.parametrize("choices", [1, 2])
def test_the_role_opens_each_choice(chatter, choices):
    streamed = chatter.stream("chat", "Hello", n=choices)
    for index in range(choices):
        first, *others = [piece["delta"] for piece in streamed.pieces(index)]
        assert first["role"] == "assistant"
        assert all(delta.get("role", "assistant") == "assistant" for delta in others)


def test_a_chat_ends_with_its_reason_and_without_control_tokens(chatter):
    streamed = chatter.stream("chat", "Reply with one word: yes", max_tokens=64)
    assert streamed.finish_reason in ("stop", "length")
    assert "<|" not in streamed.text()


def test_identity_is_the_same_throughout_a_stream(user, kind):
    chunks = user.stream(kind, "Hello").chunks
    for name in ("id", "object", "created", "model"):
        assert len({chunk[name] for chunk in chunks}) == 1
    wanted = "text_completion" if kind == "completions" else "chat.completion.chunk"
    assert chunks[0]["object"] == wanted


def test_a_stream_after_a_long_prompt_ends_properly(user, kind):
    words = int(0.6 * user.context_length / len(user.tokens(" river")))
    prompt = unseen() + " river" * words
    streamed = user.stream(kind, prompt, stream_options={"include_usage": True})
    assert streamed.usage["prompt_tokens"] > 0.59 * user.context_length
    assert streamed.chunks[-2]["choices"][0]["finish_reason"] in ("stop", "length")


def test_an_id_that_clients_give_may_come_again(user, kind):
    name = unseen()

    def ask():
        headers = {"X-Request-Id": name}
        fields = {"user": name, "rid": name, "request_id": name}
        return user.ask(kind, COUNTING, headers=headers, **fields)

    first = ask()
    assert first.status == 200
    for _ in range(2):
        assert ask().text() == first.text()
    together([ask] * 3)  # whatever is said of the ids, it is not 5xx
    user.assert_idle_soon()
