"""What is wrong with the options is told before the model is loaded."""

from __future__ import annotations

import os
import socket
from unittest.mock import Mock

import pytest

from runtime.errors import ConfigError
from server import launcher
from server.args import make_config, unknown_variables
from server.preflight import check_before_loading


def test_a_pool_without_a_page_for_a_request_is_refused():
    with pytest.raises(
        ConfigError, match=r"max_total_tokens 4: must be at least three pages \(48\)"
    ):
        make_config({"max_total_tokens": 4, "page_size": 16})
    assert make_config({"max_total_tokens": 48, "page_size": 16}).runner.max_total_tokens == 48


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"record": "/nope/there/run.trace"}, "record /nope/there/run.trace: cannot be written"),
        ({"record": "/"}, "record /: cannot be written"),
        ({"otlp_endpoint": "collector:4318"}, "otlp_endpoint 'collector:4318': must be an address"),
        ({"otlp_endpoint": "http://h:x"}, "otlp_endpoint 'http://h:x': must be an address"),
        ({"trace": "/nope/there/trace.json"}, "trace /nope/there/trace.json: cannot be written"),
        ({"kv_events": "foo"}, "kv_events 'foo'"),
        ({"kv_events": "inproc://a", "kv_events_replay": "tcp://*:x"}, "kv_events_replay"),
        ({"kv_offload_gb": 1e6}, "kv_offload_gb 1e+06: this machine has"),
        ({"ssl_certfile": "/nope", "ssl_keyfile": "/nope"}, "ssl_certfile /nope"),
    ],
)
def test_it_is_one_line_and_status_2_and_nothing_was_loaded(monkeypatch, capsys, options, told):
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    loads: list[object] = []
    monkeypatch.setattr(launcher, "load", loads.append)
    for name in ("listen", "set_up_logging", "StopSignals"):
        monkeypatch.setattr(launcher, name, Mock())
    assert launcher.run(make_config({"port": 0, **options})) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if told in line and line.startswith("loomserve: ")]
    assert not loads


def test_looking_leaves_no_file_and_changes_none(tmp_path):
    old, new = tmp_path / "old.trace", tmp_path / "new.trace"
    old.write_text("events")
    for path in (old, new):
        check_before_loading(make_config({"record": str(path)}))
    assert old.read_text() == "events"
    assert not new.exists()


def test_an_endpoint_that_somebody_has_is_told():
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://*:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="in use"):
            check_before_loading(make_config({"kv_events": endpoint}))
    check_before_loading(make_config({"kv_events": endpoint}))  # twice: nothing keeps it
    check_before_loading(make_config({"kv_events": endpoint}))


def test_variables_that_are_no_options_are_told_with_the_nearest_one():
    told = unknown_variables(
        {
            "LOOMSERVE_MAX_BODY_BYTE": "1",
            "LOOMSERVE_QQQ": "1",
            "LOOMSERVE_MODEL": "x",
            "LOOMSERVE_SERVICE_HOST": "10.0.0.1",
            "LOOMSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
            "HOME": "/",
        }
    )
    assert told == [
        "$LOOMSERVE_MAX_BODY_BYTE is no option; did you mean $LOOMSERVE_MAX_BODY_BYTES?",
        "$LOOMSERVE_QQQ is no option",
    ]


def test_they_are_warned_of_and_not_refused(monkeypatch, capsys):
    from server.args import parse_args

    monkeypatch.setenv("LOOMSERVE_MODLE", "x")
    assert parse_args([]).runner.model == os.environ.get("LOOMSERVE_MODEL")
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "MODLE" in one]
    assert line.endswith("warning: $LOOMSERVE_MODLE is no option; did you mean $LOOMSERVE_MODEL?")
