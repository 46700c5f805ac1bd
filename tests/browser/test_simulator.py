"""The simulator's page in a browser: the scheduler itself under Pyodide."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runtime.errors import LoomserveError
from runtime.simulation.what_if import decisions
from server.args import parse_args
from server.simulator_files import fetch_pyodide
from tests.browser.conftest import missing
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
def url() -> Iterator[str]:
    """Of the page, on a server that has Pyodide."""
    device = parse_args([]).runner  # with $LOOMSERVE_CACHE, where it is set
    try:
        fetch_pyodide(device.cache_folder, print)
    except LoomserveError as error:
        missing(str(error))
    with sim_server(device=device) as served:
        yield served.url + "/simulator"


def fill(page: Page, kind: str, values: dict[str, str]) -> None:
    for name, value in values.items():
        page.locator(f"[data-workload={kind}] [name={name}]").fill(value)


def load_small(page: Page) -> None:
    """A small load on the small machine, run."""
    page.locator("#machine option").first.wait_for(state="attached")
    page.locator("#machine").select_option("cpu-smollm2-135m")
    fill(page, "chat", SMALL)
    fill(page, "long", LONG)
    page.get_by_role("button", name="Load and run").click()
    page.get_by_role("row", name="Largest gap between tokens").wait_for(timeout=60_000)


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


def test_decisions_are_those_of_this_python_to_the_byte(open_page, url, tmp_path):
    """Of a made-up load with a chunk sizer by time and a small pool, and of a recorded trace."""
    page = open_page(url)
    load_small(page)
    setting = page.locator(".setting").first
    setting.get_by_label("a step takes at most").fill("60")
    setting.get_by_label("tokens of the KV pool").fill("6400")
    setting.get_by_label("order of the queue").select_option("hrrn")
    with page.expect_download(timeout=60_000) as saved:
        setting.get_by_role("button", name="Save its decisions").click()
    here = decisions(json.dumps(record_of(page)))
    assert here.count('"event":"commit"') > 300
    assert Path(saved.value.path()).read_bytes() == here.encode()

    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(gzip.decompress((TRACES / "version_1.jsonl.gz").read_bytes()))
    page.get_by_label("of a recorded trace").check()
    page.locator("#trace").set_input_files(trace)
    page.get_by_text("step times fitted to").wait_for(timeout=60_000)
    page.locator("#progress").wait_for(state="hidden", timeout=60_000)
    with page.expect_download(timeout=60_000) as saved:
        page.get_by_role("button", name="Save its decisions").first.click()
    here = decisions(json.dumps({"machine": None, "trace": str(trace)}))
    assert Path(saved.value.path()).read_bytes() == here.encode()


def record_of(page: Page) -> dict:
    """What the page has loaded and set, as its worker was asked for it."""
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
