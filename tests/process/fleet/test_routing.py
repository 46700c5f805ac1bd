"""Four engines of a tiny model behind the real routers: same answers, and prefixes found again."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.process.fleet.asking import MODEL, Question, ask_all, shared_prompts
from tests.process.fleet.environments import router_bin
from tests.process.fleet.processes import Router, engines, free_ports, get
from tests.process.fleet.routing import ROUTERS, expected_hit_rate, run

pytestmark = pytest.mark.slow
PREFIXES, TIMES = 80, 3


@pytest.fixture(scope="module")
def four(tiny_model, tmp_path_factory):
    router_bin()
    words = ["--model", str(tiny_model), "--port", "0", "--cpu-kernels", "torch"]
    words += ["--cache-dir", str(tmp_path_factory.mktemp("cache"))]
    with engines([*words, "--max-total-tokens", "65536"], 4) as replicas:
        yield {replica.url(): replica for replica in replicas}


def asked(engine):
    """(path, status) of everything that an engine was asked."""
    lines = [json.loads(line) for line in engine.lines if line.startswith('{"time"')]
    return {(line["path"], line["status"]) for line in lines}


@pytest.mark.parametrize("command", ROUTERS, ids=lambda command: command[0])
def test_a_router_finds_what_it_asks_for(four, command):
    with Router(command, list(four), free_ports(2)) as router:
        workers = router.ready()
        if command[0] == "sglang-router":  # the other one asks nothing of the kind
            assert {worker["model_id"] for worker in workers} == {MODEL}
            loads = get(router.address + "/get_loads")["workers"]
            assert [load["load"] for load in loads] == [0] * 4
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        sent = urllib.request.Request(
            router.address + "/v1/chat/completions",
            json.dumps(chat).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(sent, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 2
    assert {status for engine in four.values() for _, status in asked(engine)} == {200}


def test_cache_aware_routing_finds_twice_what_random_routing_does(four):
    """Routers deal out new prefixes by how busy the engines happen to be, up to all of them to one.
    So each engine could hold every prefix, and each comes so seldom that random routing mostly
    brings it to an engine that has not seen it: what is found then depends on the policy alone.
    """
    questions = [Question(prompt, max_tokens=4) for prompt in shared_prompts(PREFIXES, TIMES)]
    alone = [answer.text for answer in ask_all(next(iter(four)), questions)]
    for command in ROUTERS:
        rates = {}
        for policy in ("random", "cache_aware"):
            one = run(command, policy, list(four), free_ports(2), questions)
            assert all(answer.complete for answer in one.answers)
            assert [answer.text for answer in one.answers] == alone
            rates[policy] = one.hit_rate
        assert rates["cache_aware"] > 2 * rates["random"]
        # Of each prefix all but the first request, less the pages that prompts end in.
        assert rates["cache_aware"] > 0.9 * (1 - 1 / TIMES)
        assert rates["random"] == pytest.approx(expected_hit_rate(4, TIMES), rel=0.5)
    assert all(("/v1/completions", 200) in asked(engine) for engine in four.values())
