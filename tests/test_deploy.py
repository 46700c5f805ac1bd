"""The files of deploy/ name options, paths and times that this server has."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from server.api.docs.openapi import ROUTES
from server.args import OPTIONS, parse_args

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
PATHS = {route.path for route in ROUTES if route.method == "GET"}


def unit():
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.read_string((DEPLOY / "loomserve.service").read_text())
    return parser


def seconds(text):
    return float(text.removesuffix("s"))


def variables_are_options(names):
    caches = {"LOOMSERVE_CACHE", "HF_HOME", "TRITON_CACHE_DIR"}
    return set(names) <= caches | {option.environment_variable for option in OPTIONS.values()}


def test_pods_are_probed_where_the_server_answers_and_may_drain():
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = {
        kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")
    }
    assert [probes[kind]["path"] for kind in probes] == ["/health", "/ready", "/live"]
    assert {probe["path"] for probe in probes.values()} <= PATHS
    config = parse_args(container["args"])
    waits = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > waits + config.drain_timeout
    (port,) = container["ports"]
    assert (port["containerPort"], port["name"]) == (config.port, probes["readiness"]["port"])
    labels = deployment["spec"]["template"]["metadata"]
    assert service["spec"]["selector"].items() <= labels["labels"].items()
    assert labels["annotations"]["prometheus.io/path"] in PATHS
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_compose_gives_time_to_drain():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    made = compose["services"]["loomserve"]
    config = parse_args(made["command"])
    assert seconds(made["stop_grace_period"]) > config.drain_timeout
    assert made["ports"] == [f"{config.port}:{config.port}"]
    assert variables_are_options(made["environment"])
    path = re.search(r"http://127.0.0.1:(\d+)(/\w+)", made["healthcheck"]["test"][-1])
    assert path is not None
    assert (int(path[1]), path[2]) == (config.port, "/ready")
    build = made["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_compose_shows_how_to_serve_a_model_that_it_mounts():
    text = (DEPLOY / "compose.yaml").read_text()
    made = yaml.safe_load(text)["services"]["loomserve"]
    (shown,) = re.findall(r"#   command: (.*)", text)
    words = yaml.safe_load(shown)
    assert words[: len(made["command"])] == made["command"]
    source, target, _ = made["volumes"][0].split(":")
    assert (DEPLOY / source).resolve() == ROOT / "models"
    model = parse_args(words).runner.model
    assert model is not None
    assert Path(model).parent == Path(target)


def test_the_image_copies_what_there_is_and_names_known_variables():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "scripts"}
    assert packages <= set(copied)
    variables = [
        word.partition("=")[0]
        for line in lines
        if line.startswith("ENV ")
        for word in line.split()[1:]
    ]
    assert variables
    assert variables_are_options(variables)


def test_containers_run_without_root_and_write_to_the_cache_and_tmp_alone():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    (user,) = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert int(user) > 0
    assert lines.index(f"USER {user}") > max(i for i, x in enumerate(lines) if x.startswith("RUN "))
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["loomserve"]
    assert (composed["read_only"], composed["cap_drop"]) == (True, ["ALL"])
    (pod,) = [
        one["spec"]["template"]["spec"]
        for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
        if one["kind"] == "Deployment"
    ]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user)
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
    written = set(composed["tmpfs"])
    written |= {v.split(":")[1] for v in composed["volumes"] if not v.endswith(":ro")}
    assert mounts == written == {"/cache", "/tmp"}


def test_the_unit_gives_time_to_drain_and_does_not_repeat_a_wrong_option(tmp_path):
    service = unit()["Service"]
    program, command, *words = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("loomserve", "serve")
    words[words.index("--config") + 1] = str(tmp_path / "serve.toml")
    (tmp_path / "serve.toml").write_text("port = 9000\n")
    assert parse_args(words).drain_timeout < float(service["TimeoutStopSec"])
    assert service["KillMode"] == "mixed"
    assert service["RestartPreventExitStatus"] == "2"
    variables = dict(word.split("=") for word in service["Environment"].split())
    assert variables_are_options(variables)
    assert "HF_HOME" in variables, "there is no home that could be written"
    cache = Path("/var/cache") / service["CacheDirectory"]
    assert all(Path(folder).is_relative_to(cache) for folder in variables.values())


def test_systemd_accepts_the_unit(tmp_path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed here")
    text = (DEPLOY / "loomserve.service").read_text()
    copy = tmp_path / "loomserve.service"
    copy.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", text))
    result = subprocess.run([program, "verify", str(copy)], capture_output=True, text=True)
    assert (result.returncode, result.stderr.strip()) == (0, "")


def test_the_tested_versions_are_among_those_that_will_do():
    """Of everything that serving or testing installs, but for what each build of torch names."""
    pins = [Requirement(line) for line in without_comments(ROOT / "scripts" / "constraints.txt")]
    tested = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["test"]
    assert "triton" not in tested
    for requirement in map(Requirement, wanted):
        if requirement.name == "triton":
            continue
        version = tested[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), (requirement, version)


def without_comments(file):
    return [line for line in file.read_text().splitlines() if not line.startswith("#")]
