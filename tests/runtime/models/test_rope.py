"""Rotary embeddings of every type and of every way a config states them, against transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from runtime.config import RunnerConfig
from runtime.errors import ConfigError, ModelError
from runtime.execution.build import build_runner
from runtime.models.rope import parse_rope
from runtime.rope_layout import RopeLayout
from tests.runtime.models.tiny_models import (
    Probe,
    expected_logits,
    make_model,
    open_runner,
    random_tokens,
)

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 501
# head_dim of the tiny models is 8, so there are four frequencies.
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TYPES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    # name: rope parameters, other config entries, advertised context
    "null": ({}, {}, 512),
    "default": ({"rope_type": "default", "rope_theta": 5000.0}, {}, 512),
    "linear": ({"rope_type": "linear", "factor": 4.0}, {}, 2048),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, {}, 2048),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {},
        512,
    ),
    "yarn-without-original": ({"rope_type": "yarn", "factor": 4.0}, {}, 2048),
    "yarn-all-numbers": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 1.5,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
        {},
        512,
    ),
    "yarn-attention-factor": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "attention_factor": 1.3,
        },
        {},
        512,
    ),
    "llama3": (
        {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 64},
        {},
        512,
    ),
    "longrope": (
        {"rope_type": "longrope", **LONG, "factor": 4.0, "original_max_position_embeddings": 128},
        {},
        512,
    ),
}


def assert_positions_equal(folder: Path, want: torch.Tensor, tokens: list[int]) -> None:
    runner = open_runner(folder)
    (got,) = Probe(runner).step({1: (0, tokens)})
    runner.close()
    for position in (5, 500):
        torch.testing.assert_close(got[position], want[position], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.sampled(4)
def test_logits_equal_transformers_at_positions_5_and_500(name: str, tmp_path: Path) -> None:
    parameters, special, context = TYPES[name]
    parameters = {"rope_theta": 10_000.0, **parameters}
    model = make_model(tmp_path, "llama", rope_parameters=parameters, **special)
    tokens = random_tokens(LENGTH)
    assert_positions_equal(tmp_path, expected_logits(model, tokens), tokens)
    config = RunnerConfig(model=str(tmp_path), device="cpu", max_total_tokens=64)
    runner, info = build_runner(config, page_size=4, max_running_requests=1)
    runner.close()
    assert info.context_length == context


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["null", "linear", "yarn", "llama3", "longrope"])
@pytest.mark.sampled(3)
def test_the_older_form_of_the_config_is_read_alike(name: str, key: str, tmp_path: Path) -> None:
    parameters, special, _ = TYPES[name]
    model = make_model(
        tmp_path, "llama", rope_parameters={"rope_theta": 700.0, **parameters}, **special
    )
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    given = config.pop("rope_parameters")
    config["rope_theta"] = given.pop("rope_theta")
    kind = given.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {**given, key: kind}
    path.write_text(json.dumps(config))
    tokens = random_tokens(LENGTH)
    assert_positions_equal(tmp_path, expected_logits(model, tokens), tokens)


def test_phi3_long_rope_under_its_first_name(tmp_path: Path) -> None:
    parameters = {"rope_theta": 10_000.0, "rope_type": "longrope", **LONG}
    model = make_model(
        tmp_path,
        "phi3",
        rope_parameters=parameters,
        original_max_position_embeddings=64,
    )
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config["rope_scaling"] = {"type": "su", **LONG}
    path.write_text(json.dumps(config))
    tokens = random_tokens(LENGTH)
    assert_positions_equal(tmp_path, expected_logits(model, tokens), tokens)


def test_an_unknown_type_stops_the_start(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_type": "spiral", "rope_theta": 1e4}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"'spiral'.*default, linear, dynamic, yarn, llama3"):
        open_runner(tmp_path)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "linear"}, "factor is absent; it must be a number"),
        ({"type": "linear", "factor": "four"}, "factor"),
        ({"type": "llama3", "factor": 8.0}, "low_freq_factor is absent"),
        (
            {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
            "must be a list of 4 numbers",
        ),
    ],
    ids=["no-factor", "factor-a-word", "no-low-frequency", "short-list"],
)
def test_missing_or_wrong_numbers_are_named(parameters: dict[str, Any], message: str) -> None:
    config = {"max_position_embeddings": 64, "rope_scaling": parameters}
    with pytest.raises(ModelError, match=message):
        parse_rope(config, 8).table(RopeLayout(16))


def test_a_context_beyond_the_models_own_is_refused_with_both_numbers(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"513.*512"):
        open_runner(tmp_path, context_length=513)
