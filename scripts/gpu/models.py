"""Models of published shapes with random weights, and runners for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ops.decoder import DecoderModel
from ops.reference import ReferenceOps
from runtime.execution.cuda_graph_runner import CudaRecorder, graph_sizes
from runtime.execution.device import Device
from runtime.execution.graph_capture import GraphPlan, capture_graphs
from runtime.execution.kv_pool import bytes_per_token
from runtime.execution.mixed_graph_runner import mixed_shapes
from runtime.execution.model_runner import ModelRunner, RunnerSizes
from runtime.models.decoder import Decoder
from runtime.models.registry import read_family
from runtime.models.sources import loaded
from runtime.rope_layout import RopeLayout
from scripts._eager_recorder import EagerRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ops.op_set import OpSet
    from runtime.models.family import Family
    from runtime.models.sources import Source

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Model:
    """A published shape, and the longest context that it is measured with."""

    name: str
    family: Family
    context_length: int


def _model(name: str, context_length: int, **config: Any) -> Model:
    config["max_position_embeddings"] = context_length
    return Model(name, read_family(config), context_length)


QWEN = _model(
    "qwen3-0.6b",
    40_960,
    model_type="qwen3",
    vocab_size=151_936,
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    rope_theta=1e6,
)
LLAMA = _model(
    "llama-3.1-8b",
    32_768,
    model_type="llama",
    vocab_size=128_256,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14_336,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
)
TINY = _model(
    "tiny",
    128,
    model_type="qwen3",
    vocab_size=211,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
)


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


class RandomReader:
    """Random tensors in place of a checkpoint's, of which a model's activations have a variance
    near 1 and its logits a deviation near 3."""

    quantization: str | None = None

    def __init__(self, ops: OpSet, where: torch.device, dtype: torch.dtype, context: int) -> None:
        self.ops = ops
        self.rope_layout = RopeLayout(context)
        self.elements = 0  # of all matrices
        self._where: dict[str, Any] = {"device": where, "dtype": dtype}
        self._generator = None if where.type == "meta" else torch.Generator(where).manual_seed(0)
        self._shared: dict[int, Tensor] = {}

    def take(
        self, name: str, shape: tuple[int, ...], *, wide: bool = False, exact: bool = False
    ) -> Tensor:
        where = self._where | ({"dtype": torch.float32} if wide else {})
        if len(shape) == 1:
            return torch.ones(shape, **where)
        deviation = {"embed_tokens.weight": 1.0, "lm_head.weight": 3.0 * shape[1] ** -0.5}
        weight = torch.empty(shape, **where)
        self.elements += weight.numel()
        if self._generator is None:
            return weight
        spread = deviation.get(name, shape[1] ** -0.5)
        return weight.normal_(0.0, spread, generator=self._generator)

    def stacked(
        self,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: tuple[int, ...],
        *,
        wide: bool = False,
        exact: bool = False,
    ) -> Tensor:
        parts = zip(names, rows, strict=True)
        return torch.cat([self.take(name, (n, *columns), wide=wide) for name, n in parts])

    def coded(self, names: tuple[str, ...], outputs: tuple[int, ...], inputs: int) -> None:
        """None: there are no integers here."""

    def shared(self, source: Source, make: Callable[[], Tensor]) -> Tensor:
        if id(source) not in self._shared:
            self._shared[id(source)] = make().to(self._where["device"])
        return self._shared[id(source)]


def random_model(model: Model, device: Device) -> DecoderModel:
    """The model with random weights on the device."""
    reader = RandomReader(device.ops, device.torch_device, device.dtype, model.context_length)
    described = model.family.model
    embedding = described.embedding.read(reader, ".weight", described.hidden_size)
    made = loaded(replace(described, embedding=embedding), reader)
    assert isinstance(made, DecoderModel)
    return made


def step_weight_bytes(model: Model, dtype: torch.dtype) -> int:
    """Bytes of weights that a decode step reads: all but the embedding's other rows."""
    return linear_parameters(model) * dtype.itemsize


def linear_parameters(model: Model) -> int:
    """Elements of all linear layers, the head included: a token's multiply-adds."""
    reader = RandomReader(ReferenceOps(), torch.device("meta"), torch.float32, 1)
    loaded(replace(model.family.model, embedding=None), reader)
    return reader.elements


def fits(device: Device, model: Model) -> bool:
    """Whether the weights leave at least a fifth of the memory budget for KV."""
    if device.memory_budget_bytes is None:
        return True
    described = model.family.model
    embedding = described.vocab_size * described.hidden_size * device.dtype.itemsize
    weights = step_weight_bytes(model, device.dtype) + embedding
    return device.used_bytes() + weights < 0.8 * device.memory_budget_bytes


def pool_tokens(device: Device, model: Model, wanted: int) -> int:
    """Whole pages of KV: what is wanted, or what fits."""
    if device.memory_budget_bytes is not None:
        left = device.memory_budget_bytes - device.used_bytes()
        wanted = min(wanted, left // bytes_per_token(model.family.model, device.dtype))
    return wanted // PAGE_SIZE * PAGE_SIZE


def open_runner(device: Device, model: Model, *, rows: int, tokens: int) -> ModelRunner:
    """A runner whose steps of up to `rows` rows are captured."""
    decoder = Decoder(random_model(model, device), device.ops)
    sizes = RunnerSizes(
        page_size=PAGE_SIZE,
        total_tokens=pool_tokens(device, model, tokens),
        rows=rows,
        context_length=model.context_length,
    )
    runner = ModelRunner(device, decoder, sizes)
    recorder = CudaRecorder(device.torch_device) if device.graphs else EagerRecorder()
    # In Triton's interpreter every padded token costs.
    plan = GraphPlan(graph_sizes(rows), mixed_shapes(1024 if device.graphs else 32, rows))
    capture_graphs(runner, plan, recorder)
    return runner
