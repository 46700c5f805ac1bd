"""The page: nothing but markup and styles, every word escaped, and lines where the values are."""

from __future__ import annotations

import base64
import hashlib
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest

from server.bench import curves
from server.bench.charts import Axis, Series, line_chart
from server.bench.report import Measured, html_report
from server.bench.search import RateSearch
from server.bench.server_watch import Sample
from server.bench.slo import Slo
from tests.server.bench.scripted import answered, run_of

EVIL = "http://x/<script>alert('1')</script>\"&"


class Page(HTMLParser):
    """What a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.style = self.words = ""
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._within = tag

    def handle_data(self, data):
        if self._within == "style" and not self.style:
            self.style = data
        else:
            self.words += data + " "


def some_run(url: str = "http://a:1", shift: float = 0.0):
    answers = [answered(100.0 + i / 10, 0.2 + shift, 0.3 + shift, 0.5 + shift) for i in range(9)]
    samples = [Sample(100.0 + i / 2, 3.0, float(i), 0.25 * i) for i in range(4)]
    return run_of(
        *answers, answered(101.0, 0.1, error=f"HTTP 500: {EVIL}"), url=url, samples=samples
    )


def page(**fields) -> Page:
    runs = fields.pop("runs", [("run", some_run())])
    return Page(html_report(Measured(runs, **fields), "1.2.3"))


def test_the_page_runs_nothing_and_fetches_nothing():
    found = page()
    assert not {"script", "link", "img", "iframe", "object", "base"} & {t for t, _ in found.tags}
    for _, attributes in found.tags:
        assert not {"href", "src", "style"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in found.style
    assert "@import" not in found.style


def test_its_policy_allows_its_own_style_alone():
    found = page()
    policy = next(a["content"] for _, a in found.tags if "http-equiv" in a) or ""
    digest = base64.b64encode(hashlib.sha256(found.style.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"style-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("where", ["name", "url", "note", "error"])
def test_what_servers_and_users_write_is_text(where):
    run = some_run(url=EVIL if where == "url" else "http://a:1")
    if where == "error":
        run.answers[-1].error = f"{EVIL}: more"
    notes = [EVIL] if where == "note" else []
    found = page(runs=[(EVIL if where == "name" else "run", run), ("b", some_run())], notes=notes)
    assert "script" not in {tag for tag, _ in found.tags}
    assert EVIL in found.words


def test_two_servers_are_set_side_by_side_with_their_ratios():
    one, other = some_run("http://a:1"), some_run("http://b:2", shift=0.2)
    found = page(runs=[("first", one), ("second", other)], pairs=[(one, other)])
    assert "http://b:2 as a multiple of http://a:1" in found.words
    assert "ttft_ms.p50 2 2 to 2 1" in " ".join(found.words.split())


def test_a_search_shows_its_trials_and_what_it_found():
    search = RateSearch([(1.0, True), (2.0, False)], 1.0, 2.0)
    found = page(search=search, slo=Slo.parse("ttft=300"))
    assert "kept at 1/s and missed at 2/s" in found.words
    assert "2.000 missed" in " ".join(found.words.split())
    assert "slo_attainment 0.9" in " ".join(found.words.split())


def test_a_run_without_an_answer_has_a_page_too():
    assert "Nothing to draw" in page(runs=[("run", run_of())]).words


def polylines(svg: str) -> list[np.ndarray]:
    root = ET.fromstring(re.sub(r"</svg>.*", "</svg>", svg))
    return [
        np.array([[float(c) for c in pair.split(",")] for pair in line.attrib["points"].split()])
        for line in root.iter("polyline")
    ]


def test_lines_are_drawn_in_proportion_to_the_values():
    points = [(0.0, 0.0), (5.0, 10.0), (10.0, 20.0), (20.0, 5.0)]
    (line,) = polylines(line_chart([Series("a", points)], "x", "y"))
    given = np.array(points)
    for axis in (0, 1):
        slope, offset = np.polyfit(given[:, axis], line[:, axis], 1)
        assert np.allclose(slope * given[:, axis] + offset, line[:, axis], atol=0.1)
        assert (slope > 0) == (axis == 0)  # upwards is less in SVG


def test_times_over_several_orders_are_drawn_by_their_logarithms():
    points = [(10.0**power, float(power)) for power in range(5)]
    (line,) = polylines(line_chart([Series("a", points)], "ms", "y", log_x=True))
    assert np.allclose(np.diff(line[:, 0]), np.diff(line[:, 0])[0], atol=0.2)


@pytest.mark.parametrize("top", [0.007, 1.0, 37.0, 480_000.0])
def test_an_axis_has_a_few_round_ticks(top):
    ticks = Axis(0.0, top, 0, 100).ticks()
    assert 3 <= len(ticks) <= 8
    assert np.allclose(np.diff(ticks), ticks[1])
    assert f"{ticks[1]:.0e}"[0] in "125"


def test_a_distribution_is_numpys_percentiles():
    values = list(np.random.default_rng(2).exponential(size=1000))
    drawn = curves.distribution(values)
    assert len(drawn) == 201
    percents = [percent for _, percent in drawn]
    assert np.allclose([ms for ms, _ in drawn], np.percentile(values, percents) * 1e3)


def test_tokens_per_second_add_up_to_the_tokens():
    run = some_run()
    drawn = curves.tokens_per_second(run)
    width = drawn[1][0] - drawn[0][0]
    assert sum(rate * width for _, rate in drawn) == pytest.approx(9 * 3 + 1)


def test_requests_under_way_are_counted_at_each_change():
    run = run_of(answered(100.0, 1.0), answered(100.5, 1.0))
    assert curves.in_flight(run) == [(0.0, 1), (0.5, 2), (1.0, 1), (1.5, 0)]


def test_the_server_s_samples_are_drawn_from_the_run_s_beginning():
    assert curves.of_server(some_run(), "waiting") == [
        (0.0, 0.0),
        (0.5, 1.0),
        (1.0, 2.0),
        (1.5, 3.0),
    ]
    run = run_of(samples=[Sample(100.0, 1.0, None, None)])
    assert curves.of_server(run, "kv_usage") == []
