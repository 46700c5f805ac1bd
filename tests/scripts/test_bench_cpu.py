"""The five scenarios against a scripted server, and the arithmetic of the floors."""

from __future__ import annotations

import asyncio
import runpy

import pytest
from aiohttp import web

from ops.cpu import build
from runtime.examination import Machine
from scripts import _floors as floors_module
from scripts import bench_cpu
from server.bench.target import Target
from tests.server.bench.fake_openai import FakeServer, serving

# 1 GB/s and 1 TFLOP/s; 1 MB of weights, 2 and 1 MFLOP a token, 10 flops a pair.
FLOORS = floors_module.Floors(Machine(1e9, 1e12), floors_module.ModelSize(1e6, 2e6, 1e6, 10.0))


def test_prefill_floor_counts_linear_layers_and_causal_attention():
    assert FLOORS.prefill(100) == pytest.approx((100 * 2e6 + 10 * 100 * 50) / 1e12)
    assert FLOORS.prefill(10, 90) == pytest.approx((10 * 2e6 + 10 * 10 * 95) / 1e12)


def test_decode_floor_is_memory_for_few_rows_and_arithmetic_for_many():
    assert FLOORS.decode_step(1) == pytest.approx(1e6 / 1e9)
    assert FLOORS.decode_step(1000) == pytest.approx(1000 * 3e6 / 1e12)


def test_floors_follow_the_form_of_the_weights():
    size = floors_module.ModelSize()
    assert size.in_form("bfloat16") is size
    # 106.15 million weights of linear layers, 28.3 of the output layer.
    int4 = size.in_form("int4")
    assert int4.weight_bytes == pytest.approx(106.15e6 * 0.625 + 28.3e6 * 1.0625)
    assert (int4.token_flops, int4.head_flops) == (size.token_flops / 2, size.head_flops / 2)
    assert size.in_form("float32").weight_bytes == pytest.approx(4 * 134.45e6)
    assert int4.attention_flops == size.attention_flops


async def scenario(key: str, together: int = 1):
    """The scenario's record; no answer begins before `together` requests are there at once."""
    enough = asyncio.Event()

    async def hold(request, body):
        if body["max_tokens"] > 8:  # not the warm-up's
            if fake.running == together:
                enough.set()
            await enough.wait()
        return await fake._stream(request, body)

    fake = FakeServer(hold)
    async with serving(fake) as url:
        target = Target(url, "", extra=bench_cpu.GREEDY)
        results = await bench_cpu.run_scenarios(target, [key], 1, FLOORS)
    fake.bodies = fake.bodies[4:]  # the warm-up
    return fake, results[key]


@pytest.mark.parametrize(
    ("key", "requests", "output_tokens", "together"),
    [
        ("s1", 6, 6 * 128, 1),
        ("s2", 64, 64 * 64, 16),
        ("s4", 32, 32 * 16, 8),
        ("s5", 200, 200 * 16, 200),
    ],
)
async def test_scenario_sends_its_requests(key, requests, output_tokens, together):
    fake, record = await scenario(key, together)
    assert (record["completed"], record["errors"]) == (requests, {})
    assert record["output_tokens"] == output_tokens
    assert fake.most_running == max(together, 2)  # 2: the warm-up's
    assert {body["model"] for body in fake.bodies} == {"fake"}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in fake.bodies)
    assert all(ratio > 0 for ratio in record["floor_ratios"].values())


async def test_prompts_have_the_lengths_of_their_scenario():
    lengths = {}
    for key in ("s1", "s2", "s4", "s5"):
        fake, _ = await scenario(key)
        lengths[key] = {len(body["prompt"].split()) for body in fake.bodies}
        if key == "s4":
            assert len({tuple(body["prompt"].split()[:1024]) for body in fake.bodies}) == 1
            assert len({body["prompt"] for body in fake.bodies}) == 32
    assert lengths["s1"] == {128}
    assert min(lengths["s2"]) >= 64
    assert max(lengths["s2"]) <= 256
    assert lengths["s4"] == {1056}
    assert lengths["s5"] == {32}


async def test_long_prompts_arrive_once_every_stream_has_32_tokens():
    fake, record = await scenario("s3")
    lengths = [len(body["prompt"].split()) for body in fake.bodies]
    assert lengths == [32] * 8 + [1500] * 4
    assert record["gap_before_ms"] is not None
    assert record["long_ttft_ms"]["max"] > 0
    assert record["output_tokens"] == 8 * 256 + 4 * 16


async def test_a_stream_that_fails_does_not_hold_up_the_long_prompts():
    async def fail_first(request, body):
        if body["max_tokens"] == 256 and not failed:
            failed.append(body)
            return web.json_response({"error": {"message": "no"}}, status=503)
        return await fake._stream(request, body)

    failed: list[dict] = []
    fake = FakeServer(fail_first)
    async with serving(fake) as url:
        target = Target(url, "fake")
        results = await bench_cpu.run_scenarios(target, ["s3"], 1, FLOORS)
    assert results["s3"]["completed"] == 11
    assert sum(results["s3"]["errors"].values()) == 1


def test_table_shows_median_and_range_over_the_runs():
    runs = [
        {
            "memory_mib": 100.0 + value,
            "results": {
                "s1": {"tpot_ms": {"p50": value}, "errors": {}, "short_answers": 0},
            },
        }
        for value in (3.0, 1.0, 2.0)
    ]
    text = bench_cpu.table(runs)
    assert "| s1 single | tpot.p50 | 2 | 1 to 3 | ms |" in text
    assert "| memory | after the run | 102 | 101 to 103 | MiB |" in text
    assert "s2" not in text


def test_failures_and_short_answers_are_said_under_the_table():
    record = {"errors": {"HTTP 503": 2}, "short_answers": 1}
    text = bench_cpu.table([{"memory_mib": None, "results": {"s1": record}}])
    assert "HTTP 503" in text
    assert "1 answers were shorter" in text


def test_unknown_scenario_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_cpu.parse(["--scenarios", "s1,s9"])
    assert "s9: must be of s1, s2, s3, s4, s5" in capsys.readouterr().err


def test_a_server_on_a_path_has_that_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "available_paths", build.available_paths)
    ran: list[str] = []
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: ran.append(name))
    exec(bench_cpu.ON_PATH.format(path="avx2"))
    assert (ran, build.available_paths(), build.choose_path()) == (["server"], ["avx2"], "avx2")


@pytest.mark.parametrize("option", ["--path avx2", "--shape qwen3-0.6b"])
def test_what_shapes_the_server_needs_one_that_is_started(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_cpu.parse(option.split())
    assert f"{option.split()[0]}: needs --serve" in capsys.readouterr().err
