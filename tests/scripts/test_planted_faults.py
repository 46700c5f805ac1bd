"""The mistakes that `scripts/plant_faults.py` plants can still be planted, and are mistakes in Python."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from scripts.faults.plants import AREAS, PLANTS

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_a_hundred_at_least_in_every_area():
    assert len(PLANTS) >= 100
    assert {plant.area for plant in PLANTS} == set(AREAS)


@pytest.mark.parametrize("number", range(len(PLANTS)))
def test_each_can_be_planted(number):
    plant = PLANTS[number]
    text = (ROOT / plant.file).read_text()
    assert text.count(plant.old) == 1, f"{plant.file}: {plant.old!r}: choose what stands there once"
    assert ast.dump(ast.parse(text.replace(plant.old, plant.new))) != syntax_of(text)


@functools.cache
def syntax_of(text):
    return ast.dump(ast.parse(text))


@pytest.mark.parametrize("area", AREAS)
def test_the_tests_of_an_area_are_there(area):
    assert all((ROOT / tests).exists() for tests in AREAS[area])
