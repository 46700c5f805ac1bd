"""A quantized GGUF file is served as it is: in its own kinds, to the same results as its values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from ops.coded_weight import CodedMatrix
from ops.cpu import build
from ops.op_set import PackedEmbedding
from runtime.checkpoints.gguf_checkpoint import GgufCheckpoint
from runtime.checkpoints.gguf_codes import read_codes, values_are_exact
from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.errors import ModelError
from runtime.execution import packed_weights
from tests.cache import cache_folder
from tests.ops.cpu.test_native_codes import random_blocks
from tests.runtime.models.tiny_models import Probe, open_runner, random_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from runtime.execution.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(
    not build.available_paths(), reason="this CPU has no native instruction path"
)

HIDDEN, INNER, VOCAB, LAYERS = 256, 512, 131, 2
# Of factors that no integers stand beside, so that weights are about as large in all types.
SPREADS = {Kind.Q8_0: 1e-3, Kind.Q5_0: 6e-3, Kind.Q4_1: 6e-3}
# Rows, columns and types of a layer's matrices in the first layer and in the second: as in the
# mixtures that llama-quantize writes, and some that it does not.
MATRICES = {
    "attn_q": (256, HIDDEN, Kind.Q4_K, Kind.Q4_K),
    "attn_k": (128, HIDDEN, Kind.Q4_K, Kind.Q3_K),
    "attn_v": (128, HIDDEN, Kind.Q6_K, Kind.Q8_0),
    "attn_output": (HIDDEN, 256, Kind.Q5_K, Kind.IQ4_XS),
    "ffn_gate": (INNER, HIDDEN, Kind.Q4_K, Kind.Q5_0),
    "ffn_up": (INNER, HIDDEN, Kind.Q4_K, Kind.Q2_K),
    "ffn_down": (HIDDEN, INNER, Kind.Q6_K, Kind.Q4_1),
}


def write(
    path: Path,
    matrices: dict[str, tuple[int, int, Kind, Kind]] = MATRICES,
    blocks: dict[str, np.ndarray] | None = None,
    experts: int = 0,
) -> Path:
    """A Llama with its embedding as output layer. blocks: of some matrices of the first layer.
    experts: of a layer, each with matrices of the MLP, two for a token."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([str(i) for i in range(VOCAB)])
    rand = np.random.default_rng(7)
    norms = {"output_norm": 1.0}
    writer.add_tensor(
        "token_embd.weight", random_blocks(Kind.Q6_K, VOCAB, HIDDEN), raw_dtype=Kind.Q6_K
    )
    for layer in range(LAYERS):
        norms |= {f"blk.{layer}.attn_norm": 1.0, f"blk.{layer}.ffn_norm": 1.0}
        for seed, (name, (n, k, *kinds)) in enumerate(matrices.items()):
            kind = kinds[layer]
            rows = random_blocks(kind, n, k, seed + 10 * layer, SPREADS.get(kind, 3e-4))
            if layer == 0 and blocks is not None:
                rows = blocks.get(name, rows)
            if experts and name.startswith("ffn"):
                name += "_exps"
                rows = np.stack([np.roll(rows, i, axis=0) for i in range(experts)])
            writer.add_tensor(f"blk.{layer}.{name}.weight", rows, raw_dtype=kind)
        if experts:
            router = rand.standard_normal((experts, HIDDEN)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    for name in norms:
        values = (1 + 0.1 * rand.standard_normal(HIDDEN)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("coded") / "model.gguf")


@pytest.fixture(scope="module")
def runner(path: Path) -> Iterator[ModelRunner]:
    runner = open_runner(path)
    yield runner
    runner.close()


def logits(runner: ModelRunner, tokens: list[int], *sizes: int) -> torch.Tensor:
    """Of all tokens, computed in chunks of these sizes, beside a row of other tokens."""
    probe, found, at = Probe(runner), [], 0
    for size in sizes:
        found.append(probe.step({1: (at, tokens[at : at + size]), 2: (at, tokens[:size])})[0])
        at += size
    return torch.cat(found)


def test_matrices_are_kept_in_the_kinds_of_the_file(runner: ModelRunner) -> None:
    model: Any = runner.decoder.model
    assert runner.info.details["decoder"] == "compiled"
    assert isinstance(model.embedding, PackedEmbedding)
    assert model.embedding.linear.kinds == ("q6_k",)
    assert model.lm_head.panels is model.embedding.linear.panels
    kinds = [
        [linear.kinds for linear in (layer[0].mixer.qkv, layer[0].mixer.o)]
        + [linear.kinds for linear in (layer[1].mixer.gate_up, layer[1].mixer.down)]
        for layer in model.layers
    ]
    assert kinds == [
        [("q4_k", "q4_k", "q6_k"), ("q5_k",), ("q4_k", "q4_k"), ("q6_k",)],
        [("q4_k", "q3_k", "int8"), ("iq4_xs",), ("q5_1", "q2_k"), ("int4",)],
    ]


def test_steps_are_those_of_the_values_within_the_rounding_of_inputs(
    runner: ModelRunner, path: Path
) -> None:
    tokens = random_tokens(40, vocab_size=VOCAB)
    got = logits(runner, tokens, 40)
    wide = open_runner(path, dtype="float32")
    want = logits(wide, tokens, 40)
    wide.close()
    assert float((got - want).norm() / want.norm()) < 0.03
    assert torch.equal(got.argmax(-1)[:8], want.argmax(-1)[:8])


def test_chunks_and_neighbours_change_no_bit(runner: ModelRunner) -> None:
    tokens = random_tokens(40, vocab_size=VOCAB)
    want = logits(runner, tokens, 40)
    for sizes in ((7, 7, 7, 7, 7, 5), (39, 1), (1, 20, 19)):
        assert torch.equal(logits(runner, tokens, *sizes), want)


def test_a_plain_run_block_by_block_agrees(runner: ModelRunner) -> None:
    """The rows of the packed embedding, and layers in parts, by single operations."""
    tokens = random_tokens(20, vocab_size=VOCAB)
    want, compiled = logits(runner, tokens, 20), runner.decoder.compiled
    runner.decoder.compiled = None
    try:
        got = logits(runner, tokens, 20)
    finally:
        runner.decoder.compiled = compiled
    assert float((got - want).norm() / want.norm()) < 0.05  # activations are bfloat16


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"quantization": "none"}, "bfloat16, as asked for"),
        ({"dtype": "float32"}, "float32, as asked for"),
        ({"quantization": "int8"}, "int8, as asked for"),
    ],
)
def test_floats_or_another_form_can_be_asked_for(
    path: Path, options: dict[str, Any], weights: str
) -> None:
    runner = open_runner(path, **options)
    assert isinstance(runner.decoder.model.embedding, torch.Tensor)
    assert runner.device.weights == weights
    runner.close()


def test_experts_are_kept_in_the_kinds_of_the_file(tmp_path: Path) -> None:
    gate, up = (
        (INNER, HIDDEN, *kinds) for kinds in ((Kind.Q4_K, Kind.Q3_K), (Kind.Q4_K, Kind.Q2_K))
    )
    mlp = {"ffn_gate": gate, "ffn_up": up, "ffn_down": (HIDDEN, INNER, Kind.Q6_K, Kind.IQ4_XS)}
    path = write(tmp_path / "model.gguf", MATRICES | mlp, experts=4)
    kept, wide = open_runner(path), open_runner(path, dtype="float32")
    model: Any = kept.decoder.model
    found = [
        {tuple(linear.kinds for linear in pair) for pair in layer[1].mixer.experts.pairs}
        for layer in model.layers
    ]
    assert found == [{(("q4_k", "q4_k"), ("q6_k",))}, {(("q3_k", "q2_k"), ("iq4_xs",))}]
    tokens = random_tokens(20, vocab_size=VOCAB)
    got, want = logits(kept, tokens, 20), logits(wide, tokens, 20)
    assert float((got - want).norm() / want.norm()) < 0.03
    assert torch.equal(logits(kept, tokens, 7, 13), got)
    kept.close()
    wide.close()


def test_powers_of_two_are_the_packages_values() -> None:
    """MXFP4, whose powers of two beyond half floats stand only where all numbers are 0."""
    blocks = np.random.default_rng(3).integers(0, 256, (6, 40, 17), dtype=np.uint8)
    blocks[..., 0] = np.arange(104, 144)
    blocks[0, :4, 1:], blocks[0, :4, 0] = 0x88, (0, 1, 103, 255)
    rows = blocks.reshape(6, -1)
    codes = read_codes(Kind.MXFP4, rows)
    positive = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)  # twice the numbers of e2m1
    twice = np.concatenate((positive, -positive))[codes.codes].reshape(6, 40, 32)
    values = twice * codes.factors[..., None]
    assert np.array_equal(values.reshape(6, -1), dequantize(rows, Kind.MXFP4))
    assert values_are_exact(Kind.MXFP4, rows)
    for power in (103, 144):
        blocks[3, 3, 0] = power
        assert not values_are_exact(Kind.MXFP4, blocks.reshape(6, -1))


def test_a_factor_that_has_no_place_is_told(tmp_path: Path) -> None:
    """-16 times the factor of a Q5_0 block is kept as half a float."""
    matrices = MATRICES | {"attn_output": (HIDDEN, 256, Kind.Q5_0, Kind.Q5_0)}
    blocks = random_blocks(Kind.Q5_0, HIDDEN, 256)
    blocks[3, :2] = np.frombuffer(np.float16(5000).tobytes(), np.uint8)
    path = write(tmp_path / "model.gguf", matrices, {"attn_output": blocks})
    with pytest.raises(ModelError, match=r"blk\.0\.attn_output\.weight: a factor is too large"):
        open_runner(path)
    open_runner(path, quantization="none").close()


def test_a_file_of_packed_weights_keeps_the_kinds(
    runner: ModelRunner, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_WEIGHTS", 0)
    kernels = cache_folder() / build.FOLDER
    (tmp_path / build.FOLDER).symlink_to(kernels)
    tokens = random_tokens(20, vocab_size=VOCAB)
    want = logits(runner, tokens, 20)
    read: list[str] = []
    for start in range(2):
        again = open_runner(path, cache_dir=str(tmp_path))
        assert torch.equal(logits(again, tokens, 20), want)
        model: Any = again.decoder.model
        assert model.lm_head.panels is model.embedding.linear.panels
        assert model.layers[1][0].mixer.qkv.kinds == ("q4_k", "q3_k", "int8")
        again.close()
        if start == 0:
            assert list((tmp_path / packed_weights.FOLDER).glob("[!.]*/weights"))
            monkeypatch.setattr(GgufCheckpoint, "read", lambda self, name: read.append(name))
    assert read == []


def test_pages_of_the_file_are_given_back(path: Path) -> None:
    """What was read of a mapped file is not in memory a second time."""
    checkpoint = open_checkpoint(path)
    name, released = "model.layers.0.mlp.down_proj.weight", []
    (source,) = checkpoint._sources[name]  # type: ignore[attr-defined]
    checkpoint._sources[name] = [source._replace(release=lambda: released.append(name))]  # type: ignore[attr-defined]
    matrix = checkpoint.coded(name)
    assert isinstance(matrix, CodedMatrix)
    matrix.read(0, 256)
    checkpoint.read(name)
    assert released == [name, name]
