"""How a server starts: `build_runner` on a checkpoint, here a small one of random weights."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from runtime.config import RunnerConfig
from runtime.execution.build import build_runner
from runtime.execution.graph_capture import plan_graphs
from runtime.execution.kv_pool import bytes_per_token
from runtime.execution.kv_sizing import work_bytes
from runtime.execution.warm_up import largest_step
from runtime.request import SamplingParams
from scripts.gpu.correctness import Check
from scripts.gpu.engine import make_request, run_requests, scheduler_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.execution.device import Device
    from runtime.execution.model_runner import ModelRunner

_LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _INNER = 4, 512, 8, 2, 64, 1024
_FRACTION = 0.5


def _write_checkpoint(folder: Path, vocab: int, dtype: torch.dtype) -> None:
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocab,
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "intermediate_size": _INNER,
        "max_position_embeddings": 16_384,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator)
        return values.mul_(columns**-0.5).to(dtype)

    tensors = {"model.embed_tokens.weight": matrix(vocab, _HIDDEN) * 8}
    tensors["model.norm.weight"] = torch.ones(_HIDDEN, dtype=dtype)
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}."
        for part, rows, columns in (
            ("self_attn.q_proj", _HEADS * _HEAD_DIM, _HIDDEN),
            ("self_attn.k_proj", _KV_HEADS * _HEAD_DIM, _HIDDEN),
            ("self_attn.v_proj", _KV_HEADS * _HEAD_DIM, _HIDDEN),
            ("self_attn.o_proj", _HIDDEN, _HEADS * _HEAD_DIM),
            ("mlp.gate_proj", _INNER, _HIDDEN),
            ("mlp.up_proj", _INNER, _HIDDEN),
            ("mlp.down_proj", _HIDDEN, _INNER),
        ):
            tensors[f"{name}{part}.weight"] = matrix(rows, columns)
        for part, size in (
            ("input_layernorm", _HIDDEN),
            ("post_attention_layernorm", _HIDDEN),
            ("self_attn.q_norm", _HEAD_DIM),
            ("self_attn.k_norm", _HEAD_DIM),
        ):
            tensors[f"{name}{part}.weight"] = torch.ones(size, dtype=dtype)
    save_file(tensors, folder / "model.safetensors")


def check_build(device: Device, *, tiny: bool) -> Iterator[Check]:
    """A runner of half the device's memory: it starts, its largest step takes no more than was set
    aside for it, its graphs give the tokens of eager steps."""
    vocab = 1024 if tiny else 151_936
    cuda = device.torch_device.type == "cuda"
    with tempfile.TemporaryDirectory() as name:
        _write_checkpoint(Path(name), vocab, device.dtype)
        options: dict[str, Any] = {"device": device.torch_device.type, "model": name}
        if not cuda:
            options |= {"max_total_tokens": 2048, "cpu_kernels": "torch"}
        config = RunnerConfig(mem_fraction_static=_FRACTION, **options)
        runner, info = build_runner(
            config,
            page_size=16,
            max_running_requests=4 if tiny else 64,
        )
    tokens = runner.info.max_total_tokens
    kv = tokens * bytes_per_token(runner.decoder.model, runner.device.dtype)
    yield Check(
        "build_runner: starts",
        info.context_length == 16_384 and (runner.graphs is not None) == cuda,
        f"{tokens} tokens of KV, {kv:,} bytes",
    )
    yield _memory_check(runner, config, 64 if tiny else None)
    yield _token_check(runner, tiny=tiny)
    runner.close()


def _memory_check(runner: ModelRunner, config: RunnerConfig, step_tokens: int | None) -> Check:
    device = runner.device
    most = step_tokens or device.chunk_tokens or 0
    graphs = plan_graphs(config, device, runner.sizes)
    estimate = work_bytes(device, runner.decoder, runner.sizes, most, graphs)
    peak = device.peak_bytes(lambda: largest_step(runner, most))
    left = device.memory_bytes() - device.used_bytes()
    return Check(
        "build_runner: memory of the largest step",
        peak <= max(estimate, left),
        f"{most} tokens took {peak:,} bytes, {estimate:,} were set aside, {left:,} are free",
    )


def _token_check(runner: ModelRunner, *, tiny: bool) -> Check:
    draw, count = random.Random(3), 2 if tiny else 48
    prompts = [
        [draw.randrange(3, runner.info.vocab_size) for _ in range(draw.randint(5, 60))]
        for _ in range(count)
    ]
    sampling = SamplingParams(max_new_tokens=4 if tiny else 40, temperature=0.0, ignore_eos=True)
    found = []
    for captured in (True, False):
        if not captured:
            runner.graphs = runner.mixed_graphs = None
        requests = [make_request(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
        scheduler = scheduler_for(runner, chunk=256, mixed=True)
        found.append(run_requests(scheduler, runner, requests).tokens)
    same = sum(found[0][name] == found[1][name] for name in found[0])
    # Products of another number of rows differ in their last bits: near ties part.
    return Check(
        "build_runner: tokens with graphs and without",
        same >= 0.7 * count,
        f"{same} of {count} requests are the same",
    )
