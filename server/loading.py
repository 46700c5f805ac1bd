"""Model, tokenizer and scheduler, as the options want them. Reaches `runtime.execution`, when it is
called: nothing else in server does.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.checkpoints.generation_config import read_sampling
from runtime.scheduling.scheduler import Scheduler
from runtime.sizing import describe_chunks, size_scheduler
from server.console import progress
from server.generation.params import SamplingDefaults
from server.service import ModelSource, Parts
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.config import SchedulerConfig, SchedulerOptions
    from runtime.examination import Examination
    from runtime.execution.build import ModelInfo
    from runtime.execution.model_runner import ModelRunner
    from runtime.offload.build import Tier
    from server.config import ServerConfig

EMBEDDED_NAME = "SmolLM2-135M-Instruct"


def examine_machine(config: ServerConfig) -> tuple[str, Examination]:
    """The name of the model that the options ask for, and what this machine would make of it.

    Raises: LoomserveError: what `load` would raise.
    """
    from runtime.execution.examination import examine

    path, name = _model(config)
    return name, examine(config.runner, path, _published_form(config), progress)


def load(config: ServerConfig) -> Parts:
    """What the options ask to be served.

    Raises: LoomserveError: of the kind that says what cannot be loaded, and why.
    """
    from runtime.checkpoints.model_folder import model_folder
    from runtime.execution.early_kernels import compiling_kernels

    with compiling_kernels(config.runner, progress) as kernels_done:
        path, name = _model(config)
        folder = model_folder(path, config.runner.cache_folder, progress)
        defaults = sampling_defaults(config.generation_config, folder)
        template = Path(config.chat_template) if config.chat_template is not None else None
        with ThreadPoolExecutor(1) as pool:
            # Importing torch takes longer than the tokenizer, and lets other threads run.
            loading = pool.submit(_prepared_tokenizer, folder, template)
            from runtime.execution.build import build_runner
            from runtime.offload.build import build_tier

            tokenizer = loading.result()
        runner, info = build_runner(
            replace(config.runner, model=str(path)),
            page_size=config.scheduler.page_size,
            max_running_requests=config.scheduler.max_running_requests,
            max_prefill_tokens=config.scheduler.max_prefill_tokens,
            chunked_prefill_size=config.scheduler.chunked_prefill_size,
            state_slots=0 if config.scheduler.disable_radix_cache else config.scheduler.state_slots,
            tokenizer_size=tokenizer.vocab_size,
            tokenizer_eos_id=tokenizer.eos_token_id,
            published_form=_published_form(config),
            progress=progress,
            before_device=kernels_done,
        )
    tier = build_tier(config.runner, runner, path, progress)
    scheduler_config = _sized(config.scheduler, runner, info, tier)
    progress(describe_chunks(scheduler_config))
    scheduler = make_scheduler(scheduler_config, config.record)
    if tier is not None:
        scheduler.adopt(tier.prefixes)
    return Parts(
        runner,
        scheduler,
        tokenizer,
        name,
        defaults,
        ModelSource(config.runner.model or name, info.model_type, info.architectures),
        None if tier is None else tier.store,
    )


def _prepared_tokenizer(folder: Path, template: Path | None) -> Tokenizer:
    tokenizer = Tokenizer.load(folder, template)
    tokenizer.prepare()
    return tokenizer


def _sized(
    options: SchedulerOptions, runner: ModelRunner, info: ModelInfo, tier: Tier | None
) -> SchedulerConfig:
    """The scheduler's options, with what model, device and tier set."""
    from runtime.execution.step_times import remembered_steps

    return size_scheduler(
        options,
        capacity_tokens=runner.info.max_total_tokens,
        context_length=info.context_length,
        eos_token_ids=info.eos_token_ids,
        device_chunk_tokens=runner.info.chunk_tokens,
        measure=lambda bound_s: remembered_steps(
            runner, info.digest, bound_s=bound_s, context_length=info.context_length
        ),
        tier=(0, 0) if tier is None else (tier.pages, tier.load_tokens),
        state_slots=runner.info.state_slots,
    )


def _model(config: ServerConfig) -> tuple[Path, str]:
    """Where the model is, and its name."""
    from runtime.checkpoints.embedded import ensure_embedded_model
    from runtime.checkpoints.hub import fetch, hub_name

    model = config.runner.model
    if model is None:
        return ensure_embedded_model(config.runner.cache_folder, progress), EMBEDDED_NAME
    name = hub_name(model)
    if name is not None:
        return fetch(model, progress), name
    path = Path(model).expanduser()
    return path, path.resolve().name.removesuffix(".gguf")


def _published_form(config: ServerConfig) -> str | None:
    from runtime.checkpoints.embedded import FORM

    return FORM if config.runner.model is None else None


def sampling_defaults(option: str, folder: Path) -> SamplingDefaults:
    """What requests get that do not say how they are sampled: the settings that the model in
    `folder` brings with it ("auto"), the server's own ("none"), or those of another folder.

    Raises: ModelError: the folder's file is missing or wrong.
    """
    if option == "none":
        return SamplingDefaults()
    if option == "auto":
        return SamplingDefaults(**read_sampling(folder))
    return SamplingDefaults(**read_sampling(Path(option).expanduser(), required=True))


def make_scheduler(config: SchedulerConfig, trace: str | None) -> Scheduler:
    """A scheduler; one that writes down its inputs and decisions where a trace is wanted."""
    if trace is None:
        return Scheduler(config)
    from runtime.simulation.recorder import RecordingScheduler
    from runtime.simulation.trace import TraceWriter

    return RecordingScheduler(config, TraceWriter(Path(trace), config))
