"""`loomserve bench` from its words to its files."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from runtime.errors import ConfigError
from server.__main__ import main as loomserve
from server.bench.client import first_model, open_session
from server.bench.command import main
from server.bench.console import table, warnings
from server.bench.options import parse
from server.bench.target import Target
from tests.server.bench.fake_openai import FakeServer, serving
from tests.server.bench.scripted import answered, run_of

SMALL = ("--requests", "6", "--prompt-tokens", "5", "--output-tokens", "4", "--concurrency", "2")


@contextmanager
def served(*fakes: FakeServer):
    """Their addresses; they run in a thread, since the command brings a loop of its own."""
    started, urls = threading.Event(), []
    shared: dict = {}

    async def run() -> None:
        shared["loop"], shared["end"] = asyncio.get_running_loop(), asyncio.Event()
        async with serving(fakes[0]) as first, serving(fakes[-1]) as last:
            urls.extend([first, last])
            started.set()
            await shared["end"].wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert started.wait(20)
        yield urls[: len(fakes)]
    finally:
        shared["loop"].call_soon_threadsafe(shared["end"].set)
        thread.join()


def test_a_run_prints_its_figures_and_writes_what_was_asked_for(tmp_path, capsys):
    output, html = tmp_path / "requests.jsonl", tmp_path / "report.html"
    with served(FakeServer()) as (url,):
        words = ["--base-url", url, *SMALL, "--slo", "ttft=60000", "--json"]
        assert main([*words, "--output", str(output), "--html", str(html)]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("6 of 6 requests in") for line in text)
    assert any("100.0% kept ttft=60000 ms" in line for line in text)
    assert any("of a core" in line for line in text)
    summary = json.loads(last)
    assert summary["completed"] == 6
    assert summary["slo_attainment"] == 1.0
    assert summary["load"]["arrivals"] == "closed loop"
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(records) == 6
    first_tokens = [one["token_times_s"][0] - one["start_s"] for one in records]
    assert max(first_tokens) * 1e3 == pytest.approx(summary["ttft_ms"]["max"], abs=0.01)
    assert sum(one["completion_tokens"] for one in records) == summary["output_tokens"]
    assert html.read_text().startswith("<!doctype html>")


def test_two_servers_are_loaded_in_turn_with_the_same_requests(capsys):
    one, other = FakeServer(), FakeServer()
    with served(one, other) as (first, second):
        words = ["--base-url", first, "--compare", second, "--pairs", "2", *SMALL, "--json"]
        assert main(words) == 0
    *text, last = capsys.readouterr().out.splitlines()
    prompts = [[body["prompt"] for body in fake.bodies] for fake in (one, other)]
    assert sorted(prompts[0]) == sorted(prompts[1])
    assert len(set(prompts[0])) == 12  # another pair, other words
    titles = [line for line in text if line.startswith(("first,", "second,"))]
    assert titles == ["first, pair 1", "second, pair 1", "second, pair 2", "first, pair 2"]
    found = json.loads(last)
    assert sorted(found["runs"]) == sorted(titles)
    rates = [found["runs"][f"{who}, pair 1"]["output_tokens_per_s"] for who in ("first", "second")]
    assert found["ratios"]["output_tokens_per_s"]["pairs"] == 2
    spread = found["ratios"]["output_tokens_per_s"]
    assert spread["min"] <= rates[1] / rates[0] * 1.001
    assert rates[1] / rates[0] <= spread["max"] * 1.001


def test_the_search_halves_between_the_rates_that_were_kept_and_missed(capsys):
    """The second run is refused, whatever its rate; the others are served."""

    async def refuse_second(request, body):
        if 4 < len(fake.bodies) <= 8:
            raise RuntimeError
        return await fake._stream(request, body)

    fake = FakeServer(refuse_second)
    with served(fake) as (url,):
        words = ["--base-url", url, "--find-rate", "--rate", "100", "--trials", "3", "--json"]
        words += ["--arrivals", "constant", "--requests", "4", "--output-tokens", "4"]
        assert main([*words, "--slo", "e2e=60000"]) == 1
    *text, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    middle = pytest.approx(100 * 2**0.5)
    assert [trial["kept"] for trial in found["trials"]] == [True, False, True]
    assert [trial["rate"] for trial in found["trials"]] == [100, 200, middle]
    assert (found["highest_rate"], found["lowest_missed_rate"]) == (middle, 200)
    assert text[-1] == "The SLO is kept at 141/s and missed at 200/s."
    assert len({body["prompt"] for body in fake.bodies}) == 12


def test_no_server_is_exit_status_2(capsys, unused_tcp_port):
    words = ["--base-url", f"http://127.0.0.1:{unused_tcp_port}"]
    assert loomserve(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert f"http://127.0.0.1:{unused_tcp_port}: no server answers" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prompt-tokens", "many"], "--prompt-tokens 'many': must be N"),
        (["--requests", "0"], "--requests 0: must be above 0"),
        (["--concurrency", "-1"], "--concurrency -1: must be above 0"),
        (["--concurrency", "2", "--rate", "3"], "--concurrency: does not go with --rate"),
        (["--max-seconds", "0"], "--max-seconds 0: must be above 0"),
        (["--find-rate"], "--find-rate: needs --slo"),
        (
            ["--find-rate", "--slo", "ttft=1", "--arrivals", "ramp", "--ramp-to", "2"],
            "--find-rate: needs arrivals of one rate",
        ),
        (["--slo", "speed=3"], "--slo 'speed=3': must be of ttft=MS"),
        (["--attainment", "1.5"], "--attainment 1.5: must be"),
        (["--extra", "[1]"], "--extra '[1]': must be a JSON object"),
        (["--extra", "[]"], "--extra '[]': must be a JSON object"),
        (["--pairs", "2"], "--pairs: goes with --compare"),
        (["--prompt-tokens", "5:2"], "LOW:HIGH with LOW at most HIGH"),
        (["--prompt-tokens", "9" * 12], "must be from 1 to 1,000,000 tokens"),
        (["--requests", "9" * 14], "must be at most 1,000,000"),
        (["--requests", "900000", "--prompt-tokens", "9000"], "words; at most 100,000,000"),
        (["--base-url", "ftp://x"], "--base-url 'ftp://x': must be http:// or https://"),
        (["--base-url", ""], "--base-url '': must be http:// or https://"),
        (["--compare", "127.0.0.1"], "--compare '127.0.0.1': must be http:// or https://"),
        (["--html", "/no/such/folder/x.html"], "--html /no/such/folder/x.html: cannot be written"),
        (["--output", "/"], "--output /: cannot be written"),
        (["--workload", "azure", "--file", "/no/none.csv"], "--file /no/none.csv: cannot be read"),
        (["--workload", "azure"], "--file: goes with"),
        (["--rate", "nan"], "--rate nan: must be above 0"),
        (["--endpoint", "telegraph"], "--endpoint"),
    ],
)
def test_words_that_cannot_be_are_refused_before_anything_is_sent(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1


def test_a_run_that_asked_nothing_is_exit_status_2(capsys):
    with served(FakeServer()) as (url,):
        assert main(["--base-url", url, *SMALL[:6], "--rate", "1e-9", "--max-seconds", "0.05"]) == 2
    assert "nothing was asked within the time" in capsys.readouterr().err


async def test_what_a_server_says_of_a_missing_key_is_told():
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no API key was given"}}, status=401)

    app = web.Application()
    app.router.add_get("/v1/models", refuse)
    async with TestServer(app) as server:
        target = Target(base_url=str(server.make_url("")), model="")
        async with open_session(target) as session:
            with pytest.raises(ConfigError, match="401: no API key was given; see --api-key"):
                await first_model(session, target)


def test_failures_are_shown_by_kind_and_give_status_1(capsys):
    async def refuse(request, body):
        raise RuntimeError

    with served(FakeServer(refuse)) as (url,):
        assert main(["--base-url", url, *SMALL]) == 1
    assert "6 failed: HTTP 500" in capsys.readouterr().out


def test_what_makes_figures_doubtful_is_said():
    run = run_of(answered(100.0, 0.5, due=99.0), answered(100.0, 0.5, wanted_tokens=3))
    assert [text.split(" ")[1] for text in warnings(run.summary())] == ["requests", "1"]
    run.client["bottleneck"] = True
    run.answers[0].cut = True
    told = table(run.summary())
    assert "the client itself was the bottleneck" in told
    assert "1 requests were cut off" in told
    assert "up to 1000 ms later" in told
