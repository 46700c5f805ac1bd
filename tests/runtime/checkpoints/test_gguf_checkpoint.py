"""A GGUF file gives the model it was written from: weights, config, greedy tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.gguf_checkpoint import llama3_scaling
from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.errors import ModelError
from tests.runtime.checkpoints.tiny_models import (
    make_llama,
    make_model,
    tensors_of,
    write_folder,
    write_gguf,
)

PROMPT = [104, 105, 32, 116, 104, 101, 114, 101]


def tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    raw = checkpoint.read(name)
    return torch.frombuffer(raw.buffer, dtype=getattr(torch, raw.dtype)).view(raw.shape)


def greedy(checkpoint: Checkpoint, count: int) -> list[int]:
    """Greedy tokens of transformers' model in float32 with the checkpoint's config and weights."""
    model = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config)).float().eval()
    )
    state = {name: tensor(checkpoint, name).float() for name in checkpoint.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if checkpoint.config["tie_word_embeddings"] else [])
    model.tie_weights()
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return output[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda k: k.name)
def test_unquantized_file_gives_the_same_values_and_greedy_tokens(tmp_path, kind, tied):
    model = make_llama(tied=tied)
    dtype = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]
    folder = open_checkpoint(write_folder(model, tmp_path / "folder", dtype))
    file = open_checkpoint(write_gguf(model, tmp_path / "model.gguf", kind))

    assert set(file.tensors) == set(folder.tensors)
    for name, info in folder.tensors.items():
        assert file.tensors[name].shape == info.shape
        assert torch.equal(tensor(file, name), tensor(folder, name)), name
    assert greedy(file, 24) == greedy(folder, 24)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_files_keep_biases_head_norms_and_the_order_of_rows(tmp_path, model_type):
    model = make_model(model_type)
    folder = open_checkpoint(write_folder(model, tmp_path / "folder"))
    file = open_checkpoint(write_gguf(model, tmp_path / "model.gguf", Kind.F32))
    assert set(file.tensors) == set(folder.tensors)
    assert all(torch.equal(tensor(file, name), tensor(folder, name)) for name in file.tensors)
    assert file.config["model_type"] == model_type
    assert greedy(file, 24) == greedy(folder, 24)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda k: k.name)
def test_quantized_file_gives_values_within_the_step_of_its_blocks(tmp_path, kind):
    model = make_llama()
    file = open_checkpoint(write_gguf(model, tmp_path / "model.gguf", kind))
    steps = 127 if kind is Kind.Q8_0 else 7.5
    for name, expected in tensors_of(model).items():
        got = tensor(file, name)
        assert got.dtype == torch.float32
        if expected.ndim == 2:
            blocks = expected.reshape(expected.shape[0], -1, 32)
            step = blocks.abs().amax(-1, keepdim=True) / steps
            assert ((got.view_as(blocks) - blocks).abs() <= step * 1.05).all(), name
        else:
            assert torch.equal(got, expected), name


def test_q8_0_agrees_with_the_unquantized_model_for_eight_greedy_tokens(tmp_path):
    model = make_llama(seed=7)  # random weights whose first choices are no near-ties
    folder = open_checkpoint(write_folder(model, tmp_path / "folder"))
    file = open_checkpoint(write_gguf(model, tmp_path / "model.gguf", Kind.Q8_0))
    assert greedy(file, 8) == greedy(folder, 8)


def test_k_quants_are_dequantized(tmp_path):
    """A Q6_K block is 128 + 64 bytes of 6-bit values (0 stands for -32), 16 scales and a float16
    factor: with scales 1 and factor 0.5 every value is -16."""
    block = np.zeros(210, np.uint8)
    block[192:208] = 1
    block[208:] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    name = "model.layers.0.mlp.down_proj.weight"
    blocks = {name: (np.tile(block, (64, 1)), Kind.Q6_K)}
    path = write_gguf(make_llama(), tmp_path / "model.gguf", Kind.Q8_0, blocks)
    assert torch.equal(tensor(open_checkpoint(path), name), torch.full((64, 256), -16.0))


def test_config_has_the_decimals_that_were_meant(tmp_path):
    config = open_checkpoint(write_gguf(make_llama(), tmp_path / "model.gguf", Kind.F16)).config
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 500000.0
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert config["rope_scaling"] is None
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert config["head_dim"] == 16
    assert config["tie_word_embeddings"] is False
    assert config["dtype"] == "float16"


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_from_its_divisors(factor):
    given = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = make_llama()
    config = AutoConfig.for_model(**{**model.config.to_dict(), "rope_parameters": given})
    config.head_dim = 64
    config.max_position_embeddings = 131072
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)

    found = llama3_scaling((plain / scaled.double()).numpy(), 64, 500000.0, 131072)
    assert found == {key: value for key, value in given.items() if key != "rope_theta"}


def test_unknown_divisors_are_not_taken_for_a_scaling():
    assert llama3_scaling(np.linspace(1.0, 3.0, 32), 64, 500000.0, 131072) is None


def test_another_architecture_is_refused_by_name(tmp_path):
    write_metadata(tmp_path / "model.gguf", "mamba")
    with pytest.raises(ModelError, match=r"architecture 'mamba': GGUF files of llama, qwen2"):
        open_checkpoint(tmp_path / "model.gguf")


def write_metadata(path, architecture, **values):
    writer = GGUFWriter(path, architecture)
    for key, value in values.items():
        writer.add_uint32(key.replace("_", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_without_weights_is_refused(tmp_path):
    write_metadata(tmp_path / "model.gguf", "llama")
    with pytest.raises(ModelError, match=r"lacks llama\.block_count"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_file_that_is_not_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model, but long enough to be one" * 4)
    with pytest.raises(ModelError, match=r"model\.gguf: not a GGUF file"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_file_cut_short_is_refused(tmp_path):
    path = write_gguf(make_llama(), tmp_path / "model.gguf", Kind.F16)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="cut short"):
        open_checkpoint(path)


def test_a_path_without_a_model_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ModelError, match="no such folder or file"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf file"):
        open_checkpoint(tmp_path / "notes.txt")
