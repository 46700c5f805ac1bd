"""What is asked: lengths, shared prefixes, turns, and the files of others."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from scipy import stats

from runtime.errors import ConfigError
from server.bench.words import Lengths
from tests.server.bench.scripted import workload


def asked(**fields) -> list[tuple[str, int]]:
    """(text, max_tokens) of every turn."""
    made = workload(**fields).conversations(fields.get("seed", 1))
    return [(turn.text, turn.max_tokens) for one in made for turn in one.turns]


@pytest.mark.parametrize(
    ("spec", "low", "high", "mean"),
    [("128", 128, 128, 128), ("64:256", 64, 256, 160), ("~100", 1, 10_000, 100)],
)
def test_lengths_have_the_mean_and_bounds_of_their_spec(spec, low, high, mean):
    rng = random.Random(3)
    drawn = [Lengths(spec).draw(rng) for _ in range(4000)]
    assert low <= min(drawn)
    assert max(drawn) <= high
    assert np.mean(drawn) == pytest.approx(mean, rel=0.06)


def test_lognormal_lengths_have_the_stated_mean_and_deviation():
    """The logarithm's own parameters are recomputed by scipy's fit."""
    rng = random.Random(3)
    drawn = np.array([Lengths("lognormal:400:300").draw(rng) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(400, rel=0.03)
    assert drawn.std() == pytest.approx(300, rel=0.06)
    shape, _, scale = stats.lognorm.fit(drawn, floc=0)
    assert stats.lognorm(shape, scale=scale).mean() == pytest.approx(400, rel=0.03)
    assert stats.skew(np.log(drawn)) == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize(
    "spec",
    ["", "0", "8:4", "1:2:3", "~1:2", "many", "-3", "lognormal:5", "lognormal:5:0", "lognormal:"],
)
def test_a_bad_length_is_refused(spec):
    with pytest.raises(ConfigError, match="must be"):
        Lengths(spec)


def test_random_prompts_differ_and_a_seed_fixes_them():
    first = asked()
    assert first == asked()
    assert not {text for text, _ in first} & {text for text, _ in asked_with_seed(2)}
    assert all(5 <= len(text.split()) <= 9 for text, _ in first)
    assert {most for _, most in first} == {4}


def asked_with_seed(seed: int) -> list[tuple[str, int]]:
    return [(turn.text, 0) for one in workload().conversations(seed) for turn in one.turns]


def test_prompts_of_a_group_share_its_prefix():
    texts = [
        text.split()
        for text, _ in asked(kind="shared-prefix", requests=40, prefix_tokens=100, prefix_groups=3)
    ]
    prefixes = {tuple(words[:100]) for words in texts}
    assert len(texts) == 40
    assert len(prefixes) == 3
    assert all(105 <= len(words) <= 109 for words in texts)


def test_conversations_have_their_turns_and_stay_within_the_requests():
    made = workload(kind="multi-turn", requests=10, turns=4).conversations(1)
    assert [len(one.turns) for one in made] == [4, 4, 2]


def test_sharegpt_s_humans_are_asked_and_answers_have_the_recorded_length(tmp_path):
    path = tmp_path / "chats.json"
    said = [
        {"from": "gpt", "value": "nobody has asked"},
        {"from": "human", "value": "a" * 41},
        {"from": "gpt", "value": "b" * 80},
        {"from": "human", "value": "again"},
        {"from": "gpt", "value": ""},
        {"from": "human", "value": "and nobody answered"},
    ]
    path.write_text(json.dumps([{"id": "x", "conversations": said}, {"conversations": []}]))
    assert asked(kind="sharegpt", file=path, turns=8) == [("a" * 41, 20), ("again", 1)]
    assert asked(kind="sharegpt", file=path, turns=1) == [("a" * 41, 20)]


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,9000,1
"""


def test_azure_s_rows_keep_their_lengths_and_times(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    made = workload(kind="azure", file=path, speed=2.0).conversations(1)
    assert [len(one.turns[0].text.split()) for one in made] == [374, 396, 9000]
    assert [one.turns[0].max_tokens for one in made] == [44, 109, 1]
    assert [one.start_s for one in made] == pytest.approx([0.0, 2.157289, 30.0], abs=1e-5)


def test_what_is_longer_than_the_context_is_left_out_and_the_rest_is_bounded(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    fields = {"kind": "azure", "file": path}
    assert len(asked(**fields, context_length=505)) == 2
    assert len(asked(**fields, context_length=504)) == 1
    assert len(asked(**fields, requests=1)) == 1
    with pytest.raises(ConfigError, match="no request that fits"):
        asked(**fields, context_length=10)


def mooncake(path, *entries):
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, entry, strict=True))) for entry in entries]
    path.write_text("\n".join(lines) + "\n")
    return workload(kind="mooncake", file=path).conversations(1)


def test_mooncake_s_prompts_share_words_exactly_where_their_hash_ids_are_the_same(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    made = mooncake(
        path, (27000, 1100, 50, [46, 47, 48]), (27500, 1024, 9, [46, 47]), (30000, 600, 7, [46, 9])
    )
    first, second, third = (one.turns[0].text.split() for one in made)
    assert [len(words) for words in (first, second, third)] == [1100, 1024, 600]
    assert first[:1024] == second
    assert third[:512] == first[:512]
    assert third[512:600] != first[512:600]
    assert [one.start_s for one in made] == [0.0, 0.5, 3.0]
    assert [one.turns[0].max_tokens for one in made] == [50, 9, 7]


def test_words_that_no_hash_id_covers_are_a_request_s_own(tmp_path):
    made = mooncake(tmp_path / "m.jsonl", (0, 700, 1, [1]), (0, 700, 1, [1]))
    first, second = (one.turns[0].text.split() for one in made)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("azure", "a,b\n1,2\n", "has no column TIMESTAMP"),
        ("azure", AZURE.replace("374", "many"), ":2: ContextTokens 'many': must be a whole number"),
        ("azure", AZURE.replace(",44", ""), ":2: GeneratedTokens null"),
        ("azure", AZURE.replace("2023-11-16 18:15:46.6805900", "then"), ":2: TIMESTAMP 'then'"),
        ("azure", AZURE.replace("374", "-4"), ":2: ContextTokens -4: must be from 0 to"),
        ("mooncake", '{"timestamp": 1}\n', ":1: is no request of such a trace"),
        ("mooncake", "[1]\n", ":1: is no request of such a trace"),
        ("mooncake", "\n\nword\n", ":3: is no request of such a trace"),
        ("sharegpt", "{", "is not JSON"),
        ("sharegpt", "{}", "must be a list"),
        ("sharegpt", "[3]", "[0]: must have a list under 'conversations'"),
        ("sharegpt", '[{"conversations": [{"from": "gpt"}]}]', "[0]: a part of a conversation"),
        ("sharegpt", "[]", "no request that fits"),
    ],
)
def test_a_file_that_is_not_what_it_is_said_to_be_is_told_with_its_line(tmp_path, kind, text, told):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        workload(kind=kind, file=path).conversations(1)
    assert told in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        workload(kind="azure", file=tmp_path / "none.csv").conversations(1)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kind": "nothing"}, "--workload nothing: must be one of random, shared-prefix"),
        ({"kind": "azure"}, "--file: goes with --workload sharegpt, azure, mooncake"),
        ({"requests": 0}, "--requests 0: must be above 0"),
        ({"prefix_tokens": -1}, "--prefix-tokens -1: must be above 0"),
        ({"speed": 0.0}, "--speed 0: must be above 0"),
        ({"context_length": -1}, "--context-length -1: must be at least 0"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(fields, told):
    with pytest.raises(ConfigError) as refused:
        workload(**fields)
    assert told in str(refused.value)
