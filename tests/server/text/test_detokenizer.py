"""Pieces of text, one id at a time, against decoding all ids at once by the library itself."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from server.text.tokenizer import Tokenizer
from tests.fakes import IM_END, fake_runner, fake_server, make_fake_service
from tests.values import present

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁the", "▁river", "s", "ing", "▁世界", "界", "é", "▁.", ",", "▁▁", "🙂"]


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ã", "©"), ("Ġ", "t"), ("Ġt", "h"), ("ð", "Ł"), ("ðŁ", "Ļ")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(["a b", "日本"])
    return backend


def sentence_piece() -> tokenizers.Tokenizer:
    vocabulary = {token: i for i, token in enumerate(["<s>", *BYTES, *WORDS])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], unk_id=None))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return backend


def word_piece() -> tokenizers.Tokenizer:
    words = ["[UNK]", "the", "river", "##s", "##ing", ".", ",", "'", "don", "n't", "##é", "世"]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return backend


FAMILIES = [byte_level, sentence_piece, metaspace, word_piece]


def one_by_one(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> list[str]:
    state = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
    return [*map(state.feed, ids), state.flush()]


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("skip", [True, False], ids=["hidden-specials", "shown-specials"])
@pytest.mark.sampled(3)
def test_pieces_join_to_what_decoding_all_ids_gives(make, skip):
    backend = make()
    tokenizer = Tokenizer(backend)
    rng = random.Random(7)
    for _ in range(2000):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 40))]
        pieces = one_by_one(tokenizer, [], ids, skip)
        assert "".join(pieces) == backend.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_text_after_a_prompt_is_what_the_prompt_leaves_of_the_whole(make):
    backend = make()
    tokenizer = Tokenizer(backend)
    rng = random.Random(8)
    visible = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    # A prompt that ends in the middle of a character leaves nothing to compare.
    prompts = [p for p in visible if "\ufffd" not in backend.decode([p]) and backend.decode([p])]
    for _ in range(2000):
        prompt = [rng.choice(prompts) for _ in range(3)]
        if backend.id_to_token(prompt[-1]).startswith("<0x"):
            continue
        ids = [rng.choice(visible) for _ in range(rng.randint(1, 20))]
        whole = backend.decode(prompt + ids, skip_special_tokens=True)
        before = backend.decode(prompt, skip_special_tokens=True)
        assert before + "".join(one_by_one(tokenizer, prompt, ids, True)) == whole, (prompt, ids)


def test_a_character_is_never_split():
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("naïve 🙂 世界")
    pieces = one_by_one(tokenizer, [], ids, True)
    assert "".join(pieces) == "naïve 🙂 世界"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_cut_character_at_the_end_shows_as_one_replacement():
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("ok 🙂")[:-1]
    assert one_by_one(tokenizer, [], ids, True)[-1] == "\ufffd"
    assert tokenizer.decode(ids) == "ok \ufffd"


def byte_level_with_another_decoder() -> tokenizers.Tokenizer:
    """Decoded by windows of tokens, like any decoder that is not known here."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


@pytest.mark.parametrize(
    "make",
    [byte_level, sentence_piece, byte_level_with_another_decoder],
    ids=lambda make: make.__name__,
)
def test_a_character_cut_by_a_limit_is_left_out(make):
    """Every prefix of a text's tokens gives the whole characters that its bytes spell."""
    tokenizer = Tokenizer(make())
    text = "é🙂界a🙂🙂é"
    ids = [present(tokenizer.backend.token_to_id(name)) for c in text for name in names(make, c)]
    for end in range(len(ids) + 1):
        state = tokenizer.detokenizer()
        shown = "".join([*map(state.feed, ids[:end]), state.flush(cut=True)])
        assert shown == text.encode()[:end].decode(errors="ignore"), end


def names(make, character: str) -> list[str]:
    """Tokens of single bytes that spell a character."""
    if make is sentence_piece:
        return [f"<0x{byte:02X}>" for byte in character.encode()]
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return list(split.pre_tokenize_str(character)[0][0])


@pytest.mark.parametrize("make", [byte_level, sentence_piece], ids=lambda make: make.__name__)
def test_bytes_that_can_never_become_a_character_show_after_a_cut_too(make):
    tokenizer = Tokenizer(make())
    state = tokenizer.detokenizer()
    broken = [present(tokenizer.backend.token_to_id(name)) for name in names(make, "🙂")[1:3]]
    shown = "".join([*map(state.feed, broken), state.flush(cut=True)])
    assert shown == "\ufffd\ufffd" == tokenizer.backend.decode(broken)


async def test_an_answer_cut_by_its_limit_ends_with_a_whole_character():
    answer = list("ab🙂🙂".encode())
    runner = fake_runner(lambda request, index: answer[index] if index < len(answer) else IM_END)
    async with fake_server(make_fake_service(runner)) as server:
        for limit in range(1, len(answer) + 1):
            wanted = bytes(answer[:limit]).decode(errors="ignore")
            for body in ({}, {"stop": ["zz"]}, {"logprobs": 1}):
                found = await server.complete(max_tokens=limit, temperature=0, **body)
                assert found["choices"][0]["text"] == wanted
                assert found["choices"][0]["finish_reason"] == "length"
            asked = {"prompt": "hello", "max_tokens": limit}
            events = [json.loads(e) for e in (await server.events("/v1/completions", asked))[:-1]]
            assert "".join(event["choices"][0]["text"] for event in events) == wanted


async def test_a_character_that_the_model_itself_leaves_incomplete_shows():
    answer = [*"ab🙂".encode()[:-1], IM_END]
    runner = fake_runner(lambda request, index: answer[index])
    async with fake_server(make_fake_service(runner)) as server:
        found = await server.complete(max_tokens=20)
        assert found["choices"][0]["text"] == "ab\ufffd"
        assert found["choices"][0]["finish_reason"] == "stop"


def test_ids_beyond_the_vocabulary_have_no_text():
    for make in FAMILIES:
        tokenizer = Tokenizer(make())
        ids = [1, tokenizer.vocab_size + 5, 2]
        assert tokenizer.decode(ids) == tokenizer.decode([1, 2])


def test_decoder_kinds_are_told_apart():
    """The fast ways are taken for the two common families; the others take the library's."""
    assert [Tokenizer(make())._kind for make in FAMILIES] == ["bytes", "pieces", "window", "window"]
