"""Which form a model's weights get on a CPU: as stored, or a quantization that costs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ops.cpu import build, forms
from ops.cpu.library import Library
from runtime.checkpoints.checkpoint import TensorInfo
from runtime.config import RunnerConfig
from runtime.execution import weight_form
from runtime.execution.device import open_device
from runtime.execution.weight_form import StoredWeights, choose_form, layer_shapes, matrix_weights
from tests.cache import cache_folder

LIBRARY = Path("avx9-kernels.so")
Q4 = StoredWeights(torch.bfloat16, "int4", ((64, 32),))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """What the measurement gives; int4 takes half of the time."""
    measured = {"bfloat16": [2.0, 4.0, 8.0], "int4": [1.0, 2.0, 4.0]}
    monkeypatch.setattr(weight_form, "remembered_times", lambda *_: measured)
    return measured


def test_what_the_file_holds_is_taken_where_it_is_nowhere_slower(times) -> None:
    form = choose_form(RunnerConfig(), Q4, "bfloat16", LIBRARY)
    assert form.quantization == "int4"
    assert "0.50 at 1, 0.50 at 16, 0.50 at 128" in form.words


@pytest.mark.parametrize("slow", range(3))
def test_it_is_not_taken_where_some_number_of_rows_is_slower(times, slow: int) -> None:
    times["int4"][slow] = 1.1 * times["bfloat16"][slow]
    form = choose_form(RunnerConfig(), Q4, "bfloat16", LIBRARY)
    assert form.quantization is None
    assert form.words.startswith("bfloat16, since int4 is not always faster here")
    assert "1.10 at " in form.words


@pytest.mark.parametrize(
    ("options", "stored", "quantization", "words"),
    [
        ({"quantization": "int8"}, Q4, "int8", "int8, as asked for"),
        ({"quantization": "none"}, Q4, None, "bfloat16, as asked for"),
        ({"dtype": "bfloat16"}, Q4, None, "bfloat16, as asked for"),
        ({}, StoredWeights(torch.bfloat16), None, "bfloat16, as the checkpoint has them"),
        ({}, StoredWeights(torch.float16), None, "float16, as the checkpoint has them"),
        ({"quantization": "none"}, StoredWeights(torch.float16), None, "float16, as asked for"),
        ({"dtype": "bfloat16"}, StoredWeights(torch.float16), None, "bfloat16, as asked for"),
    ],
)
def test_options_rule_and_plain_weights_stay(times, options, stored, quantization, words) -> None:
    form = choose_form(RunnerConfig(**options), stored, "bfloat16", LIBRARY)
    assert (form.quantization, form.words) == (quantization, words)


def test_floats_are_kept_by_native_kernels_where_no_type_or_quantization_is_asked_for() -> None:
    stored = StoredWeights(torch.float16, kinds=("int4_zero",))
    cases: list[tuple[dict[str, Any], Path | None, bool]] = [
        ({}, LIBRARY, True),
        ({"quantization": "none"}, LIBRARY, True),
        ({"quantization": "int8"}, LIBRARY, False),
        ({"dtype": "bfloat16"}, LIBRARY, False),
        ({}, None, False),
    ]
    for options, library, keeps in cases:
        form = choose_form(RunnerConfig(**options), stored, "bfloat16", library)
        assert form.keeps_floats is keeps
    torch_form = choose_form(RunnerConfig(), StoredWeights(torch.float16), "bfloat16", None)
    assert torch_form.words == "bfloat16, for the checkpoint's float16"


def test_without_native_kernels_nothing_is_quantized(times) -> None:
    assert choose_form(RunnerConfig(), Q4, "bfloat16", None).quantization is None


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_native_kernels_keep_two_bytes_a_weight_with_any_instructions(stored, monkeypatch) -> None:
    if not build.available_paths():
        pytest.skip("this CPU has no native instruction path")
    monkeypatch.setattr("runtime.execution.device.torch_has_bfloat16", lambda: False)
    device = open_device(RunnerConfig(device="cpu", cpu_threads=1), StoredWeights(stored))
    assert (device.dtype, device.form) == (torch.bfloat16, str(stored).removeprefix("torch."))
    plain = RunnerConfig(device="cpu", cpu_kernels="torch")
    assert open_device(plain, StoredWeights(stored)).dtype == torch.float32


def test_layers_are_counted_without_experts_and_vectors() -> None:
    shapes = {
        "model.embed_tokens.weight": (100, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.input_layernorm.weight": (8,),
        "model.layers.1.mlp.experts.3.up_proj.weight": (16, 8),
        "model.layers.1.self_attn.q_proj.weight": (8, 4),
        "model.layers.10.self_attn.q_proj.weight": (8, 2),
    }
    tensors = {name: TensorInfo(shape, "bfloat16") for name, shape in shapes.items()}
    assert layer_shapes(tensors) == ((8, 8), (8, 4))
    assert matrix_weights(tensors) == 64 + 32 + 16


def test_times_are_measured_once_and_kept(tmp_path: Path, monkeypatch) -> None:
    library = tmp_path / "kernels.so"
    counted = []

    def measure(library, shapes, forms, clock):
        counted.append(shapes)
        return {form: [1.0, 2.0, 3.0] for form in forms}

    monkeypatch.setattr(forms, "Library", lambda *_, **__: None)
    monkeypatch.setattr(forms, "time_forms", measure)
    first = forms.remembered_times(library, [(4, 4)], ("bfloat16", "int4"))
    assert forms.remembered_times(library, [(4, 4)], ("bfloat16", "int4")) == first
    assert len(counted) == 1
    [file] = tmp_path.glob("form-times-*.json")
    file.write_text('{"bfloat16": 7}')  # damaged: measured again
    assert forms.remembered_times(library, [(4, 4)], ("bfloat16", "int4")) == first
    forms.remembered_times(library, [(4, 8)], ("bfloat16", "int4"))
    assert len(counted) == 3


def test_forms_are_timed_for_each_number_of_rows() -> None:
    if not build.available_paths():
        pytest.skip("this CPU has no native instruction path")
    file = build.build_library(build.choose_path(), cache_folder())
    found = forms.time_forms(Library(file, 1), [(32, 48), (16, 64)], tuple(forms.FORMS))
    assert set(found) == set(forms.FORMS)
    assert all(
        len(times) == len(forms.ROWS) and 0 < min(times) < max(times) < float("inf")
        for times in found.values()
    )
