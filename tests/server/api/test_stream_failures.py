"""A request that cannot go on, on every endpoint: a typed error, and others are not touched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest

from runtime.simulation.sim_runner import SimRunner
from tests.server.server_kit import error_body, say, sim_server

TEXT = "0123456789" * 4


class FailingRunner(SimRunner):
    """A row whose prompt holds FAIL gives no third token."""

    def run(self, batch, masks):
        output = super().run(batch, masks)
        for index, row in enumerate(batch.sampled):
            prompt = bytes(token % 256 for token in batch.requests[row].input_ids)
            if b"FAIL" in prompt and batch.output_counts[index] == 2:
                output.failed[index] = "the logits are not finite"
        return output


@pytest.fixture(scope="module")
def failing():
    with sim_server(runner_class=FailingRunner) as served:
        yield served


def test_whole_answers_are_a_500_of_their_protocol(failing):
    with pytest.raises(openai.InternalServerError, match="not finite") as caught:
        failing.chat(say(TEXT) + "FAIL")
    assert error_body(caught.value)["type"] == "server_error"
    with pytest.raises(openai.InternalServerError):
        failing.openai.completions.create(model=failing.model, prompt=say(TEXT) + "FAIL")
    with pytest.raises(openai.InternalServerError):
        failing.openai.responses.create(model=failing.model, input=say(TEXT) + "FAIL")
    with pytest.raises(anthropic.InternalServerError) as refused:
        failing.anthropic.messages.create(
            model=failing.model, max_tokens=50,
            messages=[{"role": "user", "content": say(TEXT) + "FAIL"}],
        )  # fmt: skip
    assert error_body(refused.value)["error"]["type"] == "api_error"


def test_chat_stream_ends_with_one_error_event_and_others_go_on(failing):
    def other():
        chunks = failing.chat(say(TEXT), stream=True)
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(other) for _ in range(4)]
        got = []
        with pytest.raises(openai.APIError, match="not finite") as caught:
            got.extend(failing.chat(say(TEXT) + "FAIL", stream=True))
        assert [future.result() for future in others] == [TEXT] * 4
    assert "".join(c.choices[0].delta.content or "" for c in got) == TEXT[:2]
    assert not any(chunk.choices[0].finish_reason for chunk in got), "no finish is faked"
    assert "Traceback" not in str(caught.value)


def test_responses_stream_fails_with_its_own_event(failing):
    events = list(
        failing.openai.responses.create(model=failing.model, input=say(TEXT) + "FAIL", stream=True)
    )
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert "not finite" in events[-1].response.error.message
    assert not any(event.type == "response.completed" for event in events)


def test_messages_stream_raises_in_the_client(failing):
    with (
        pytest.raises(anthropic.APIStatusError, match="not finite") as caught,
        failing.anthropic.messages.stream(
            model=failing.model, max_tokens=50,
            messages=[{"role": "user", "content": say(TEXT) + "FAIL"}],
        ) as stream,
    ):  # fmt: skip
        list(stream)
    assert error_body(caught.value)["error"]["type"] == "api_error"
