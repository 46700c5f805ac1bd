"""How often prompts that share a prefix find it cached, under a router's policies."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from tests.process.fleet.asking import Answer, Question, ask_all
from tests.process.fleet.processes import Router

ROUTERS = (("sglang-router", "launch"), ("vllm-router",))


@dataclass(frozen=True, slots=True)
class Run:
    """Args: hit_rate: of the prompt tokens that were looked up, those found in a prefix cache."""

    answers: list[Answer]
    hit_rate: float


def run(
    command: Sequence[str],
    policy: str,
    engines: Sequence[str],
    port: int,
    questions: list[Question],
) -> Run:
    """Asks through a router that has just started; the engines' caches are emptied before.

    Args: engines: their addresses. port: of the router; it takes the one behind it, too.
    """
    for url in engines:
        urllib.request.urlopen(urllib.request.Request(url + "/flush_cache", b"")).close()
    before = _looked_up_and_found(engines)
    with Router(command, engines, port, policy) as router:
        router.ready()
        answers = ask_all(router.address, questions)
    counts = zip(_looked_up_and_found(engines), before, strict=True)
    looked_up, found = (now - then for now, then in counts)
    return Run(answers, found / looked_up)


def _looked_up_and_found(urls: Sequence[str]) -> list[float]:
    """Prompt tokens, over all engines."""
    texts = [urllib.request.urlopen(url + "/metrics", timeout=30).read().decode() for url in urls]
    patterns = [rf"^loomserve:{name}_tokens_total{{.*}} (\S+)$" for name in ("prompt", "cached")]
    return [
        sum(float(value) for text in texts for value in re.findall(pattern, text, re.M))
        for pattern in patterns
    ]


def expected_hit_rate(engines: int, times: int) -> float:
    """Of random routing, where nothing is evicted and a prompt is its prefix: a prefix that comes
    `times` times is computed once on each of the engines that see it."""
    seen = engines * (1 - (1 - 1 / engines) ** times)
    return 1 - seen / times
