"""`loomserve doctor`: what it finds here, for a model of random weights."""

from __future__ import annotations

import re

import pytest

from ops.cpu import build
from runtime.examination import Machine
from server.__main__ import main
from tests.runtime.models.tiny_models import make_model


@pytest.fixture
def quick(monkeypatch):
    """The limits of the machine are not measured again."""
    from runtime.execution import examination

    monkeypatch.setattr(examination, "measure_machine", lambda _: Machine(20e9, 400e9))


@pytest.mark.parametrize(
    ("options", "chosen"), [((), "float32"), (("--quantization", "int8"), "int8")]
)
def test_it_names_the_choice_and_what_each_form_would_cost(
    tmp_path, capsys, quick, options, chosen
):
    if not build.available_paths():
        pytest.skip("this CPU has no native instruction path")
    make_model(tmp_path, "llama")
    assert main(["doctor", "--model", str(tmp_path), "--device", "cpu", *options]) == 0
    said = capsys.readouterr().out
    assert f"native {build.choose_path()}" in said
    assert "20.0 GB/s read, 400 GFLOP/s" in said
    assert re.search(rf"^weights +{chosen}, as ", said, re.MULTILINE)
    rows = re.findall(r"^([* ]) (\w+) +\d+((?: +[\d.]+ \([\d.]+\))+)$", said, re.MULTILINE)
    assert [form for _, form, _ in rows] == ["float32", "bfloat16", "float16", "int8", "int4"]
    assert [form for mark, form, _ in rows if mark == "*"] == [chosen]
    assert all(len(re.findall(r"\(", cells)) == 3 for _, _, cells in rows)


def test_it_says_what_serving_would_refuse(tmp_path, capsys):
    assert main(["doctor", "--model", str(tmp_path / "none"), "--device", "cpu"]) == 2
    assert f"loomserve: {tmp_path / 'none'}: no such folder or file" in capsys.readouterr().err


def test_plain_torch_has_no_forms_to_compare(tmp_path, capsys):
    make_model(tmp_path, "llama")
    options = ["--device", "cpu", "--cpu-kernels", "torch"]
    assert main(["doctor", "--model", str(tmp_path), *options]) == 0
    said = capsys.readouterr().out
    assert "torch, as asked for" in said
    assert not re.search(r"^[* ] int8 ", said, re.MULTILINE)
