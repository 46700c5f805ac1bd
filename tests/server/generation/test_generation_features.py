"""Every sampling feature of both OpenAI endpoints through the official client, on the real model."""

from __future__ import annotations

import math

import openai
import pytest

pytestmark = pytest.mark.slow
PROMPT = "Count: one two three four five six"


def complete(served, prompt=PROMPT, **fields):
    """A greedy completion, whole and streamed; both must be the same text."""
    fields = {"temperature": 0, "max_tokens": 12, **fields}
    answer = served.openai.completions.create(model=served.model, prompt=prompt, **fields)
    pieces: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in served.openai.completions.create(
        model=served.model, prompt=prompt, stream=True, **fields
    ):
        for choice in chunk.choices:
            pieces[choice.index] = pieces.get(choice.index, "") + choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    for choice in answer.choices:
        assert pieces[choice.index] == choice.text
        assert ends[choice.index] == choice.finish_reason
    return answer


def text(served, **fields):
    return complete(served, **fields).choices[0].text


def chat(served, **fields):
    fields = {"temperature": 0, "max_tokens": 12, **fields}
    return served.chat(PROMPT, **fields).choices[0]


def test_seeds_fix_the_text_and_no_seed_does_not(real):
    hot = {"temperature": 1.2, "top_p": 1.0, "max_tokens": 16}
    assert text(real, **hot, seed=5) == text(real, **hot, seed=5) != text(real, **hot, seed=6)
    free = {
        real.openai.completions.create(model=real.model, prompt=PROMPT, **hot).choices[0].text
        for _ in range(4)
    }
    assert len(free) > 1


def test_n_and_best_of(real):
    answer = complete(real, n=3, temperature=1.2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1
    best = real.openai.completions.create(
        model=real.model, prompt=PROMPT, n=1, best_of=3, temperature=1.2, seed=1, max_tokens=12
    )
    assert best.choices[0].text in {choice.text for choice in answer.choices}
    assert best.usage.completion_tokens >= 12
    with pytest.raises(openai.BadRequestError) as caught:
        complete(real, n=2, best_of=1)
    assert caught.value.param == "best_of"


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
def test_penalties_against_repetition(real, field):
    loop = "a b a b a b a b a b a b a b"
    plain = text(real, prompt=loop, max_tokens=16)
    penalized = text(real, prompt=loop, max_tokens=16, **{field: 2})
    assert len(set(penalized.split())) > len(set(plain.split()))


def test_repetition_penalty(real):
    loop = "a b a b a b a b a b a b a b"
    assert text(real, prompt=loop) != text(
        real, prompt=loop, extra_body={"repetition_penalty": 2.0}
    )


def test_logit_bias_forces_and_forbids(real):
    plain = complete(real, max_tokens=1, logprobs=0).choices[0]
    [first] = real.openai.post(
        real.url + "/tokenize", body={"prompt": plain.text}, cast_to=openai.BaseModel
    ).to_dict()["tokens"]
    assert text(real, max_tokens=1, logit_bias={str(first): -100}) != plain.text
    forced = text(real, prompt="Hello", max_tokens=3, logit_bias={str(first): 100})
    assert forced == plain.text * 3


def test_stops_of_every_kind(real):
    whole = text(real)
    stop = whole[3:6]
    cut = complete(real, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    kept = text(real, stop=[stop], extra_body={"include_stop_str_in_output": True})
    assert kept == whole[: whole.index(stop) + len(stop)]
    by_regex = text(real, extra_body={"stop_regex": "[aeiou]"})
    assert by_regex == whole[: min(whole.index(v) for v in "aeiou" if v in whole)]
    ids = real.openai.post(
        real.url + "/tokenize", body={"prompt": whole}, cast_to=openai.BaseModel
    ).to_dict()["tokens"]
    third = complete(real, extra_body={"stop_token_ids": [ids[2]]}).choices[0]
    assert third.finish_reason == "stop"
    assert whole.startswith(third.text)
    late = complete(real, extra_body={"stop_token_ids": [ids[2]], "min_tokens": 8})
    assert late.usage.completion_tokens >= 8


def test_bad_words_do_not_come(real):
    word = text(real).split()[0]
    assert word not in text(real, extra_body={"bad_words": [word]}).split()


def test_min_tokens_and_ignore_eos(real):
    for fields in ({"min_tokens": 20}, {"ignore_eos": True}):
        answer = real.chat("Say hi.", temperature=0, max_tokens=24, extra_body=fields)
        assert answer.usage.completion_tokens >= 20


def test_logprobs_in_both_shapes(real):
    choice = complete(real, logprobs=3).choices[0]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert all(math.isfinite(value) and value <= 0 for value in found.token_logprobs)
    assert found.text_offset == sorted(found.text_offset)
    for value, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3
        assert value == pytest.approx(max(top.values())), "greedy takes the likeliest"
    content = chat(real, logprobs=True, top_logprobs=4).logprobs.content
    for entry in content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert entry.logprob == pytest.approx(values[0])
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    assert chat(real, logprobs=True, top_logprobs=0).logprobs.content[0].top_logprobs == []


def test_echo_scores_the_prompt(real):
    choice = complete(real, echo=True, logprobs=0, max_tokens=1).choices[0]
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert "".join(choice.logprobs.tokens) == choice.text


def test_top_k_top_p_and_min_p_that_leave_one_token_are_greedy(real):
    greedy = text(real)
    for fields in (
        {"extra_body": {"top_k": 1}}, {"top_p": 0.000001}, {"extra_body": {"min_p": 1.0}},
    ):  # fmt: skip
        assert text(real, temperature=1.5, **fields) == greedy


def test_fields_without_effect_are_taken(real):
    plain = chat(real).message.content
    assert chat(
        real, user="u", metadata={"a": "b"}, store=False, service_tier="auto",
        extra_body={"priority": 3, "cache_salt": "s", "x_unknown": [1]},
    ).message.content == plain  # fmt: skip


def test_suffix_is_refused_with_a_sentence(real):
    with pytest.raises(openai.BadRequestError, match="fill in the middle") as caught:
        real.openai.completions.create(model=real.model, prompt="a", suffix="b")
    assert caught.value.param == "suffix"


def test_errors_are_typed(real):
    with pytest.raises(openai.NotFoundError) as unknown:
        real.openai.chat.completions.create(
            model="other", messages=[{"role": "user", "content": "Hi"}]
        )
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        real.openai.completions.create(model=real.model, prompt=[5] * 20000)
    assert long.value.code == "context_length_exceeded"
