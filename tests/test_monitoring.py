"""The dashboard and the alerts of deploy/monitoring/ find what a server exports after some load."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import fake_server

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())
VARIABLES = {"$__rate_interval": "5m", "$model": ".*"}


def parsed(query: str) -> Any:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return promql_parser.parse(query)


TARGETS = [
    pytest.param(target, id=f"{panel['title']}: {target['legendFormat']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
RULES = [
    pytest.param(rule["expr"], id=rule["alert"])
    for group in ALERTS["groups"]
    for rule in group["rules"]
]


@pytest.fixture(scope="module")
def series() -> list[dict[str, str]]:
    """Labels of every series that a server exports after a load, the name among them."""

    async def load() -> str:
        async with fake_server(scheduler={"max_running_requests": 2}) as server:
            body = {"max_tokens": 12, "ignore_eos": True}
            await asyncio.gather(*(server.complete(f"{i % 2}" * 200, **body) for i in range(6)))
            await server.post("/v1/completions", {"prompt": 7})
            async with server.client.get(server.url + "/metrics") as answer:
                return await answer.text()

    families = text_string_to_metric_families(asyncio.run(load()))
    return [
        {"__name__": sample.name, **sample.labels} for one in families for sample in one.samples
    ]


def children(node: Any) -> list[Any]:
    found = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    return [one for one in (*found, *getattr(node, "args", ())) if one is not None]


def selected(node: Any, series: list[dict[str, str]]) -> list[list[dict[str, str]]]:
    """The series of each selector in a query."""
    if not isinstance(node, promql_parser.VectorSelector):
        return [one for child in children(node) for one in selected(child, series)]
    matchers = [*node.matchers.matchers]
    found = [one for one in series if one["__name__"] == node.name]
    for matcher in matchers:
        found = [one for one in found if matches(matcher, one.get(matcher.name, ""))]
    return [found]


def matches(matcher: Any, value: str) -> bool:
    if matcher.op == promql_parser.MatchOp.Equal:
        return bool(value == matcher.value)
    if matcher.op == promql_parser.MatchOp.Re:
        return re.fullmatch(matcher.value, value) is not None
    raise AssertionError(f"the test does not know {matcher.op}")


def aggregates(node: Any) -> list[Any]:
    own = [node] if isinstance(node, promql_parser.AggregateExpr) else []
    return own + [one for child in children(node) for one in aggregates(child)]


def check_query(query: str, series: list[dict[str, str]]) -> set[str]:
    """Every selector finds series, which have the labels that are summed by. Returns: these."""
    tree = parsed(query)
    found = selected(tree, series)
    assert found
    assert all(found), f"nothing for {query}"
    kept: set[str] = set()
    for node in aggregates(tree):
        by = set() if node.modifier is None else set(node.modifier.labels)
        for one in itertools.chain(*selected(node, series)):
            assert by - {"instance", "job"} <= one.keys(), f"{by} of {one} in {query}"
        kept |= by
    if "histogram_quantile" in query:
        assert "le" in kept
    return kept


@pytest.mark.parametrize("target", TARGETS)
def test_a_panel_s_query_returns_series(target, series):
    kept = check_query(target["expr"], series)
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept


@pytest.mark.parametrize("query", RULES)
def test_an_alert_s_query_returns_series(query, series):
    prometheus_own = [{"__name__": "up", "job": "loomserve", "instance": "127.0.0.1:8000"}]
    check_query(query, series + prometheus_own)


def test_a_query_of_what_there_is_not_is_found(series):
    for query in (
        "loomserve:no_such_total",
        'loomserve:steps_total{kind="other"}',
        "sum by (kind) (loomserve:requests_running)",
    ):
        with pytest.raises(AssertionError):
            check_query(query, series)


def test_the_dashboard_s_panels_lie_side_by_side_and_have_names():
    panels = DASHBOARD["panels"]
    assert (
        len({panel["id"] for panel in panels}) == len({p["title"] for p in panels}) == len(panels)
    )
    places = [
        (p["gridPos"]["x"] + x, p["gridPos"]["y"] + y)
        for p in panels
        for x in range(p["gridPos"]["w"])
        for y in range(p["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables


def test_prometheus_scrapes_what_the_server_serves_and_reads_the_alerts():
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert [(FOLDER / name).is_file() for name in config["rule_files"]] == [True]
    (job,) = config["scrape_configs"]
    assert (job["metrics_path"], job["job_name"]) == ("/metrics", "loomserve")
