"""Loading: names, shapes, ties, shards, types. Models are tiny ones that transformers wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.config import RunnerConfig
from runtime.errors import ConfigError, ModelError
from runtime.execution.build import build_runner
from tests.runtime.models.tiny_models import (
    Probe,
    expected_logits,
    make_model,
    open_runner,
    random_tokens,
)

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]

TOKENS = random_tokens(21)


def logits_here(folder: Path, **options: object) -> Tensor:
    runner = open_runner(folder, **options)
    (got,) = Probe(runner).step({1: (0, TOKENS)})
    runner.close()
    return got


def rewrite(folder: Path, change: Change) -> None:
    """Applies change(tensors) and saves the result in the order it returns."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("order", [1, -1], ids=["as-saved", "reversed"])
def test_an_untied_output_layer_is_the_files_own(order: int, tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", tie_word_embeddings=False)
    rewrite(tmp_path, lambda tensors: dict(list(tensors.items())[::order]))
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    torch.testing.assert_close(
        logits_here(tmp_path), expected_logits(model, TOKENS), atol=1e-4, rtol=1e-4
    )


def test_a_tied_output_layer_is_the_embedding_whatever_else_the_file_holds(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(tmp_path, lambda tensors: {**tensors, "lm_head.weight": torch.zeros(131, 48)})
    torch.testing.assert_close(
        logits_here(tmp_path), expected_logits(model, TOKENS), atol=1e-4, rtol=1e-4
    )


def test_only_what_the_index_assigns_is_read(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    # A stray file with other values, and a leftover of a used name in a shard that is not its own.
    save_file({name: torch.ones(1) for name in index}, tmp_path / "model.safetensors")
    name = "model.layers.3.mlp.down_proj.weight"
    shard = tmp_path / next(file for key, file in index.items() if file != index[name])
    save_file({**load_file(shard), name: torch.ones(48, 96)}, shard)
    torch.testing.assert_close(
        logits_here(tmp_path), expected_logits(model, TOKENS), atol=1e-4, rtol=1e-4
    )


def test_names_without_the_heads_prefix_and_old_buffers_are_read(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", tie_word_embeddings=True)

    def strip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        return {**bare, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}

    rewrite(tmp_path, strip)
    torch.testing.assert_close(
        logits_here(tmp_path), expected_logits(model, TOKENS), atol=1e-4, rtol=1e-4
    )


def drop(name: str) -> object:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            drop("model.layers.2.mlp.up_proj.weight"),
            r"no tensor 'model.layers.2.mlp.up_proj.weight'",
        ),
        (drop("lm_head.weight"), r"no tensor 'lm_head.weight'"),
        (
            lambda t: {**t, "model.norm.weight": torch.ones(47)},
            r"'model.norm.weight' has shape \[47\], the config asks for \[48\]",
        ),
        (
            lambda t: {**t, "model.layers.0.self_attn.q_proj.bias": torch.ones(48)},
            r"1 tensors.*'model.layers.0.self_attn.q_proj.bias'",
        ),
        (
            lambda t: {**t, "model.norm.weight": torch.ones(48, dtype=torch.int8)},
            r"'model.norm.weight' is of type int8, and the config names no quantization",
        ),
    ],
    ids=["missing", "no-head", "shape", "unknown", "quantized"],
)
def test_a_wrong_file_stops_the_start_and_names_the_tensor(
    change: Change, message: str, tmp_path: Path
) -> None:
    make_model(tmp_path, "llama", tie_word_embeddings=False)
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        open_runner(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba'.*llama, mistral"),
        ({"hidden_act": "relu"}, r"hidden_act 'relu'.*silu"),
        ({"num_hidden_layers": None}, "num_hidden_layers is absent; it must be an integer"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; it must be an integer"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6.*num_key_value_heads 4"),
    ],
    ids=["model-type", "activation", "layers", "vocabulary", "heads"],
)
def test_a_config_that_cannot_be_served_stops_the_start(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    make_model(tmp_path, "llama")
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        open_runner(tmp_path)


@pytest.mark.parametrize(
    ("checkpoint", "option", "expected"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_the_type_is_the_checkpoints_and_float16_only_on_demand(
    checkpoint: str, option: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.execution.device.torch_has_bfloat16", lambda: True)
    model = make_model(tmp_path, "llama").to(getattr(torch, checkpoint))
    model.save_pretrained(tmp_path)
    runner = open_runner(tmp_path, dtype=option)
    runner.close()
    assert runner.info.details["dtype"] == expected


def test_activations_beyond_float16_stay_finite(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(3e5)
    model.save_pretrained(tmp_path)
    want = expected_logits(model, TOKENS)
    assert not model.half()(torch.tensor([TOKENS])).logits.isfinite().all()
    torch.testing.assert_close(logits_here(tmp_path), want, atol=1e-3, rtol=1e-3)


def test_eos_ids_are_those_of_both_configs_and_of_the_tokenizer(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")

    def eos(**options: Any) -> frozenset[int]:
        config = RunnerConfig(model=str(tmp_path), device="cpu", max_total_tokens=64)
        runner, info = build_runner(config, page_size=4, max_running_requests=1, **options)
        runner.close()
        return info.eos_token_ids

    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert eos() == {2, 5, 9}
    assert eos(tokenizer_eos_id=7) == {2, 5, 7, 9}
    path.write_text(json.dumps({"eos_token_id": [5, -1, 2**40]}))  # what cannot be sampled
    assert eos(tokenizer_eos_id=10**6) == {2, 5}
    path.write_text("{}")
    assert eos() == {2}
    edit_config(tmp_path, eos_token_id=None)
    assert eos() == frozenset()
    edit_config(tmp_path, eos_token_id="</s>")
    with pytest.raises(ModelError, match="eos_token_id '</s>': must be an id or a list of ids"):
        eos()


def test_what_is_wrong_with_a_checkpoint_is_told_before_the_device_is_waited_for(
    tmp_path: Path,
) -> None:
    make_model(tmp_path, "llama")
    config = RunnerConfig(model=str(tmp_path), device="cpu", max_total_tokens=64)
    told: list[str] = []

    def build() -> None:
        runner, _ = build_runner(
            config,
            page_size=4,
            max_running_requests=1,
            progress=told.append,
            before_device=lambda: told.append("the device"),
        )
        runner.close()

    build()
    assert told[0] == "the device"
    told.clear()
    edit_config(tmp_path, num_hidden_layers="two")
    with pytest.raises(ModelError, match="num_hidden_layers"):
        build()
    edit_config(tmp_path, num_hidden_layers=2)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cut short"):
        build()
    assert not told


def test_a_pool_of_less_than_three_pages_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    with pytest.raises(ConfigError, match="max_total_tokens 11: must be at least three pages of 4"):
        open_runner(tmp_path, max_total_tokens=11)
