"""Bounds on what a client sends that are known before it is parsed or tokenized."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from runtime.errors import ContextTooLong, InvalidRequest
from server.text.json_bounds import MAX_ITEMS, MAX_NODES, size_of
from server.text.lanes import INLINE, THREADS, Lanes
from server.text.least_tokens import TokenLimit
from server.text.tokenizer import Tokenizer
from tests.effort import tries
from tests.fakes import fake_server

PIECES = st.sampled_from(
    ["the", " cat", "-" * 20, "  ", "\n", "1", "é", "e\u0301", "中", "🙂", "x"]
)
TEXTS = st.lists(PIECES, min_size=1, max_size=40).map("".join)


def trained(normalizer=None):
    """A byte-level BPE with long tokens, of the texts that are drawn."""
    backend = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    text = ["the cat the cat" + "-" * 20 + "  \n é e\u0301 中🙂"] * 50
    backend.train_from_iterator(text, trainer)
    return Tokenizer(backend)


def at_most(tokens):
    return TokenLimit(tokens, f"At most {tokens} go")


PLAIN, COMPOSING = trained(), trained(normalizers.NFC())


@settings(max_examples=tries(300), deadline=None)
@given(text=TEXTS, times=st.integers(1, 30), tokenizer=st.sampled_from([PLAIN, COMPOSING]))
def test_what_is_refused_untokenized_is_too_long_when_tokenized(text, times, tokenizer):
    ids = tokenizer.encode(text * times)
    assert tokenizer.encode(text * times, most=at_most(len(ids))) == ids
    with pytest.raises(ContextTooLong, match=f"^At most {len(ids) - 1} go; prompt has"):
        tokenizer.encode(text * times, most=at_most(len(ids) - 1))


def test_text_without_long_tokens_is_refused_by_its_bytes():
    class NotAsked:
        def encode_batch_fast(self, texts, add_special_tokens):
            raise AssertionError(f"{len(texts[0])} characters were tokenized")

    tokenizer = trained()
    tokenizer.backend = NotAsked()
    with pytest.raises(ContextTooLong, match="has 200000 characters"):
        tokenizer.encode("1" * 200_000, most=at_most(100_000))  # digits are tokens of their own
    with pytest.raises(InvalidRequest, match="200000 characters were tokenized"):
        tokenizer.encode("-" * 200_000, most=at_most(100_000))


JSON = st.recursive(
    st.none() | st.integers() | st.text(',:[]{}"\\ab'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(',:"\\k'), inner),
    max_leaves=40,
)


def recounted(value):
    """(commas; keys, lists and objects) of a value's JSON."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [recounted(one) for one in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    commas = max(0, len(inner) - 1) + sum(one[0] for one in inner)
    return commas, 1 + keys + sum(one[1] for one in inner)


@settings(max_examples=tries(100), deadline=None)
@given(value=JSON, size=st.integers(1, 9))
def test_values_and_keys_are_counted_outside_of_texts(value, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.text.json_bounds._SLICE", size)
        patch.setattr("server.text.json_bounds.MAX_ITEMS", -1)  # no short cut
        assert size_of(json.dumps(value).encode()) == recounted(value)


@pytest.mark.parametrize(
    ("prompt", "status"),
    [
        ("[" + "[]," * (MAX_NODES + 1) + "1]", 413),
        ("{" + ",".join(f'"{i}":1' for i in range(MAX_NODES + 1)) + "}", 413),
        ("[" + ",".join("1" * (MAX_ITEMS - 2)) + "]", 400),
        (json.dumps(",:[{" * MAX_ITEMS), 400),
    ],
    ids=["values", "keys", "ids", "text"],
)
async def test_more_than_can_be_parsed_at_once_is_413(prompt, status):
    async with fake_server() as server:
        body = f'{{"prompt": {prompt}, "max_tokens": 1}}'
        headers = {"Content-Type": "application/json"}
        url = server.url + "/v1/completions"
        async with server.client.post(url, data=body, headers=headers) as answer:
            assert answer.status == status
            code = (await answer.json())["error"]["code"]
            assert code == ("body_too_large" if status == 413 else "context_length_exceeded")


async def test_what_is_short_does_not_wait_for_what_is_long():
    lanes, go_on = Lanes("test"), threading.Event()
    held = [asyncio.create_task(lanes.run(size, go_on.wait)) for size in (4_000_000, 1_000_000)]
    await asyncio.sleep(0)
    loop_thread = threading.current_thread()
    assert await lanes.run(INLINE, threading.current_thread) is loop_thread
    assert await lanes.run(INLINE + 1, threading.current_thread) is not loop_thread
    go_on.set()
    assert await asyncio.gather(*held) == [True, True]
    lanes.close()


async def held_by(lanes, go_on, clients):
    """Long texts of these clients, each held until `go_on`; and the order in which they begin."""
    begun: list[str] = []

    def work(client):
        begun.append(client)
        return go_on.wait(30)

    tasks = [asyncio.create_task(lanes.run(2_000_000, partial(work, c), c)) for c in clients]
    await asyncio.sleep(0)
    return tasks, begun


async def test_one_client_s_long_texts_leave_a_thread_for_another_s():
    lanes, go_on = Lanes("test"), threading.Event()
    tasks, begun = await held_by(lanes, go_on, ["a"] * 20)
    async with asyncio.timeout(20):
        assert await lanes.run(2_000_000, lambda: "done", "b") == "done"
    go_on.set()
    assert await asyncio.gather(*tasks) == [True] * 20
    assert len(begun) == 20
    lanes.close()


async def test_clients_take_turns():
    lanes, go_on = Lanes("test"), threading.Event()
    tasks, begun = await held_by(lanes, go_on, [*["a"] * 9, *["b"] * 2, "c"])
    go_on.set()
    await asyncio.gather(*tasks)
    assert begun.index("c") < 6
    assert [i for i, one in enumerate(begun) if one == "b"][-1] < 8
    lanes.close()


async def test_who_leaves_while_waiting_takes_no_thread():
    lanes, go_on = Lanes("test"), threading.Event()
    tasks, begun = await held_by(lanes, go_on, ["a"] * 6)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    go_on.set()
    for _ in range(5):
        assert await lanes.run(2_000_000, lambda: 1, "a") == 1
    assert len(begun) == THREADS - 1
    lanes.close()
