"""Makes the tier below the KV pool of options: its store, what it holds from before, and how many
tokens are worth a load."""

from __future__ import annotations

import hashlib
import logging
import math
import sqlite3
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.checkpoints.fingerprint import weights_fingerprint
from runtime.errors import ConfigError
from runtime.execution.page_mover import PageMover
from runtime.execution.warm_up import time_step
from runtime.offload.page_file import FilePage, PageFile, UntrustedFile, frames_that_fit
from runtime.offload.page_store import PageStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.config import RunnerConfig
    from runtime.execution.model_runner import ModelRunner
    from runtime.scheduling.kv_tier import TierPrefix

log = logging.getLogger("loomserve.offload")

GIB = 1 << 30
_STAGING_BYTES = 256 << 20  # of host memory where only a file was asked for
_NEVER = 1 << 30  # tokens
_MOST_PAGES = 1 << 24  # of a tier: each has an entry in what the scheduler keeps


@dataclass(frozen=True, slots=True)
class Tier:
    """What is below the pool.

    Args:
        pages: that it holds. load_tokens: fewer are computed rather than loaded.
        prefixes: what it held before, the oldest first.
    """

    store: PageStore
    pages: int
    load_tokens: int
    prefixes: list[TierPrefix] = field(default_factory=list)


def build_tier(
    config: RunnerConfig, runner: ModelRunner, model: Path, progress: Callable[[str], None]
) -> Tier | None:
    """The tier that the options ask for; None where they ask for none. The runner must be idle.

    Args: model: where its weights are.
    Raises: ConfigError: it is too small for a page, or the file cannot be used.
    """
    if not config.kv_offload_gb and config.kv_offload_path is None:
        return None
    if runner.info.state_slots is not None:
        option = "kv_offload_gb" if config.kv_offload_gb else "kv_offload_path"
        raise ConfigError(
            f"{option}: this model has a recurrent state, which KV alone does not give"
        )
    mover = PageMover(runner.device, runner.memory.pool, runner.sizes.page_size)
    memory_frames = min(int(config.kv_offload_gb * GIB) // mover.page_bytes, _MOST_PAGES)
    if config.kv_offload_gb and not memory_frames:
        raise ConfigError(
            f"kv_offload_gb {config.kv_offload_gb:g}: a page of KV takes {mover.page_bytes:,} bytes"
        )
    fingerprint = _fingerprint(runner, model)
    file = _open_file(config, mover, fingerprint)
    if file is None:
        if not memory_frames:
            return None
        progress(f"KV of {memory_frames * runner.sizes.page_size:,} tokens fits into host memory")
        tokens = _load_tokens(runner, mover, None)
        return Tier(PageStore(mover, memory_frames), memory_frames, tokens)
    prefixes, keys = file.prefixes()
    pages = _file_pages(config, mover)
    size = runner.sizes.page_size
    progress(f"KV of {pages * size:,} tokens fits into the file, {len(keys) * size:,} are in it")
    tokens = _load_tokens(runner, mover, file if pages not in keys else None)
    memory_frames = memory_frames or max(_STAGING_BYTES // mover.page_bytes, 1)
    store = PageStore(mover, memory_frames, file=file, keys=keys, fingerprint=fingerprint)
    return Tier(store, pages, tokens, prefixes)


def _file_pages(config: RunnerConfig, mover: PageMover) -> int:
    fit = frames_that_fit(int(config.kv_offload_path_gb * GIB), mover.page_bytes)
    return min(fit, _MOST_PAGES)


def _open_file(config: RunnerConfig, mover: PageMover, fingerprint: bytes) -> PageFile | None:
    """None where there is to be none, or the one that is there is not to be touched."""
    if config.kv_offload_path is None:
        return None
    pages = _file_pages(config, mover)
    if not pages:
        raise ConfigError(
            f"kv_offload_path_gb {config.kv_offload_path_gb:g}: a page of KV takes"
            f" {mover.page_bytes:,} bytes"
        )
    try:
        return PageFile(
            Path(config.kv_offload_path).expanduser(),
            fingerprint,
            page_bytes=mover.page_bytes,
            frames=pages,
            most_bytes=int(config.kv_offload_path_gb * GIB),
        )
    except UntrustedFile as reason:
        log.warning("kv_offload_path is not used: %s", reason)
        return None


def _fingerprint(runner: ModelRunner, model: Path) -> bytes:
    """A digest of all that the KV of given tokens depends on, to the last bit."""
    sizes, details = runner.sizes, sorted(runner.info.details.items())
    settings = (sizes.page_size, sizes.context_length, details)
    return hashlib.sha256(weights_fingerprint(model) + repr(settings).encode()).digest()


def _load_tokens(runner: ModelRunner, mover: PageMover, file: PageFile | None) -> int:
    """The number of tokens from which on a load is done sooner than the step that would compute
    them, both measured. A load also costs the step that is planned while it is on its way."""
    size = runner.sizes.page_size
    most = min(32, runner.sizes.total_tokens // size - 1, runner.sizes.context_length // size)
    few = max(most // 8, 1)
    if most <= few:
        return size
    one, many = (_load_seconds(mover, count, file) for count in (few, most))
    a_step = time_step(runner, 1, 0, 0, 0)
    short, long = (time_step(runner, count * size, 0, 0, 0) for count in (few, most))
    span = (most - few) * size
    loads_s, steps_s = max(many - one, 0.0) / span, max(long - short, 0.0) / span
    if steps_s <= loads_s:
        return _NEVER
    return math.ceil((one + a_step) / (steps_s - loads_s))


def _load_seconds(mover: PageMover, pages: int, file: PageFile | None) -> float:
    """The seconds that a load of this many pages takes: the fastest of three tries. The pages stay
    as they were."""
    numbers = range(1, pages + 1)
    kv = mover.read(numbers)
    found = math.inf
    for _ in range(3):
        begun = time.perf_counter()
        mover.write(numbers, kv)
        found = min(found, time.perf_counter() - begun)
    return found if file is None else found + pages * _read_seconds(file, kv[0].data)


def _read_seconds(file: PageFile, kv: memoryview) -> float:
    """The seconds that a page takes from the file, which stays as it was."""
    page = FilePage(file.frames, b"measured", b"", "", array("i"), kv)
    try:
        file.write([page])
    except sqlite3.Error:
        return 0.0  # it is full; what is in it is read as it can be
    begun = time.perf_counter()
    file.read(page.frame, page.key)
    seconds = time.perf_counter() - begun
    file.forget([page.frame])
    return seconds
