"""Random conversations under every template at hand, as transformers and plain jinja2 render them."""

from __future__ import annotations

import pytest

from tests.server.formats.random_chats import Checker, Draw, own_templates, templates_of_packages

CHATS = 12
MODELS = own_templates() | templates_of_packages()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sampled(5)
def test_random_chats_are_rendered_as_references_render_them(model):
    checker = Checker(MODELS[model])
    for seed in range(CHATS):
        checker.check(Draw(seed).chat())
    assert checker.equal + checker.refused == CHATS
    assert checker.equal >= CHATS // 4, "most chats are taken"
