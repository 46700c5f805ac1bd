"""Reads a model as serving does, without its weights."""

from __future__ import annotations

from runtime.models.family import Family
from runtime.models.registry import read_family
from runtime.models.rope import RopeSpec
from runtime.rope_layout import RopeLayout


def read_model(config):
    """The family of a config, its rope tables made."""
    family = read_family(config)
    for rope in ropes(family):
        rope.table(RopeLayout(min(family.context_length, 24)))
    return family


def ropes(family: Family) -> list[RopeSpec]:
    """The rotary embeddings of a model, each once."""
    return list({id(rope): rope for rope in family.ropes}.values())
