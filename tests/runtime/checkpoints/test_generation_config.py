"""The sampling settings that a model brings with it."""

from __future__ import annotations

import json

import pytest

from runtime.checkpoints.generation_config import read_sampling
from runtime.errors import ModelError
from tests.runtime.checkpoints.damage import MISSING, WRONG, outcome

SETTINGS = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0,
    "repetition_penalty": 1.05,
    "max_new_tokens": 4096,
}


def test_settings_are_those_of_the_file_and_no_others(tmp_path):
    path = tmp_path / "generation_config.json"
    assert read_sampling(tmp_path) == {}
    others = {"do_sample": False, "eos_token_id": [1, 2], "max_length": 20, "num_beams": 4}
    path.write_text(json.dumps({**others, **SETTINGS}))
    found = read_sampling(tmp_path)
    assert found == SETTINGS
    assert {name: type(value) for name, value in found.items()} == {
        name: int if name in ("top_k", "max_new_tokens") else float for name in SETTINGS
    }
    path.write_text(json.dumps({"temperature": None, "top_k": 5}))
    assert read_sampling(tmp_path) == {"top_k": 5}


def test_a_file_that_is_asked_for_must_be_there(tmp_path):
    with pytest.raises(ModelError, match=r"generation_config\.json: cannot be read"):
        read_sampling(tmp_path, required=True)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "a number from 0 to 1000"),
        ("temperature", "0.6", "a number from 0 to 1000"),
        ("temperature", float("nan"), "a number from 0 to 1000"),
        ("top_p", 1.5, "a number from 0 to 1"),
        ("top_k", 20.0, "an integer from -1"),
        ("top_k", True, "an integer from -1"),
        ("min_p", 10**400, "a number from 0 to 1"),
        ("repetition_penalty", 0, "a number from 0.001 to 1000"),
        ("max_new_tokens", 0, "an integer from 1"),
    ],
)
def test_wrong_settings_are_named_with_what_is_allowed(tmp_path, name, value, allowed):
    (tmp_path / "generation_config.json").write_text(json.dumps({**SETTINGS, name: value}))
    with pytest.raises(ModelError, match=rf"generation_config\.json: {name} is .*{allowed}"):
        read_sampling(tmp_path)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_may_hold_anything(tmp_path, name):
    for value in WRONG:
        content = SETTINGS if value is MISSING else {**SETTINGS, name: value}
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
        said = outcome(lambda: read_sampling(tmp_path))
        assert said is None or name in said
