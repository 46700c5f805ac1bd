"""Makes a runner of options: opens the checkpoint and the device, loads, sizes the KV pool."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ops.coded_weight import GroupedMatrix
from runtime.checkpoints.embedded import ensure_embedded_model
from runtime.checkpoints.open_checkpoint import open_checkpoint
from runtime.checkpoints.quantized.in_blocks import in_blocks
from runtime.config import MAX_PREFILL_TOKENS
from runtime.errors import ConfigError, ModelError, shown
from runtime.execution.cuda_graph_runner import CudaRecorder
from runtime.execution.device import DTYPES, Device, open_device
from runtime.execution.graph_capture import capture_graphs, plan_graphs
from runtime.execution.kv_pool import bytes_per_state
from runtime.execution.kv_sizing import check_memory, pool_sizes, work_bytes
from runtime.execution.long_prompt_rows import LongPromptRows
from runtime.execution.model_runner import ModelRunner, RunnerSizes
from runtime.execution.packed_weights import PackedWeights
from runtime.execution.warm_up import warm_up
from runtime.execution.weight_form import StoredWeights, layer_shapes
from runtime.execution.weights import WeightLoader
from runtime.models.decoder import Decoder
from runtime.models.family import rope_tables
from runtime.models.registry import read_family

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ops.decoder import DecoderModel
    from runtime.checkpoints.checkpoint import Checkpoint
    from runtime.config import RunnerConfig
    from runtime.models.family import Family
    from runtime.models.rope import RopeSpec
    from runtime.rope_layout import RopeLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the server needs to know of the model beside its runner.

    Args:
        context_length: tokens of a sequence, prompt and output together.
        eos_token_ids: ids that end a generation.
        model_type, architectures: as its config.json names them.
        digest: a hash of its config.json. The time of a step depends on this, on the form of the
            weights, the kernels and the machine.
    """

    context_length: int
    eos_token_ids: frozenset[int]
    model_type: str
    architectures: tuple[str, ...]
    digest: str = ""


def build_runner(
    config: RunnerConfig,
    *,
    page_size: int,
    max_running_requests: int,
    max_prefill_tokens: int = MAX_PREFILL_TOKENS,
    chunked_prefill_size: int | None = None,
    state_slots: int | None = None,
    tokenizer_size: int | None = None,
    tokenizer_eos_id: int | None = None,
    published_form: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    before_device: Callable[[], None] = lambda: None,
) -> tuple[ModelRunner, ModelInfo]:
    """A runner with its weights loaded, ready for the first step.

    Args:
        max_prefill_tokens: of a step, or a whole prompt.
        chunked_prefill_size: as the option: None for what the device has by default, 0 or -1 for
            whole prompts.
        state_slots: as the option: None for as many as memory is set aside for.
        tokenizer_size: ids from here on are never sampled; None: every row of the output layer.
        tokenizer_eos_id: ends a generation too: fine-tunes change it and leave the configs behind.
        published_form: the quantization whose values the weights are, by their publisher.
        progress: told what is going on, at least every two seconds.
        before_device: called before the device is opened, with a checkpoint that can be read.
    Raises:
        ModelError: the model cannot be loaded. ConfigError: the options do not fit it or the
            device.
    """
    path = _model_path(config, progress)
    checkpoint = open_checkpoint(path)
    family = _read_family(checkpoint)
    context_length = _context_length(config, family)
    rope_layout = family.rope_layout(context_length, max_prefill_tokens)
    stored = stored_weights(checkpoint, published_form)
    before_device()
    device = open_device(config, stored, progress)
    weights = f"; weights: {device.weights}" if device.weights else ""
    progress(f"loading {path.name} on {device.description}{weights}")
    model = PackedWeights(config, device, path, progress).load(
        lambda: _weight_loader(checkpoint, family, device, rope_layout, progress),
        tokenizer_size or family.model.vocab_size,
    )
    info = _model_info(checkpoint, context_length, tokenizer_eos_id, model.vocab_size)
    decoder = _make_decoder(model, device, path)
    if bytes_per_state(model):
        device = replace(device, graphs=False)  # a row's tokens are gone through one by one
    sizes = RunnerSizes(
        page_size=page_size,
        total_tokens=0,
        rows=max_running_requests,
        context_length=context_length,
    )
    most = _largest_step(chunked_prefill_size, max_prefill_tokens, device, context_length)
    work = 0
    if config.max_total_tokens is None:
        work = work_bytes(device, decoder, sizes, most, plan_graphs(config, device, sizes))
    sizes = pool_sizes(config, device, model, sizes, work, state_slots)
    check_memory(sizes, device, model)
    runner = ModelRunner(
        device,
        decoder,
        sizes,
        eos_token_ids=info.eos_token_ids,
        long_prompts=_long_prompt_rows(rope_layout, rope_tables(family, model), device),
    )
    _prepare(runner, config, progress)
    return runner, info


def stored_weights(checkpoint: Checkpoint, published_form: str | None) -> StoredWeights:
    """What the choice of a form starts from; see `build_runner`."""
    shapes = layer_shapes(checkpoint.tensors)
    kinds, group_kinds = set(), set()
    for name in checkpoint.tensors:
        matrix = checkpoint.coded(name)
        blocks = in_blocks(matrix)
        if blocks is not None:
            kinds.add(blocks.kind)
        if isinstance(matrix, GroupedMatrix):
            group_kinds.add(matrix.kind)
    return StoredWeights(
        _checkpoint_dtype(checkpoint),
        published_form,
        shapes,
        tuple(sorted(kinds)),
        tuple(sorted(group_kinds)),
    )


def _weight_loader(
    checkpoint: Checkpoint,
    family: Family,
    device: Device,
    rope_layout: RopeLayout,
    progress: Callable[[str], None],
) -> WeightLoader:
    return WeightLoader(
        family,
        checkpoint,
        device.ops,
        device=device.torch_device,
        dtype=device.dtype,
        rope_layout=rope_layout,
        quantization=device.quantization,
        keeps_codes=device.keeps_codes,
        keeps_floats=device.keeps_floats,
        progress=progress,
    )


def _make_decoder(model: DecoderModel, device: Device, path: Path) -> Decoder:
    """Raises: ModelError: it has a shape that the device's kernels do not have."""
    try:
        return Decoder(model, device.ops)
    except ValueError as error:
        raise ModelError(f"{path} cannot run on {device.description}: {error}") from error


def _largest_step(
    chunked_prefill_size: int | None, max_prefill_tokens: int, device: Device, context_length: int
) -> int:
    """Prefill tokens of the largest step; a whole prompt may have more than a step's bound."""
    size = device.chunk_tokens if chunked_prefill_size is None else chunked_prefill_size
    if size is None or size <= 0:
        return context_length
    return min(size, max_prefill_tokens, context_length)


def _long_prompt_rows(
    layout: RopeLayout, tables: Sequence[tuple[RopeSpec, torch.Tensor]], device: Device
) -> LongPromptRows | None:
    if layout.long_prompts is None:
        return None
    return LongPromptRows(layout.long_prompts, layout, tables, device)


def _prepare(runner: ModelRunner, config: RunnerConfig, progress: Callable[[str], None]) -> None:
    """Does ahead of the first step what would hold it up."""
    if runner.device.queued:
        progress("compiling kernels")
        warm_up(runner)  # before there are graphs, which would take some of its steps
    if runner.device.graphs:
        _capture_graphs(runner, config, progress)


def _model_info(
    checkpoint: Checkpoint, context_length: int, tokenizer_eos_id: int | None, vocab_size: int
) -> ModelInfo:
    return ModelInfo(
        context_length=context_length,
        eos_token_ids=_eos_token_ids(checkpoint, tokenizer_eos_id, vocab_size),
        model_type=str(checkpoint.config["model_type"]),
        architectures=_architectures(checkpoint),
        digest=hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode()).hexdigest(),
    )


def _architectures(checkpoint: Checkpoint) -> tuple[str, ...]:
    named = checkpoint.config.get("architectures")
    return tuple(map(str, named)) if isinstance(named, list) else ()


def _read_family(checkpoint: Checkpoint) -> Family:
    try:
        return read_family(checkpoint.config)
    except ModelError as error:
        raise ModelError(f"{checkpoint.path}: {error}") from None


def _model_path(config: RunnerConfig, progress: Callable[[str], None]) -> Path:
    if config.model is not None:
        return Path(config.model).expanduser()
    return ensure_embedded_model(config.cache_folder, progress)


def _context_length(config: RunnerConfig, family: Family) -> int:
    model = family.context_length
    asked = config.context_length
    if asked is None:
        return model
    if not 1 <= asked <= model:
        raise ConfigError(f"context_length {asked}: must be from 1 to the model's own, {model}")
    return asked


def _checkpoint_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The type that the config names, else that of the first tensor."""
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if named in DTYPES:
        return DTYPES[named]
    first = next(iter(checkpoint.tensors.values()), None)
    return DTYPES.get(first.dtype if first else "float32", torch.float32)


def _eos_token_ids(
    checkpoint: Checkpoint, tokenizer_eos_id: int | None, vocab_size: int
) -> frozenset[int]:
    """Those of both configs and the tokenizer's own; ids that cannot be sampled end nothing.

    Raises: ModelError: a config names something else than an id or a list of ids.
    """
    found = set() if tokenizer_eos_id is None else {tokenizer_eos_id}
    for config in (checkpoint.generation_config, checkpoint.config):
        given = config.get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise ModelError(
                f"{checkpoint.path}: eos_token_id {shown(given)}: must be an id or a list of ids"
            )
        found.update(ids)
    return frozenset(i for i in found if 0 <= i < vocab_size)


def _capture_graphs(
    runner: ModelRunner, config: RunnerConfig, progress: Callable[[str], None]
) -> None:
    plan = plan_graphs(config, runner.device, runner.sizes)
    try:
        capture_graphs(runner, plan, CudaRecorder(runner.device.torch_device), progress)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"cuda_graph_max_bs {config.cuda_graph_max_bs} with cuda_graph_max_tokens"
            f" {config.cuda_graph_max_tokens}: no memory is left to capture steps in; of"
            f" {runner.device.memory_bytes():,} bytes {runner.device.used_bytes():,} are taken,"
            f" with KV of {runner.sizes.total_tokens} tokens. Capture fewer rows or tokens, or"
            f" lower mem_fraction_static ({config.mem_fraction_static:g})"
        ) from None
