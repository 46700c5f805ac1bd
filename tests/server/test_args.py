"""Options from argv, the environment and config files: one record, wherever a value comes from."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.config import RunnerConfig, SchedulerOptions
from runtime.errors import ConfigError
from runtime.options import LARGEST_INTEGER
from server import args
from server.args import OPTIONS, make_config, parse_args, public_options, read_environment
from server.config import ServerConfig

RECORDS = (ServerConfig, RunnerConfig, SchedulerOptions)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Nothing of the machine's own environment is an option here."""
    for item in OPTIONS.values():
        monkeypatch.delenv(item.environment_variable, raising=False)


@pytest.fixture(scope="module", autouse=True)
def one_parser():
    """Half of the time of these tests is making the parser, which is the same for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(args, "make_parser", functools.cache(args.make_parser))
        yield


@pytest.fixture(scope="module")
def help_text():
    command = [sys.executable, "-m", "server", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return " ".join(text.split()).replace("dfs- weight", "dfs-weight")


def refusal(capsys, *argv):
    """The one line that a wrong command line gets, with exit status 2."""
    with pytest.raises(SystemExit) as ended:
        parse_args([str(word) for word in argv])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


# One value inside the bound for every option; where one option needs another, both.
COMPANIONS: dict[str, dict[str, Any]] = {
    "max_prefill_tokens": {"page_size": 1},
    "max_total_tokens": {"page_size": 1},
    "ssl_certfile": {"ssl_keyfile": "key.pem"},
    "ssl_keyfile": {"ssl_certfile": "cert.pem"},
    "kv_events_replay": {"kv_events": "tcp://*:5557"},
    "kv_events_topic": {"kv_events": "tcp://*:5557"},
    "truncation_align_size": {"page_size": 1, "max_prefill_tokens": LARGEST_INTEGER},
    "kv_offload_path_gb": {"kv_offload_path": "kv"},
    "max_queue_skip_ms": {"schedule_policy": "lpm"},
    "policy_seed": {"schedule_policy": "random"},
    **{
        f"delayer_{name}": {"enable_prefill_delayer": True}
        for name in ("max_passes", "max_ms", "low_watermark", "running_ratio")
    },
}


def allowed_values(item):
    """Values at the bounds and, where there is none, any value."""
    if item.kind is bool:
        return [True]
    if item.several and item.choices:
        return [item.choices[:1], item.choices]
    if item.choices:
        return list(item.choices)
    if item.several:
        return [("a",), ("a", "b")]
    if item.kind is str:
        return ["text"]
    low = item.at_least if item.at_least is not None else math.nextafter(item.above, 1)
    high = item.at_most
    if high is None:
        high = LARGEST_INTEGER if item.kind is int else 1e12
    return [item.kind(low), item.kind(high)]


def refused_values(item):
    """Values just beyond the bounds, and of another type."""
    if item.kind is bool:
        return []
    if item.choices:
        return ["no-such-choice", ""]
    if item.several or item.kind is str:
        return [] if item.default == "" else [""]
    wrong: list[Any] = ["a few", ""]
    wrong.append(item.above if item.at_least is None else item.at_least - 1)
    if item.at_most is not None or item.kind is int:
        most = LARGEST_INTEGER if item.at_most is None else item.at_most
        wrong.append(most + 1 if item.kind is int else math.nextafter(most, math.inf))
    if item.kind is float:
        wrong += ["nan", "inf"]
    else:
        wrong.append("1.5")
    return wrong


def words_of(item, value):
    if item.kind is bool:
        return [item.flag]
    return [item.flag, *(value if item.several else [str(value)])]


def text_of(item, value):
    return ",".join(value) if item.several else str(value)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_allowed_value_is_the_same_from_everywhere(tmp_path, monkeypatch, name):
    item = OPTIONS[name]
    path = tmp_path / "options.json"
    for value in allowed_values(item):
        others = COMPANIONS.get(name, {})
        expected = make_config({name: value, **others})
        beside = [word for key, v in others.items() for word in words_of(OPTIONS[key], v)]
        assert parse_args([*words_of(item, value), *beside]) == expected
        path.write_text(json.dumps({name: value, **others}))
        assert parse_args(["--config", str(path)]) == expected
        with monkeypatch.context() as patch:
            for key, v in {name: value, **others}.items():
                patch.setenv(OPTIONS[key].environment_variable, text_of(OPTIONS[key], v))
            assert parse_args([]) == expected
        shown = public_options(expected)[name]
        assert shown == (True if item.secret else value)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_value_is_refused_from_everywhere_and_the_bound_is_told(
    tmp_path, monkeypatch, capsys, name
):
    item = OPTIONS[name]
    path = tmp_path / "options.json"
    for value in refused_values(item):
        said = [refusal(capsys, *words_of(item, [value] if item.several else value))]
        given = json.dumps([value] if item.several else value).replace('"nan"', "NaN")
        path.write_text(f'{{"{name}": {given}}}')
        said.append(refusal(capsys, "--config", path))
        monkeypatch.setenv(
            item.environment_variable, text_of(item, [value]) if item.several else str(value)
        )
        said.append(refusal(capsys))
        monkeypatch.delenv(item.environment_variable)
        for line in said:
            assert f"{name}" in line
            number = isinstance(value, int | float) and not item.choices
            bound = item.allowed if value != LARGEST_INTEGER + 1 else f"at most {LARGEST_INTEGER}"
            assert not number or bound in line, line
    path.write_text(json.dumps({name: {"a": 1}}))
    assert f"{name}" in refusal(capsys, "--config", path)


@pytest.mark.parametrize("name", OPTIONS)
def test_help_tells_meaning_bound_default_and_variable(help_text, name):
    item = OPTIONS[name]
    said = re.search(
        rf" {item.flag}(?: [A-Z]+(?: \[NAME \.\.\.\])?)? (.*?)(?= --[a-z]|$)", help_text
    )
    assert said is not None
    for part in (item.help, item.allowed, item.otherwise, item.variable or ""):
        assert part in help_text[said.start() :]
    if item.kind in (int, float) and item.default is not None:
        assert f"default {item.default})" in said.group(1)


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
    for record, found in zip(RECORDS, (config, config.runner, config.scheduler), strict=True):
        for item in dataclasses.fields(record):
            if "help" in item.metadata:
                assert getattr(found, item.name) == item.default


@pytest.mark.parametrize("ending", ["json", "toml"])
def test_argv_goes_before_the_environment_and_that_before_the_file(tmp_path, monkeypatch, ending):
    values = {"port": 1, "max-n": 2, "disable_overlap": True, "chunked-prefill-size": 64}
    path = tmp_path / f"options.{ending}"
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    path.write_text(json.dumps(values) if ending == "json" else lines)
    monkeypatch.setenv("LOOMSERVE_PORT", "3")
    monkeypatch.setenv("LOOMSERVE_MAX_N", "4")
    config = parse_args(["--config", str(path), "--port", "5"])
    assert (config.port, config.max_n, config.disable_overlap) == (5, 4, True)
    assert config.scheduler.chunked_prefill_size == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param('{"prot": 1}', "did you mean port", id="unknown-key"),
        pytest.param('{"port": "1"}', "port '1': must be an integer", id="wrong-type"),
        pytest.param('{"port": true}', "must be an integer", id="bool-is-no-integer"),
        pytest.param('{"port": 1, "PORT": 1}', "unknown option 'PORT'", id="upper-case"),
        pytest.param('{"max_n": 1, "max-n": 2}', "'max_n' is there twice", id="twice"),
        pytest.param('{"port": null}', "must be an integer", id="null"),
        pytest.param('{"api_key": 12345}', "api_key: must be a string", id="secret-not-shown"),
        pytest.param("[1]", "an object of options", id="no-object"),
        pytest.param("{", "not valid JSON", id="no-json"),
        pytest.param("[" * 100_000, "not valid JSON", id="deep"),
    ],
)
def test_a_wrong_config_file_is_one_clear_line(tmp_path, capsys, text, message):
    path = tmp_path / "options.json"
    path.write_text(text)
    assert message in refusal(capsys, "--config", path)


@pytest.mark.parametrize(
    ("name", "message"),
    [("options.yaml", "YAML is not read"), ("none.json", "No such file"), (".", "directory")],
)
def test_a_config_file_that_cannot_be_read_is_one_clear_line(tmp_path, capsys, name, message):
    (tmp_path / "options.yaml").write_text("port: 1")
    assert message in refusal(capsys, "--config", tmp_path / name)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "unknown option --prot; did you mean --port?"),
        (["--api-ky=sesame"], "unknown option --api-ky; did you mean --api-key?"),
        (["--max-total", "1"], "unknown option --max-total"),
        (["--port"], "--port: expected one argument"),
        (["--disable-overlap=1"], "--disable-overlap"),
        (["one", "two"], "one model can be served, got 'two' as a second"),
        (["one", "--model", "two"], "given as 'one' and as --model 'two'"),
        (["--ssl-keyfile", "key.pem"], "both or neither"),
        (["--page-size", "32", "--chunked-prefill-size", "32"], "two pages (64)"),
        (["--enable-dynamic-chunking", "--tpot-slo-ms", "20"], "give one of them"),
        (["--enable-dynamic-chunking", "--chunked-prefill-size", "0"], "no chunks to size"),
        (["--truncation-align-size", "64", "--chunked-prefill-size", "-1"], "no chunks to align"),
        (["--truncation-align-size", "40"], "multiple of page_size (16)"),
        (["--kv-offload-path-gb", "2"], "kv_offload_path_gb 2.0: has no effect without kv_offload"),
        (["--pin-share", "0", "--disable-radix-cache"], "no effect with disable_radix_cache"),
        (
            ["--eviction-policy", "lfu", "--disable-radix-cache"],
            "no effect with disable_radix_cache",
        ),
        (
            ["--schedule-policy", "lpm", "--disable-radix-cache"],
            "no effect with disable_radix_cache",
        ),
        (["--max-queue-skip-ms", "5"], "no effect with schedule_policy fcfs"),
        (["--policy-seed", "5", "--schedule-policy", "lpm"], "no effect with schedule_policy lpm"),
        (["--delayer-max-ms", "5"], "no effect without enable_prefill_delayer"),
        (
            ["--priority-preemption-threshold", "5", "--disable-priority-preemption"],
            "no effect with",
        ),
        (["--cuda-graph-max-bs", "5", "--disable-cuda-graph"], "no effect with disable_cuda_graph"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_wrong_command_line_is_one_clear_line(capsys, argv, message):
    line = refusal(capsys, *argv)
    assert message in line
    assert "sesame" not in line


def test_a_model_may_stand_alone():
    assert parse_args(["folder"]).runner.model == "folder"
    assert parse_args(["folder", "--port", "1"]).runner.model == "folder"
    assert parse_args(["--disable-overlap", "folder"]).runner.model == "folder"
    assert parse_args(["folder", "--model", "folder"]).runner.model == "folder"


def test_version_is_told():
    command = [sys.executable, "-m", "server", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"loomserve \S+\n", done.stdout)


def test_several_choices_may_be_joined_by_commas(capsys):
    for words in (["vllm,sglang"], ["vllm", "sglang"]):
        assert parse_args(["--metrics-compat", *words]).metrics_compat == ("vllm", "sglang")
    assert "must be one of vllm, sglang" in refusal(capsys, "--metrics-compat", "vllm,tgi")


def test_several_names_of_the_model(tmp_path):
    several = ("a", "b/c")
    assert parse_args(["--served-model-name", *several]).served_model_name == several
    path = tmp_path / "options.toml"
    path.write_text('served-model-name = "a"')
    assert parse_args(["--config", str(path)]).served_model_name == ("a",)


def test_the_cache_folder_is_the_option_s_then_the_variable_s_then_one_at_home(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", "/home/someone")
    environ = {"LOOMSERVE_CACHE": str(tmp_path)}
    assert make_config(read_environment(environ)).runner.cache_dir == str(tmp_path)
    assert make_config({**read_environment(environ), "cache_dir": "/x"}).runner.cache_dir == "/x"
    assert make_config({"cache_dir": "~/x"}).runner.cache_folder == Path("/home/someone/x")
    assert make_config({}).runner.cache_folder == Path("/home/someone/.cache/loomserve")


def test_what_kubernetes_sets_for_a_service_of_this_name_is_no_port():
    assert read_environment({"LOOMSERVE_PORT": "tcp://10.0.0.1:80"}) == {}


@pytest.mark.parametrize("key", ["sesame\n", " sesame", "open sesame", "s\u00e9same", " "])
def test_a_key_that_no_header_can_carry_is_refused_and_not_told(capsys, monkeypatch, key):
    monkeypatch.setenv("LOOMSERVE_API_KEY", key)
    line = refusal(capsys)
    assert "api_key: must be printable ASCII" in line
    assert "same" not in line


def test_a_key_is_told_to_nobody():
    config = make_config({"page_size": 32, "api_key": "sesame"})
    assert config.api_key == "sesame"
    shown = public_options(config)
    assert "sesame" not in json.dumps(shown)
    assert shown["api_key"] is True
    assert shown["page_size"] == 32


def test_records_are_checked_however_they_are_made():
    with pytest.raises(ConfigError, match="max_n 0: must be at least 1"):
        ServerConfig(max_n=0)
    with pytest.raises(ConfigError, match="cpu_threads -3: must be between 0 and 1024"):
        RunnerConfig(cpu_threads=-3)
    with pytest.raises(ConfigError, match="schedule_policy 'magic': must be one of fcfs"):
        dataclasses.replace(SchedulerOptions(), schedule_policy="magic")
