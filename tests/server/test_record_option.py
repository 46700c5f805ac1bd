"""--record: the trace of a served run can be read and replayed."""

from __future__ import annotations

from runtime.config import SchedulerConfig
from runtime.simulation.trace import read_trace
from server.args import ServerConfig
from server.launcher import Parts, _make_scheduler, make_service
from tests.fakes import IM_END, byte_tokenizer, fake_runner, fake_server


async def test_every_plan_and_commit_of_a_run_is_in_the_trace(tmp_path):
    path = tmp_path / "run.trace"
    runner = fake_runner()
    config = SchedulerConfig(
        capacity_tokens=runner.info.max_total_tokens,
        context_length=2048,
        eos_token_ids=frozenset({IM_END}),
        max_running_requests=16,
    )
    parts = Parts(runner, _make_scheduler(config, str(path)), byte_tokenizer(), "fake")
    async with fake_server(make_service(ServerConfig(port=0), parts)) as server:
        for i in range(3):
            await server.complete(f"prompt {i}", max_tokens=5)
        await server.wait_idle()
        steps = server.service.engine.records.total
    kinds = [event["event"] for _, event in read_trace(path).events]
    assert kinds.count("add") == 3
    assert kinds.count("commit") == steps
    assert kinds.count("plan") >= steps
