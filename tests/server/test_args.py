"""Options from argv and config files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from runtime.config import RunnerConfig, SchedulerConfig
from runtime.errors import ConfigError
from server.args import ServerConfig, make_config, options_of, parse_args, public_options


def test_every_option_is_in_the_help():
    command = [sys.executable, "-m", "server", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for record in (ServerConfig, RunnerConfig, SchedulerConfig):
        for item in options_of(record):
            assert item.flag in text


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom server.__main__ import main\n"
        "try:\n    main(['serve', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'aiohttp'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_defaults_are_the_records_own():
    config = parse_args([])
    for item in dataclasses.fields(ServerConfig):
        if "help" in item.metadata:
            assert getattr(config, item.name) == item.default
    assert config.scheduler == {}
    assert config.runner.cache_dir is not None


@pytest.mark.parametrize("ending", ["json", "toml"])
def test_argv_overrides_the_config_file(tmp_path, ending):
    values = {"port": 1234, "chunked-prefill-size": 64, "disable_overlap": True, "dtype": "float32"}
    path = tmp_path / f"options.{ending}"
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    path.write_text(json.dumps(values) if ending == "json" else lines)
    config = parse_args(["--config", str(path), "--port", "99"])
    assert config.port == 99
    assert config.scheduler == {"chunked_prefill_size": 64}
    assert config.disable_overlap is True
    assert config.runner.dtype == "float32"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param('{"prot": 1}', "did you mean port", id="unknown-key"),
        pytest.param('{"port": "1"}', "port '1': must be an integer", id="wrong-type"),
        pytest.param('{"port": true}', "must be an integer", id="bool-is-no-integer"),
        pytest.param('{"port": 70000}', "between 0 and 65535", id="out-of-range"),
        pytest.param('{"dtype": "float8"}', "must be one of auto", id="not-a-choice"),
        pytest.param('{"page_size": 0}', "page_size 0", id="scheduler-option"),
        pytest.param("[1]", "an object of options", id="no-object"),
        pytest.param("{", "not valid JSON", id="no-json"),
    ],
)
def test_a_wrong_config_file_is_one_clear_line(tmp_path, capsys, text, message):
    path = tmp_path / "options.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        parse_args(["--config", str(path)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_cache_variable_is_used_where_the_option_is_not_given(tmp_path):
    environ = {"LOOMSERVE_CACHE": str(tmp_path)}
    assert make_config({}, environ).runner.cache_dir == str(tmp_path)
    assert make_config({"cache_dir": "/x"}, environ).runner.cache_dir == "/x"


def test_a_certificate_needs_its_key():
    with pytest.raises(ConfigError, match="both or neither"):
        make_config({"ssl_certfile": "a.pem"}, {})


def test_public_options_hold_no_key():
    config = make_config({"api_key": "sesame", "page_size": 32}, {})
    shown = public_options(config)
    assert "sesame" not in json.dumps(shown)
    assert shown["api_key"] is True
    assert shown["page_size"] == 32
