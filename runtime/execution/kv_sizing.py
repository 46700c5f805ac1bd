"""How large the KV pool is: what a device's memory leaves beside weights and work."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.config import CPU_TOTAL_TOKENS
from runtime.errors import ConfigError
from runtime.execution.graph_capture import rehearse_graphs
from runtime.execution.kv_pool import block_table_bytes, bytes_per_state, bytes_per_token
from runtime.execution.model_runner import ModelRunner, RunnerSizes
from runtime.execution.sampler import state_bytes
from runtime.execution.warm_up import largest_step

if TYPE_CHECKING:
    from ops.decoder import DecoderModel
    from runtime.config import RunnerConfig
    from runtime.execution.device import Device
    from runtime.execution.graph_capture import GraphPlan
    from runtime.models.decoder import Decoder

_MIN_TOTAL_TOKENS = 1024  # a GPU with room for less is refused
_MIN_PAGES = 3
_LEAST_STATE_SLOTS = 8


def work_bytes(
    device: Device, decoder: Decoder, sizes: RunnerSizes, step_tokens: int, graphs: GraphPlan
) -> int:
    """Memory that a runner takes beside weights and KV, where the device's memory is a limit: the
    largest step's activations and those of the captured steps, which have a pool of their own, both
    measured, and what is kept for each row. Elsewhere 0.

    Args:
        sizes: those of the runner to be; `total_tokens` is not read.
        step_tokens: prefill tokens of the largest step.
        graphs: what it captures.
    """
    if device.memory_budget_bytes is None:
        return 0
    least = RunnerSizes(
        page_size=sizes.page_size,
        total_tokens=_MIN_PAGES * sizes.page_size,
        rows=sizes.rows,
        context_length=sizes.context_length,
    )
    trial = ModelRunner(device, decoder, least)
    try:
        peak = device.peak_bytes(lambda: largest_step(trial, step_tokens))
        if device.graphs:
            peak += device.peak_bytes(lambda: rehearse_graphs(trial, graphs))
    finally:
        trial.close()
    return peak + _row_bytes(decoder.model, sizes)


def pool_sizes(
    config: RunnerConfig,
    device: Device,
    model: DecoderModel,
    sizes: RunnerSizes,
    work: int,
    state_slots: int | None,
) -> RunnerSizes:
    """The sizes with the KV tokens and the saved recurrent states that there is room for.

    Args:
        work: see `work_bytes`.
        state_slots: None for half as much memory as the KV pool has.
    Raises: ConfigError: see `total_tokens`.
    """
    total = total_tokens(config, device, model, sizes.page_size, work)
    each = bytes_per_state(model)
    if not each:
        return replace(sizes, total_tokens=total)
    shared = config.max_total_tokens is None and device.memory_budget_bytes is not None
    if state_slots is None:
        kv = total * bytes_per_token(model, device.kv_dtype)
        state_slots = max(_LEAST_STATE_SLOTS, kv // (3 if shared else 2) // each)
    if shared:
        states = state_slots * each
        total = total_tokens(config, device, model, sizes.page_size, work, states)
    return replace(sizes, total_tokens=total, state_slots=state_slots)


def total_tokens(
    config: RunnerConfig,
    device: Device,
    model: DecoderModel,
    page_size: int,
    work: int,
    states: int = 0,
) -> int:
    """KV tokens of the pool, whole pages.

    Args: work: see `work_bytes`. states: bytes that saved states take of the same memory.
    Raises: ConfigError: the device has no room for a useful pool.
    """
    total = config.max_total_tokens
    if total is None:
        # Codes take less memory for each token: the pool holds more of them in as much.
        per_token = bytes_per_token(model, device.kv_dtype)
        total = CPU_TOTAL_TOKENS * bytes_per_token(model, device.dtype) // per_token
        if device.memory_budget_bytes is not None:
            total = _tokens_that_fit(config, device, model, work, states)
    pages = total // page_size
    if pages < _MIN_PAGES:
        raise ConfigError(
            f"max_total_tokens {total}: must be at least three pages of {page_size} tokens"
        )
    return pages * page_size


def check_memory(sizes: RunnerSizes, device: Device, model: DecoderModel) -> None:
    """Raises: ConfigError: pool and block table could not be had even from an empty device."""
    kv = sizes.total_tokens * bytes_per_token(model, device.kv_dtype)
    table = block_table_bytes(sizes.rows, sizes.context_length, sizes.page_size)
    states = (sizes.rows + 1 + sizes.state_slots) * bytes_per_state(model)
    there = device.memory_bytes()
    if kv + table + states > there:
        recurrent = f", recurrent states of {states:,}" if states else ""
        raise ConfigError(
            f"max_total_tokens {sizes.total_tokens} with max_running_requests {sizes.rows}: KV of"
            f" {kv:,} bytes{recurrent} and a block table of {table:,}; this device has {there:,} in"
            " all"
        )


def _row_bytes(model: DecoderModel, sizes: RunnerSizes) -> int:
    table = block_table_bytes(sizes.rows, sizes.context_length, sizes.page_size)
    states = (sizes.rows + 1) * bytes_per_state(model)
    return table + states + state_bytes(sizes.rows + 1, model.vocab_size)


def _tokens_that_fit(
    config: RunnerConfig, device: Device, model: DecoderModel, work: int, states: int
) -> int:
    """mem_fraction_static bounds weights and KV; where the rest is less than steps take, KV gives
    way."""
    budget = device.memory_budget_bytes
    assert budget is not None
    used = device.used_bytes()
    left = max(0, min(budget, device.memory_bytes() - work) - used - states)
    per_token = bytes_per_token(model, device.kv_dtype)
    if left < per_token * _MIN_TOTAL_TOKENS:
        raise ConfigError(
            f"mem_fraction_static {config.mem_fraction_static}: of the GPU's memory that is"
            f" {budget:,} bytes, {used:,} are taken (weights and whatever else is on the GPU), the"
            f" largest step takes {work:,}, {left:,} are left for KV; {_MIN_TOTAL_TOKENS} tokens of"
            f" {per_token:,} bytes are the least. A smaller chunked_prefill_size makes smaller"
            " steps"
        )
    return left // per_token
