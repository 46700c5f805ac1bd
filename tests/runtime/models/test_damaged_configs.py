"""A config.json that holds anything is a model, or one sentence that says what is wrong with it.

Each key is left out, and given values of every type, huge, negative and zero.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from runtime.models.registry import FAMILIES
from runtime.rope_layout import RopeLayout
from tests.runtime.checkpoints.damage import MISSING, WRONG, outcome
from tests.runtime.models.read_model import read_model, ropes

ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    | {"mscale_all_dim": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
    {"rope_type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
    | {"original_max_position_embeddings": 16, "factor": 2.0},
]


def configs() -> dict[str, dict]:
    found = {}
    for kind in FAMILIES:
        shape = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
        shape |= {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 512}
        shape |= {"num_experts_per_tok": 2}
        config = json.loads(json.dumps(CONFIG_MAPPING[kind](**shape).to_dict(), default=str))
        found[kind] = config
        if kind == "llama":
            for rope in ROPES:
                old = {k: v for k, v in config.items() if k != "rope_parameters"}
                found[f"llama-{rope['rope_type']}"] = {**old, "rope_scaling": rope}
    old = {**shape, "model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2}
    old |= {"vocab_size": 9, "intermediate_size": 8, "hidden_activation": "gelu"}
    return {**found, "old-gemma3": old}


@pytest.mark.parametrize("config", configs().values(), ids=configs())
@pytest.mark.sampled(8)
def test_each_key_may_hold_anything(config):
    assert outcome(lambda: read_model(config)) is None
    refused = 0
    for place in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key, kept in list(place.items()):
            place[key] = object()
            is_read = outcome(lambda: read_model(config)) is not None
            for value in WRONG if is_read else ():
                place[key] = value
                if value is MISSING:
                    del place[key]
                refused += outcome(lambda: read_model(config)) is not None
            place[key] = kept
    assert refused > 100


def test_rope_tables_hold_no_nan():
    for config in configs().values():
        for rope in ropes(read_model(config)):
            assert torch.isfinite(rope.table(RopeLayout(24))).all(), rope
