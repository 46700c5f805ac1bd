"""Models of random weights in published shapes: loaded like any other, and counted right."""

from __future__ import annotations

import json

import pytest

from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.config import RunnerConfig
from runtime.execution.build import build_runner
from scripts._shapes import SHAPES, size_of, write_model

# Billions of weights, as published, and of those the embedding's.
PUBLISHED = {"qwen3-0.6b": (0.596, 0.156), "llama-3.2-1b": (1.236, 0.263)}
PUBLISHED |= {"smollm2-1.7b": (1.711, 0.101)}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_published_number_of_weights(name):
    size, (weights, head) = size_of(SHAPES[name]), PUBLISHED[name]
    assert size.weight_bytes / 2e9 == pytest.approx(weights, abs=0.001)
    assert size.head_flops / 2e9 == pytest.approx(head, abs=0.001)
    assert size.token_flops / 2e9 == pytest.approx(weights - head, abs=0.001)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "smollm2-1.7b"])
def test_a_small_model_of_the_kind_loads_and_has_a_word_for_each_id(name, tmp_path):
    source, folder = tmp_path / "tokenizer", tmp_path / "model"
    source.mkdir()
    folder.mkdir()
    (source / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    (source / "tokenizer_config.json").write_text("{}")
    config = SHAPES[name] | {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    config |= {"num_key_value_heads": 2}
    write_model(folder, config, source)
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(words.values()) == list(range(40))
    assert set(open_checkpoint(folder).tensors) >= {"model.embed_tokens.weight"}
    options = RunnerConfig(model=str(folder), device="cpu", max_total_tokens=64, cpu_threads=1)
    runner, _ = build_runner(options, page_size=4, max_running_requests=1)
    assert runner.info.vocab_size == 40
    runner.close()
