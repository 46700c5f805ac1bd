"""Quantized checkpoints on the GPU's op set: their codes stay, and the logits are those of the
float model of their values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ops.coded_weight import GroupedMatrix
from ops.gpu.coded_linear import CodedLinear
from ops.gpu.op_set import GpuOps
from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.execution import build
from runtime.execution.grouped import grouped_weight
from tests.ops.gpu.tiny_decoder import make_device
from tests.runtime.checkpoints.quantized_formats import write_gpt_oss, write_quantized
from tests.runtime.models.tiny_models import Probe, expected_logits, open_runner, random_tokens

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

# By format: kind, and whether there are zeros of groups; None: it is expanded.
KEPT = {
    "gptq-4": ("int4", True),
    "gptq-8-symmetric": ("int8", False),
    "gptq-v2-act-order": ("int4", True),
    "w4a16-act-order": ("int4", False),
    "awq": ("int4", True),
    "w8a8-zeros": ("int8", True),
    "w4a16": ("int4", False),
    "fp8-tensor": ("fp8", False),
    "fp8-narrow-blocks": ("fp8", False),
    "fp8-blocks": None,
    "nf4": ("nf4", False),
    "nf4-nested": ("nf4", False),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.sampled(3)
def test_codes_of_groups_stay_and_are_multiplied_as_their_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = write_quantized(name, tmp_path)
    device = replace(make_device(GpuOps()), keeps_codes="groups")
    monkeypatch.setattr(build, "open_device", lambda *_: device)
    tokens = random_tokens(20)
    runner = open_runner(tmp_path)
    (got,) = Probe(runner).step({1: (0, tokens)})
    decoder: Any = runner.decoder.model
    runner.close()
    qkv = decoder.layers[0][0].mixer.qkv
    assert isinstance(qkv, CodedLinear) == (KEPT[name] is not None)
    if isinstance(qkv, CodedLinear):
        assert (qkv.kind, qkv.zeros) == KEPT[name]
    torch.testing.assert_close(got, expected_logits(model, tokens), atol=5e-5, rtol=5e-5)


def test_experts_of_mxfp4_stay_and_are_multiplied_as_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = write_gpt_oss(tmp_path)
    device = replace(make_device(GpuOps()), keeps_codes="groups")
    monkeypatch.setattr(build, "open_device", lambda *_: device)
    tokens = random_tokens(20)
    runner = open_runner(tmp_path)
    (got,) = Probe(runner).step({1: (0, tokens)})
    decoder: Any = runner.decoder.model
    runner.close()
    experts = decoder.layers[0][1].mixer.experts
    assert (experts.gate_up.kind, experts.down.kind) == ("mxfp4", "mxfp4")
    assert experts.gate_up.codes.shape == (3, 320, 32)
    torch.testing.assert_close(got, expected_logits(model, tokens), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("name", KEPT)
def test_the_choice_of_a_form_is_told_the_kinds_of_groups(name: str, tmp_path: Path) -> None:
    write_quantized(name, tmp_path)
    stored = build.stored_weights(open_checkpoint(tmp_path), None)
    kept = KEPT[name]
    assert stored.group_kinds == (() if kept is None else kept[:1])


def test_a_float_that_is_no_number_stays_one() -> None:
    """Kernels take its code for a number, so the matrix is expanded."""
    codes, scales = np.full((4, 64), 3, np.uint8), np.ones((4, 1), np.float32)
    matrix = GroupedMatrix("fp8", 4, 64, scales, None, lambda a, b: codes[a:b])
    kept = grouped_weight([matrix], torch.device("cpu"))
    assert kept is not None
    assert kept.kind == "fp8"
    codes[3, 9] = 255
    assert grouped_weight([matrix], torch.device("cpu")) is None


def test_matrices_in_two_orders_are_not_stacked() -> None:
    codes, scales = np.full((4, 64), 3, np.uint8), np.ones((4, 1), np.float32)
    plain = GroupedMatrix("fp8", 4, 64, scales, None, lambda a, b: codes[a:b])
    turned, device = replace(plain, order=np.arange(64, dtype=np.int32)[::-1]), torch.device("cpu")
    for pair, kept in (((plain, plain), True), ((turned, turned), True), ((plain, turned), False)):
        assert (grouped_weight(pair, device) is not None) is kept
