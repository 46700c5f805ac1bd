"""Checkpoints in float16 on a CPU with native kernels: matrices stay float16, with their values."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from ops.cpu import build
from ops.cpu.arguments import NativeLinear
from ops.op_set import PackedEmbedding
from tests.runtime.checkpoints.tiny_models import make_llama, write_gguf
from tests.runtime.models.test_families import FAMILIES
from tests.runtime.models.tiny_models import (
    Probe,
    expected_logits,
    make_model,
    open_runner,
    random_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from runtime.execution.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(
    not build.available_paths(), reason="this CPU has no native instruction path"
)

TOKENS = random_tokens(21)
# Step by step and expert by expert, with stacks, biases, latents, and norms of other kinds.
SOME = ("llama-biases-tied", "qwen2", "qwen3-moe", "gpt-oss", "deepseek-v2", "gemma3", "olmo2")


def half_model(folder: Path, name: str, **special: Any) -> PreTrainedModel:
    """Saved in float16; the model returned computes with the same values in float32."""
    model_type, given = FAMILIES[name]
    model = make_model(folder, model_type, scale=0.12, **given, **special).half()
    model.save_pretrained(folder)
    return model.float()


def logits_of(runner: ModelRunner) -> Tensor:
    (got,) = Probe(runner).step({1: (0, TOKENS)})
    runner.close()
    return got


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def linears(part: Any) -> Iterator[NativeLinear]:
    if isinstance(part, NativeLinear):
        yield part
    elif isinstance(part, tuple | list):
        for item in part:
            yield from linears(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from linears(getattr(part, field.name))


def test_every_weight_of_a_llama_has_the_value_of_the_file(tmp_path: Path) -> None:
    model = half_model(tmp_path, "llama-biases-tied")
    runner = open_runner(tmp_path)
    loaded: Any = runner.decoder.model
    state = model.state_dict()

    def rows(linear: NativeLinear) -> Tensor:
        packed = PackedEmbedding(linear, "float32")
        return runner.device.ops.embed(torch.arange(linear.n), packed)

    assert loaded.lm_head.panels is loaded.embedding.linear.panels
    assert torch.equal(rows(loaded.lm_head), state["model.embed_tokens.weight"])
    assert torch.equal(loaded.final_norm.weight, state["model.norm.weight"])
    for i, (attention, mlp) in enumerate(loaded.layers):
        at = f"model.layers.{i}."
        for linear, names in (
            (attention.mixer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (attention.mixer.o, ("self_attn.o_proj",)),
            (mlp.mixer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (mlp.mixer.down, ("mlp.down_proj",)),
        ):
            assert linear.kind == "float16"
            for found, suffix in ((rows(linear), "weight"), (linear.bias, "bias")):
                assert torch.equal(found, torch.cat([state[f"{at}{n}.{suffix}"] for n in names]))
        for block, name in ((attention, "input_layernorm"), (mlp, "post_attention_layernorm")):
            assert torch.equal(block.norm.weight, state[f"{at}{name}.weight"])
    details = runner.info.details
    assert (details["decoder"], details["weights"]) == ("compiled", "float16")
    assert (details["dtype"], details["kv_dtype"]) == ("bfloat16", "bfloat16")
    assert runner.device.weights == "float16, as the checkpoint has them"
    runner.close()


@pytest.mark.parametrize("name", SOME)
def test_logits_are_closer_to_transformers_than_those_of_bfloat16(
    name: str, tmp_path: Path
) -> None:
    model = half_model(tmp_path, name)
    want = expected_logits(model, TOKENS)
    runner = open_runner(tmp_path)
    assert {linear.kind for linear in linears(runner.decoder.model)} <= {"float16", "float32"}
    kept = error(logits_of(runner), want)
    rounded = error(logits_of(open_runner(tmp_path, dtype="bfloat16")), want)
    assert kept < 0.025  # keys and values are bfloat16, and so is what runs op by op
    assert kept < 0.9 * rounded


def test_a_gguf_file_of_f16_is_kept_as_it_is(tmp_path: Path) -> None:
    model = make_llama()
    runner = open_runner(write_gguf(model, tmp_path / "model.gguf", Kind.F16))
    assert {linear.kind for linear in linears(runner.decoder.model)} == {"float16"}
    assert runner.decoder.model.final_norm.weight.dtype == torch.float32
    want = expected_logits(model.half().float(), TOKENS)
    assert error(logits_of(runner), want) < 0.02


def test_a_type_or_a_quantization_that_is_asked_for_rules(tmp_path: Path) -> None:
    half_model(tmp_path, "llama")
    for options, kinds in (
        ({"dtype": "bfloat16"}, {"bfloat16"}),
        ({"quantization": "int8"}, {"int8"}),
        ({"quantization": "none"}, {"float16"}),
    ):
        runner = open_runner(tmp_path, **options)
        assert {linear.kind for linear in linears(runner.decoder.model)} == kinds
        runner.close()
