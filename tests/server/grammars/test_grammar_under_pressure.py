"""Grammars while requests are retracted and computed again, with overlap and without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.simulation.sim_runner import SimRunner
from tests.server.server_kit import say, sim_server


class SmallPool(SimRunner):
    """KV for about three of the requests below, and steps that take their time."""

    def __init__(self, script, vocab_size):
        super().__init__(
            script, vocab_size=vocab_size, max_total_tokens=640, step_seconds=lambda batch: 0.0005
        )


@pytest.mark.parametrize("disable_overlap", [False, True], ids=["overlap", "no overlap"])
def test_retracted_requests_still_follow_their_grammars(disable_overlap):
    schedule = {"schedule_conservativeness": 0.0, "chunked_prefill_size": 32}
    with sim_server(
        runner_class=SmallPool, scheduler=schedule, context_length=600,
        disable_overlap=disable_overlap,
    ) as served:  # fmt: skip

        def ask(number):
            # What the model would say breaks the grammar at a place of its own.
            said = "ab" * (10 + number) + "!"
            fields = {"guided_regex": "(ab){60}c", "cache_salt": str(number)}
            choice = served.chat(say(said), max_tokens=200, extra_body=fields).choices[0]
            return choice.message.content, choice.finish_reason

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(8)))
        statistics = served.service.engine.scheduler.statistics()
    assert answers == [("ab" * 60 + "c", "stop")] * 8
    assert statistics.counters.retractions > 0, "else this would prove nothing"
