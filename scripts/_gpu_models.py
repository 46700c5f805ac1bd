"""Models of published shapes with random weights, and runners for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ops.op_set import AttentionSpec, DecoderSpec, DecoderWeights, LayerWeights
from runtime.execution.cuda_graph_runner import CudaGraphRunner, CudaRecorder, graph_sizes
from runtime.execution.device import Device
from runtime.execution.kv_pool import bytes_per_token
from runtime.execution.model_runner import ModelRunner, RunnerSizes
from runtime.models.decoder import Decoder
from runtime.models.rope import RopeSpec
from tests.ops.gpu.eager_recorder import EagerRecorder

if TYPE_CHECKING:
    from torch import Tensor

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Model:
    """A published shape, and the longest context that it is measured with."""

    name: str
    spec: DecoderSpec
    theta: float
    context_length: int


def _spec(
    vocab: int,
    hidden: int,
    layers: int,
    heads: int,
    head_dim: int,
    intermediate: int,
    qk_norm: bool,
) -> DecoderSpec:
    return DecoderSpec(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads // 4 if not qk_norm else heads // 2,
        head_dim=head_dim,
        intermediate_size=intermediate,
        rms_eps=1e-6 if qk_norm else 1e-5,
        scale=head_dim**-0.5,
        rotary_dim=head_dim,
        windows=(0,) * layers,
        qk_norm=qk_norm,
    )


QWEN = Model("qwen3-0.6b", _spec(151_936, 1024, 28, 16, 128, 3072, True), 1e6, 40_960)
LLAMA = Model("llama-3.1-8b", _spec(128_256, 4096, 32, 32, 128, 14_336, False), 5e5, 32_768)
TINY = Model("tiny", _spec(211, 32, 2, 4, 16, 48, True), 1e4, 128)


def open_target(name: str) -> Device:
    """The device that is checked: bfloat16 on "cuda", float32 on "cpu" in Triton's interpreter."""
    from ops.gpu.op_set import GpuOps

    cuda = name == "cuda"
    total = torch.cuda.get_device_properties(0).total_memory if cuda else None
    return Device(
        torch_device=torch.device(name),
        dtype=torch.bfloat16 if cuda else torch.float32,
        ops=GpuOps(),
        queued=cuda,
        pinned=cuda,
        graphs=cuda,
        memory_budget_bytes=None if total is None else int(0.88 * total),
        description=torch.cuda.get_device_name() if cuda else "cpu, Triton's interpreter",
    )


def random_weights(model: Model, device: Device) -> DecoderWeights:
    """Weights whose activations have a variance near 1, and logits a deviation near 3."""
    spec = model.spec
    generator = torch.Generator(device.torch_device).manual_seed(0)

    def matrix(rows: int, columns: int, deviation: float = 1.0) -> Tensor:
        weight = torch.empty(rows, columns, dtype=device.dtype, device=device.torch_device)
        return weight.normal_(0.0, deviation * columns**-0.5, generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=device.dtype, device=device.torch_device)

    pack = device.ops.pack_linear
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    context = model.context_length
    rope = RopeSpec("default", model.theta, spec.rotary_dim, context, context).table(context)
    rope = rope.to(device.torch_device)
    return DecoderWeights(
        embedding=matrix(spec.vocab_size, spec.hidden_size, spec.hidden_size**0.5),
        layers=[
            LayerWeights(
                input_norm=ones(spec.hidden_size),
                qkv=pack(matrix(q_size + 2 * kv_size, spec.hidden_size)),
                o=pack(matrix(spec.hidden_size, q_size)),
                post_attention_norm=ones(spec.hidden_size),
                gate_up=pack(matrix(2 * spec.intermediate_size, spec.hidden_size)),
                down=pack(matrix(spec.hidden_size, spec.intermediate_size)),
                rope=rope,
                attention=AttentionSpec(spec.scale),
                q_norm=ones(spec.head_dim) if spec.qk_norm else None,
                k_norm=ones(spec.head_dim) if spec.qk_norm else None,
            )
            for _ in range(spec.num_layers)
        ],
        final_norm=ones(spec.hidden_size),
        lm_head=pack(matrix(spec.vocab_size, spec.hidden_size, 3.0)),
    )


def step_weight_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes of weights that a decode step reads: all but the embedding's other rows."""
    return linear_parameters(spec) * dtype.itemsize


def linear_parameters(spec: DecoderSpec) -> int:
    """Elements of all linear layers, the head included: a token's multiply-adds."""
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
    layer = spec.hidden_size * (heads * spec.head_dim + 3 * spec.intermediate_size)
    return spec.num_layers * layer + spec.vocab_size * spec.hidden_size


def fits(device: Device, model: Model) -> bool:
    """Whether the weights leave at least a fifth of the memory budget for KV."""
    if device.memory_budget_bytes is None:
        return True
    embedding = model.spec.vocab_size * model.spec.hidden_size * device.dtype.itemsize
    weights = step_weight_bytes(model.spec, device.dtype) + embedding
    return device.used_bytes() + weights < 0.8 * device.memory_budget_bytes


def pool_tokens(device: Device, model: Model, wanted: int) -> int:
    """Whole pages of KV: what is wanted, or what fits."""
    if device.memory_budget_bytes is not None:
        left = device.memory_budget_bytes - device.used_bytes()
        wanted = min(wanted, left // bytes_per_token(model.spec, device.dtype))
    return wanted // PAGE_SIZE * PAGE_SIZE


def open_runner(device: Device, model: Model, *, rows: int, tokens: int) -> ModelRunner:
    """A runner whose decode steps of up to `rows` rows are captured."""
    decoder = Decoder(model.spec, random_weights(model, device), device.ops)
    sizes = RunnerSizes(
        page_size=PAGE_SIZE,
        total_tokens=pool_tokens(device, model, tokens),
        rows=rows,
        context_length=model.context_length,
    )
    runner = ModelRunner(device, decoder, sizes)
    where = device.torch_device
    recorder = CudaRecorder(where) if device.graphs else EagerRecorder()
    ladder = graph_sizes(rows)
    runner.graphs = CudaGraphRunner(
        recorder, runner.decode_logits, ladder, model.context_length, where
    )
    return runner
