"""What a model's generation_config.json says holds on every route, unless the request says more."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from runtime.errors import ModelError
from server.generation.params import SamplingDefaults
from server.loading import sampling_defaults
from tests.fakes import fake_runner, fake_server, make_fake_service

SETTINGS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.8,
    "top_k": 7,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
}
MESSAGES = [{"role": "user", "content": "hi"}]


def served(seen: list, defaults: SamplingDefaults):
    """A service that notes how each request is sampled."""

    def script(request, index: int) -> int:
        seen.append(request)
        return ord("a")

    return make_fake_service(fake_runner(script), defaults=defaults)


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/completions", {"prompt": "hi"}, "max_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "max_tokens"),
        ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
        ("/v1/messages", {"messages": MESSAGES}, "max_tokens"),
        ("/generate", {"text": "hi"}, "max_new_tokens"),
    ],
    ids=["completions", "chat", "responses", "messages", "generate"],
)
async def test_every_route_takes_the_models_settings_and_the_requests_own_before_them(
    path, body, limit
):
    seen: list = []
    async with fake_server(served(seen, SamplingDefaults(**SETTINGS, max_new_tokens=3))) as server:

        async def sampled(**fields):
            seen.clear()
            own = {"sampling_params": fields} if path == "/generate" else fields
            status, answer = await server.post(path, {"model": "fake", **body, **own})
            assert status == 200, answer
            assert len({request.request_id for request in seen}) == 1
            return {key: getattr(seen[0].sampling, key) for key in SETTINGS}, len(seen)

        # Anthropic's API asks for a limit in every request.
        needed = {limit: 3} if path == "/v1/messages" else {}
        assert await sampled(**needed) == (SETTINGS, 3)
        own = {"temperature": 0.9, "top_p": 1.0, "top_k": 3}
        assert await sampled(**own, **{limit: 5}) == ({**SETTINGS, **own}, 5)
        _, info = await server.get("/server_info")
        assert info["sampling_defaults"] == {**SETTINGS, "max_new_tokens": 3}


def test_the_option_chooses_whose_settings_are_taken(tmp_path):
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, temperature in ((model, 0.3), (other, 0.7)):
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps({"temperature": temperature}))
    assert sampling_defaults("none", model) == SamplingDefaults()
    assert sampling_defaults("auto", model) == SamplingDefaults(temperature=0.3)
    assert sampling_defaults("auto", tmp_path) == SamplingDefaults()
    assert sampling_defaults(str(other), model) == SamplingDefaults(temperature=0.7)
    with pytest.raises(ModelError, match=r"nothing/generation_config\.json: cannot be read"):
        sampling_defaults(str(tmp_path / "nothing"), model)
    (model / "generation_config.json").write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(ModelError, match=r"temperature is 'hot'; it must be a number"):
        sampling_defaults("auto", model)


def test_without_a_model_of_its_own_mind_sampling_is_plain():
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert dataclasses.asdict(SamplingDefaults()) == {**plain, "max_new_tokens": None}
