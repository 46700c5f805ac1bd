"""What servers in processes of their own make of fields, right and wrong: cases of published faults
of other servers. Whatever is sent, the answer is never 5xx, and the server goes on."""

from __future__ import annotations

import json
import math
import re

import pytest

from tests.process.http_user import COUNTING, PATHS, together

pytestmark = pytest.mark.slow

CALL = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": "{}"}}


def said(content, role="user"):
    return {"role": role, "content": content}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_alternatives_are_as_many_as_asked_for_and_sorted(chatter):
    answer = chatter.generate("chat", COUNTING, max_tokens=12, logprobs=True, top_logprobs=5)
    entries = answer.choices[0]["logprobs"]["content"]
    assert len(entries) == answer.usage["completion_tokens"]
    for entry in entries:
        values = [one["logprob"] for one in entry["top_logprobs"]]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0]  # greedy


def test_an_echo_with_logprobs_covers_the_prompt(completions_user):
    prompt = "The quick brown fox jumps over the lazy"
    fields = {"echo": True, "logprobs": 2, "max_tokens": 1}
    answer = completions_user.generate("completions", prompt, **fields)
    assert answer.text().startswith(prompt)
    found = answer.choices[0]["logprobs"]
    total = answer.usage["total_tokens"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == total
    first, *others = found["token_logprobs"]
    assert first is None
    assert all(math.isfinite(value) and value <= 0 for value in others)
    assert len(found["text_offset"]) == total
    assert found["text_offset"] == sorted(found["text_offset"])
    assert completions_user.stream("completions", prompt, **fields).text() == answer.text()


def test_no_alternatives_may_be_asked_for(user, kind):
    chat = {"logprobs": True, "top_logprobs": 0}
    fields = chat if kind == "chat" else {"logprobs": 0}
    answer = user.generate(kind, COUNTING, **fields)
    found = answer.choices[0]["logprobs"]
    entries = found["content"] if kind == "chat" else found["tokens"]
    assert len(entries) == answer.usage["completion_tokens"]
    assert user.stream(kind, COUNTING, **fields).text() == answer.text()


def test_a_bias_forces_and_bans(user, kind):
    letters = {"A": user.tokens("A")[0], "B": user.tokens("B")[0]}
    for letter, token in letters.items():
        forced = user.generate(kind, "Hello", max_tokens=4, logit_bias={str(token): 100})
        assert forced.text() == 4 * letter
    base = user.generate(kind, COUNTING).text()
    assert user.generate(kind, COUNTING, logit_bias={}).text() == base
    assert user.generate(kind, COUNTING, logit_bias=None).text() == base
    forced = {str(letters["A"]): 100}
    banned = {**forced, str(letters["B"]): 100, str(letters["A"]): -100}
    assert user.generate(kind, COUNTING, max_tokens=4, logit_bias=banned).text() == "BBBB"


def test_answers_without_a_seed_differ(user, kind):
    fields = {"temperature": 1.5, "max_tokens": 24}

    def ask(**more):
        return user.generate(kind, "Tell me something", **fields, **more)

    assert len({ask().text() for _ in range(6)}) > 1
    four = ask(n=4)
    assert len({four.text(index) for index in range(4)}) > 1
    assert len({answer.text() for answer in together([ask] * 4)}) > 1


def test_top_k_of_none_is_off_and_of_one_is_greedy(user, kind):
    for off in (0, -1):
        texts = {
            user.generate(kind, COUNTING, temperature=2, top_k=off, seed=seed).text()
            for seed in range(8)
        }
        assert len(texts) > 1
    greedy = user.generate(kind, COUNTING).text()
    assert user.generate(kind, COUNTING, temperature=2, top_k=1).text() == greedy


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"top_p": 1}, 200),
        ({"top_p": 0.0001}, 200),
        ({"temperature": 0}, 200),
        ({"temperature": 2}, 200),
        ({"top_p": 1.0001}, 400),
        ({"top_p": -0.1}, 400),
        ({"temperature": -0.1}, 400),
        ({"n": 2}, 200),
        ({"best_of": 1}, 200),
        ({"n": 0}, 400),
        ({"n": -1}, 400),
        ({"n": 100_000}, 400),
        ({"best_of": 1, "n": 2}, 400),
    ],
    ids=str,
)
def test_bounds(completions_user, fields, status):
    assert completions_user.ask("completions", "Hello", **fields).status == status


def test_choices_of_a_greedy_request_are_equal(user, kind):
    answer = user.generate(kind, "Hello", n=2)
    assert answer.text(0) == answer.text(1)


@pytest.mark.parametrize("value", [-2473, -1, 1.5, "ten", [1]])
def test_an_impossible_max_tokens_is_refused(user, kind, value):
    user.ask(kind, "Hello", max_tokens=value, stop=["e", "\n"]).assert_refused(naming="max_tokens")


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1.5},
        {"n": "two"},
        {"max_tokens": 2.5},
        {"seed": 1.5},
        {"temperature": "hot"},
        {"top_p": [1]},
        {"stop": 5},
        {"stop": [5]},
        {"stream": "maybe"},
        {"logit_bias": [1]},
        {"top_k": 0.01},
        {"top_k": "5"},
        {"temperature": -1},
    ],
    ids=str,
)
def test_a_wrong_type_is_refused_by_name(user, kind, fields):
    user.ask(kind, "Hello", **fields).assert_refused(naming=next(iter(fields)))


def test_too_many_alternatives_are_refused_by_name(user, kind):
    fields = {"logprobs": 100_000}
    if kind == "chat":
        fields = {"logprobs": True, "top_logprobs": 100_000}
    user.ask(kind, "Hello", **fields).assert_refused(naming="logprobs")


@pytest.mark.parametrize("fields", [{}, {"min_tokens": 2}], ids=str)
def test_a_stop_id_beyond_the_vocabulary_is_refused(user, kind, fields):
    answer = user.ask(kind, "Hello", stop_token_ids=[999_999_999], **fields)
    answer.assert_refused(naming="stop_token_ids")


def test_what_only_others_read_is_ignored(user, kind):
    fields = {"store": False, "service_tier": "auto", "metadata": {"a": "b"}, "x_unknown": [1, 2]}
    if kind == "chat":
        fields |= {"parallel_tool_calls": True, "prediction": None, "reasoning_effort": None}
    assert user.generate(kind, "Hello", **fields).text() == user.generate(kind, "Hello").text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "messages",
    [
        [said("hi", role="bot")],
        [{"content": "hi"}],
        "hi",
        None,
        [5],
        [None],
        [{"role": "user"}],
        [said(5)],
        [said("hi", role=5)],
    ],
    ids=str,
)
def test_bad_messages_are_refused(chatter, messages, stream):
    body = {"model": chatter.model, "messages": messages, "max_tokens": 2, "stream": stream}
    response = chatter.post(PATHS["chat"], body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages")


def test_text_in_parts_is_text(chatter):
    text = "Say hello to the river"
    whole = chatter.generate("chat", text)
    for content in (parts(text), parts("Say ", "hello to the river")):
        answer = chatter.generate("chat", [said(content)])
        assert answer.usage["prompt_tokens"] == whole.usage["prompt_tokens"]
        assert answer.text() == whole.text()
    chatter.generate("chat", [said(parts("Be brief."), role="system"), said("Hi")])
    result = {"role": "tool", "tool_call_id": "call_1", "content": parts("10525")}
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    chatter.generate("chat", [said("Weather?"), call, result])
    chatter.generate(
        "chat", [{**said("Hello"), "name": "bob", "id": 5, "opts": {"visible": False}}]
    )


def test_a_picture_is_refused(chatter):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    content = [*parts("What is this?"), picture]
    chatter.ask("chat", [said(content)]).assert_refused()
    chatter.ask("chat", [said([])])


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', "{", "null", "[1]", '"x"', ""])
def test_arguments_in_the_history_that_are_no_object(chatter, arguments):
    call = {**CALL, "function": {"name": "get", "arguments": arguments}}
    messages = [
        said("Weather?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        said("Thanks"),
    ]
    # A model wrote them once: the chat goes on.
    assert chatter.ask("chat", messages).status == 200


def test_a_stop_may_be_the_name_of_a_control_token(chatter):
    question = "Reply with the single word: yes"
    stops = ["<|im_end|>", "</s>", "<|eot_id|>"]
    answer = chatter.generate("chat", question, max_tokens=64, stop=stops)
    assert answer.text() == chatter.generate("chat", question, max_tokens=64).text()


def test_a_chat_with_a_model_that_has_no_template_is_refused(completer):
    answer = completer.ask("chat", "Hello")
    answer.assert_refused()
    assert "template" in answer.json["error"]["message"]


def of_schema(schema):
    value = {"name": "x", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": value}


@pytest.mark.parametrize(
    "wanted",
    [
        of_schema({"type": "nonsense"}),
        of_schema({"type": "object", "properties": {"a": "b"}}),
        of_schema({"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}}),
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "xml"},
        "json",
        5,
    ],
    ids=str,
)
def test_broken_formats_are_refused(chatter, wanted):
    chatter.ask("chat", "Give me JSON", response_format=wanted).assert_refused()


def test_json_mode_makes_no_flood_of_blanks(chatter):
    question = "Return a small JSON object about a river."
    answer = chatter.generate(
        "chat", question, max_tokens=200, response_format={"type": "json_object"}
    )
    blanks = re.findall(r"\s+", answer.text())
    assert max(map(len, blanks), default=0) <= 100
    if answer.choices[0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer.text()), dict)
        assert len(answer.text()) - len(answer.text().rstrip()) < 8


def test_hundreds_of_refused_requests_leave_nothing_behind(completions_user):
    long = "river " * completions_user.context_length
    bodies = [
        {"prompt": long, "max_tokens": 1},
        {"prompt": [[40, 41], [999_999_999]], "max_tokens": 1},
        {"prompt": "Hello", "temperature": -5},
    ]
    for number in range(300):
        body = {"model": completions_user.model, **bodies[number % 3]}
        assert completions_user.post(PATHS["completions"], body).status_code == 400, body
    completions_user.assert_idle_soon()
