"""Servers in processes of their own, beside what they generate: listings, health, metrics, origins."""

from __future__ import annotations

import http.client
import urllib.parse

import pytest
import requests

from tests.process.http_user import COUNTING, PATHS, together, unseen

pytestmark = pytest.mark.slow

ORIGIN = {"Origin": "http://localhost:5173"}


def test_the_model_is_listed(completions_user):
    listing = completions_user.get("/v1/models").json()
    assert listing["object"] == "list"
    for entry in listing["data"]:
        assert entry["object"] == "model"
        assert isinstance(entry["created"], int)
        assert {"id", "owned_by"} <= entry.keys()


def test_the_form_of_an_answer(user, kind):
    answer = user.generate(kind, "Hello", max_tokens=4)
    wanted = "text_completion" if kind == "completions" else "chat.completion"
    assert answer.json["object"] == wanted
    assert answer.json["id"]
    assert isinstance(answer.json["created"], int)
    assert answer.json["model"] == user.model
    (choice,) = answer.choices
    assert choice["index"] == 0
    assert choice["finish_reason"] in ("stop", "length")
    assert kind == "completions" or choice["message"]["role"] == "assistant"
    used = answer.usage
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]


def test_tokenize_counts_what_usage_counts(completions_user):
    body = {"model": completions_user.model, "prompt": "The quick brown fox"}
    ids = completions_user.post("/tokenize", body).json()["tokens"]
    answer = completions_user.generate("completions", "The quick brown fox", max_tokens=1)
    assert len(ids) == answer.usage["prompt_tokens"]


def test_a_crowd_of_health_checks_some_given_up(user, kind):
    def give_up():
        address = urllib.parse.urlsplit(user.url).netloc
        connection = http.client.HTTPConnection(address)
        connection.request("GET", "/health")
        connection.close()

    def healthy():
        assert user.get("/health").status_code == 200

    def generate():
        user.generate(kind, f"{unseen()} {COUNTING}", max_tokens=24)

    together([generate] * 4 + [healthy] * 32 + [give_up] * 32)
    user.assert_idle_soon()


def test_finished_and_abandoned_requests_are_counted(user, kind):
    before = user.metrics()
    tokens = 0
    for _ in range(5):
        tokens += user.generate(kind, f"{unseen()} hello").usage["completion_tokens"]
    for _ in range(5):
        with user.events(kind, f"{unseen()} {COUNTING}", max_tokens=800, ignore_eos=True) as events:
            next(events)
    user.assert_idle_soon()
    after = user.metrics()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["loomserve:requests_total"] == 11  # one of them asked whether it serves
    assert grown["loomserve:generation_tokens_total"] >= tokens


def test_pages_of_other_origins_may_read_every_kind_of_answer(chatter):
    """As --cors-allow-origins says."""
    asked = {**ORIGIN, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "content-type"
    preflight = requests.options(chatter.url + PATHS["chat"], headers=asked, timeout=60)
    allowed = "access-control-allow-origin"
    assert allowed in preflight.headers
    assert allowed in chatter.ask("chat", "Hello", headers=ORIGIN).headers
    assert allowed in chatter.stream("chat", "Hello", headers=ORIGIN).headers
    assert allowed in chatter.ask("chat", "Hello", headers=ORIGIN, temperature=-1).headers
