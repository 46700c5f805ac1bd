"""The simulator's page in a browser: the scheduler itself under Pyodide."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime.config import RunnerConfig
from runtime.errors import LoomserveError
from runtime.simulation.machines import machine
from runtime.simulation.what_if import ObservedRun, decisions
from runtime.simulation.workloads import Workload
from scripts import simulate
from scripts._report_file import write_report
from server.args import parse_args
from server.simulator_files import fetch_pyodide
from tests.missing import missing
from tests.server.server_kit import sim_server
from tests.values import present

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

pytestmark = pytest.mark.slow
TRACES = Path(__file__).parents[1] / "runtime" / "simulation" / "traces"
SMALL = {
    "requests": "40",
    "rate": "4",
    "input_from": "50",
    "input_to": "300",
    "output_from": "40",
    "output_to": "80",
}
LONG = {
    "requests": "3",
    "rate": "0.5",
    "input_from": "1500",
    "input_to": "3000",
    "output_from": "5",
    "output_to": "20",
}


@pytest.fixture(scope="module")
def pyodide() -> RunnerConfig:
    """Options of a server that has Pyodide."""
    device = parse_args([]).runner  # with $LOOMSERVE_CACHE, where it is set
    try:
        fetch_pyodide(device.cache_folder, print)
    except LoomserveError as error:
        missing(str(error))
    return device


@pytest.fixture(scope="module")
def url(pyodide: RunnerConfig) -> Iterator[str]:
    """Of the page."""
    with sim_server(device=pyodide) as served:
        yield served.url + "/simulator"


def fill(page: Page, kind: str, values: dict[str, str]) -> None:
    for name, value in values.items():
        page.locator(f"[data-workload={kind}] [name={name}]").fill(value)


def load_small(page: Page) -> None:
    """A small load on the small machine, run. Python itself takes its time to start."""
    page.set_default_timeout(120_000)
    page.locator("#machine option").first.wait_for(state="attached")
    page.locator("#machine").select_option("cpu-smollm2-135m")
    fill(page, "chat", SMALL)
    fill(page, "long", LONG)
    page.get_by_role("button", name="Load and run").click()
    page.get_by_role("row", name="Largest gap between tokens").wait_for()


def largest_gap_ms(page: Page, column: int = 0) -> float:
    cell = (
        page.get_by_role("row", name="Largest gap between tokens").get_by_role("cell").nth(column)
    )
    value, unit = present(re.match(r"([\d.,]+) (ms|s)", cell.inner_text())).groups()
    return float(value.replace(",", "")) * (1 if unit == "ms" else 1000)


def test_slider_changes_the_largest_gap_and_a_request_says_why_it_waited(open_page, url):
    page = open_page(url)
    load_small(page)
    before = largest_gap_ms(page)
    slider = page.locator(".setting").first.get_by_role("slider").first
    slider.focus()
    slider.press("End")  # whole prompts
    page.get_by_role("heading", name="chunked_prefill_size=0").first.wait_for()
    assert largest_gap_ms(page) > 5 * before
    page.locator(".requests tbody button").first.click()
    told = page.locator(".request")
    assert told.get_by_role("table").locator("th").all_inner_texts()
    assert re.search(r"prompt tokens · came at .* first token after", told.inner_text())
    assert page.locator(".timeline-summary").inner_text().startswith(tuple("123456789"))

    others = page.locator(".setting").first.get_by_label("other options")
    others.fill("page_size=many")
    others.press("Tab")
    page.get_by_role("alert").filter(has_text="page_size 'many': must be a value of").wait_for()
    others.fill("page_size=1")
    others.press("Tab")
    page.get_by_role("heading", name="A: chunked_prefill_size=0 page_size=1").first.wait_for()
    assert page.locator("#trouble").inner_text() == "", "what was wrong is told no longer"


def test_decisions_are_those_of_this_python_to_the_byte(open_page, url, tmp_path):
    """Of a made-up load with a chunk sizer by time and a small pool, and of a recorded trace."""
    page = open_page(url)
    load_small(page)
    setting = page.locator(".setting").first
    setting.get_by_label("a step takes at most").fill("60")
    setting.get_by_label("tokens of the KV pool").fill("6400")
    setting.get_by_label("order of the queue").select_option("hrrn")
    with page.expect_download() as saved:
        setting.get_by_role("button", name="Save its decisions").click()
    here = decisions(json.dumps(record_of()))
    assert here.count('"event":"commit"') > 300
    assert Path(saved.value.path()).read_bytes() == here.encode()

    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(gzip.decompress((TRACES / "version_1.jsonl.gz").read_bytes()))
    page.get_by_text("What is served").click()
    page.get_by_label("of a recorded trace").check()
    page.locator("#trace").set_input_files(trace)
    page.get_by_text("step times fitted to").wait_for()
    page.locator("#progress").wait_for(state="hidden")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save its decisions").first.click()
    here = decisions(json.dumps({"machine": None, "trace": str(trace)}))
    assert Path(saved.value.path()).read_bytes() == here.encode()


def test_two_settings_stand_side_by_side_and_a_run_can_be_stopped(open_page, url):
    page = open_page(url, viewport={"width": 360, "height": 800}, color_scheme="dark")
    load_small(page)
    page.get_by_label("compare two settings").check()
    other = page.locator(".setting").nth(1)
    other.get_by_label("prompts and running requests share steps").uncheck()
    page.get_by_role("heading", name="B: disable_mixed_chunk=true").first.wait_for()
    assert largest_gap_ms(page, 1) > 2 * largest_gap_ms(page, 0), "strict prefill holds streams up"
    assert page.locator(".timeline").count() == 2
    page.get_by_label("Requests by").select_option("change of the largest gap")
    first = page.locator(".requests tbody tr").first.get_by_role("cell").all_inner_texts()
    assert re.search(r"^\+[\d.,]+ (ms|s) \(\+[\d,]+ %\)$", first[7])
    assert page.evaluate("document.documentElement.scrollWidth") <= 360

    page.get_by_text("What is served").click()
    fill(page, "chat", {"requests": "5000"})
    page.get_by_role("button", name="Load and run").click()
    page.get_by_text(re.compile(r"^A: [1-9][\d,]* steps, \d+ requests ended")).wait_for(
        timeout=60_000
    )
    page.get_by_role("button", name="Stop").click()
    page.locator("#progress").wait_for(state="hidden")
    assert page.get_by_role("heading", name="B: disable_mixed_chunk=true").first.is_visible()


def test_what_the_server_has_recorded_is_run_for_who_has_the_key(open_page, pyodide, tmp_path):
    (trace := tmp_path / "trace.jsonl").write_text(decisions(json.dumps(record_of())))
    with sim_server(device=pyodide, record=str(trace), api_key="secret") as served:
        page = open_page(served.url + "/simulator", expected_errors=("401",))
        page.set_default_timeout(120_000)
        page.locator("#machine option").first.wait_for(state="attached")
        page.get_by_label("of a recorded trace").check()
        page.get_by_role("button", name="What this server has recorded").click()
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use it").click()
        page.get_by_text(re.compile("43 requests .* step times fitted to")).wait_for()
        page.get_by_role("row", name="Largest gap between tokens").wait_for()
        setting = page.locator(".setting").first
        assert setting.get_by_label("order of the queue").input_value() == "hrrn", "as recorded"


def test_without_pyodide_the_page_says_what_fetches_it(open_page, tmp_path):
    with sim_server(device=RunnerConfig(cache_dir=str(tmp_path))) as served:
        page = open_page(served.url + "/simulator")
        page.get_by_text("loomserve fetch-pyodide").wait_for()
        assert page.get_by_role("button", name="Load and run").is_disabled()


def test_file_of_its_own_shows_the_runs_without_a_server(open_page, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    options = ["--machine", "cpu-smollm2-135m", "--requests", "40", "--rate", "4"]
    options += ["--input-tokens", "50:2000", "--output-tokens", "20:60", "--html", str(path)]
    monkeypatch.setattr(
        sys, "argv", ["simulate.py", *options, "--what-if", "disable_mixed_chunk=true"]
    )
    assert simulate.main() == 0
    page = open_page(path.as_uri())
    row = page.get_by_role("row", name="Largest gap between tokens")
    assert row.get_by_role("cell").count() == 2
    assert largest_gap_ms(page, 1) > largest_gap_ms(page, 0)
    page.get_by_label("Requests by").select_option("slowest first token")
    page.locator(".requests tbody button").first.press("Enter")
    assert page.locator(".request h4").all_inner_texts() == [
        "simulated",
        "disable_mixed_chunk=true",
    ]
    assert page.locator(".request .waits th").count() >= 1


def test_run_that_refuses_everybody_says_why(open_page, tmp_path):
    arrivals = Workload(5, input_tokens=(90, 90), output_tokens=(9, 9)).arrivals()
    run = ObservedRun(machine("cpu-smollm2-135m"), arrivals, {"capacity_tokens": 64})
    run.finish()
    write_report(tmp_path / "report.html", "nothing", [], [run.report("a tiny pool")])
    page = open_page((tmp_path / "report.html").as_uri())
    told = page.locator(".error").inner_text()
    assert told.startswith("a tiny pool refused r0, and 4 more: ")
    assert "can never fit the KV cache" in told
    assert page.locator(".timeline-summary").inner_text() == "No steps yet."


def test_ten_thousand_steps_are_drawn_within_a_second(open_page, tmp_path, capsys):
    arrivals = Workload(240, rate=1.5, input_tokens=(20, 200), output_tokens=(300, 400)).arrivals()
    run = ObservedRun(machine("cpu-smollm2-135m"), arrivals, {"capacity_tokens": 65_536})
    run.finish()
    assert run.simulator.steps >= 10_000
    write_report(tmp_path / "report.html", "many steps", [], [run.report("all")])
    page = open_page((tmp_path / "report.html").as_uri())
    page.wait_for_function("performance.getEntriesByName('redraw', 'measure').length")
    took_ms = page.evaluate("performance.getEntriesByName('redraw', 'measure')[0].duration")
    with capsys.disabled():
        print(f"\n{run.simulator.steps} steps drawn in {took_ms:.0f} ms")
    assert took_ms < 1000


def record_of() -> dict:
    """What a page has loaded that was filled with the small load, and set in the test of decisions."""
    workloads = []
    for name, values, seed in (("chat", SMALL, 0), ("long", LONG, 1)):
        number = {
            key: int(value) if "." not in value else float(value) for key, value in values.items()
        }
        spans = {
            f"{kind}_tokens": [number.pop(f"{kind}_from"), number.pop(f"{kind}_to")]
            for kind in ("input", "output")
        }
        shared = {"prefix_groups": 0, "prefix_tokens": 1000 if name == "chat" else 0}
        workloads.append({"name": name, **number, **spans, **shared, "seed": seed})
    options = {"tpot_slo_ms": "60", "capacity_tokens": "6400", "schedule_policy": "hrrn"}
    return {"machine": "cpu-smollm2-135m", "workloads": workloads, "options": options}
