"""The options of the engine: frozen, checked when made, changed by `dataclasses.replace`.

Every field made with `option` is a command-line option and a key of a config file: the server's
argument parser is generated from these records, so an option exists in one place only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runtime.errors import ConfigError


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is a command-line option.

    Args:
        default: the default; None means "derived at start" (the help text says from what).
        flag: the option's name where it is not the field's with dashes.
    """
    meta = {"help": help, "flag": flag, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=meta)


POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "hrrn")
EVICTION_POLICIES = ("lru", "lfu", "fifo")


# Smallest values of the scheduler's numbers; page_size and the chunk size have rules of their own.
_SCHEDULER_MINIMA = {
    "max_running_requests": 1,
    "max_prefill_tokens": 1,
    "max_prefill_requests": 0,
    "truncation_align_size": 0,
    "max_queue_skip_ms": 0,
    "schedule_conservativeness": 0,
    "clip_max_new_tokens": 1,
    "tpot_slo_ms": 0,
    "delayer_max_passes": 0,
    "delayer_max_ms": 0,
    "delayer_low_watermark": 0,
    "delayer_running_ratio": 0,
    "max_queued_requests": 0,
    "priority_preemption_threshold": 0,
    "waiting_timeout_s": 0,
    "running_timeout_s": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler decides by. Token counts are ints, times seconds unless named _ms.

    The first three fields are not options: the launcher takes them from model and runner.
    """

    capacity_tokens: int  # KV tokens of the pool, the reserved page 0 included
    context_length: int
    eos_token_ids: frozenset[int] = frozenset()
    # The default on a CPU: chunks whose predicted step stays within this time; 0: none.
    step_bound_ms: float = 0.0
    # What the step-time model starts from: (tokens, square, rows, context, seconds) of each step,
    # see `runtime.scheduling.step_time_model.StepShape`.
    measured_steps: tuple[tuple[float, ...], ...] = ()

    page_size: int = option(16, "KV tokens of a page (1 works)")
    max_running_requests: int = option(256, "requests that may hold KV at once")
    chunked_prefill_size: int = option(
        128, "prefill tokens of a step; 0 or -1: prompts are never cut"
    )
    max_prefill_tokens: int = option(16384, "upper bound of prefill tokens of a step")
    max_prefill_requests: int = option(0, "prompts admitted in one step; 0: no cap")
    truncation_align_size: int = option(
        0,
        "every chunk of a prompt but its last ends at a position that is a multiple of this, itself"
        " one of page_size; 0: off",
    )
    disable_mixed_chunk: bool = option(False, "prefill steps carry no decode rows")
    disable_radix_cache: bool = option(False, "no reuse of prefixes between requests")
    eviction_policy: str = option("lru", "what the cache drops first", choices=EVICTION_POLICIES)
    schedule_policy: str = option("fcfs", "order of the waiting queue", choices=POLICIES)
    max_queue_skip_ms: float = option(
        2000.0, "a request passed over for longer is ordered first (lpm, dfs-weight, lof, hrrn)"
    )
    schedule_conservativeness: float = option(
        1.0, "larger: reserve more KV for running requests, fewer retractions"
    )
    clip_max_new_tokens: int = option(
        4096, "a request's output counts as at most this many tokens when its KV is reserved"
    )
    enable_dynamic_chunking: bool = option(
        False, "cut chunks so that each takes about the same time"
    )
    tpot_slo_ms: float = option(
        0.0,
        "largest chunk whose predicted step stays within this time while running requests wait for"
        " it; 0: off",
    )
    enable_prefill_delayer: bool = option(False, "gather prefills to protect decode throughput")
    delayer_max_passes: int = option(30, "passes that the prefill delayer may hold prompts back")
    delayer_max_ms: float = option(5000.0, "time that the prefill delayer may hold prompts back")
    delayer_low_watermark: float = option(
        0.3, "share of used KV below which the prefill delayer never delays"
    )
    delayer_running_ratio: float = option(
        0.25, "the prefill delayer waits for this share of the running requests to be waiting"
    )
    max_queued_requests: int = option(0, "waiting requests before newcomers get 503; 0: no cap")
    priority_preemption_threshold: int = option(
        10, "priority gap beyond which a waiting request preempts running ones"
    )
    disable_priority_preemption: bool = option(False, "priority orders the queue only")
    waiting_timeout_s: float = option(0.0, "a request waiting longer ends with an error; 0: off")
    running_timeout_s: float = option(0.0, "a request running longer ends with an error; 0: off")
    policy_seed: int = option(0, "seed of the random policy")

    def __post_init__(self) -> None:
        chunk, page = self.chunked_prefill_size, self.page_size
        if page < 1:
            raise ConfigError(f"page_size {page}: must be at least 1")
        if chunk > 0 and chunk < 2 * page:
            raise ConfigError(
                f"chunked_prefill_size {chunk} with page_size {page}: must be at least two pages"
                f" ({2 * page}), or 0 for whole prompts"
            )
        for name, minimum in _SCHEDULER_MINIMA.items():
            value = getattr(self, name)
            if not value >= minimum:
                raise ConfigError(f"{name} {value}: must be at least {minimum}")
        align = self.truncation_align_size
        if align % page:
            raise ConfigError(
                f"truncation_align_size {align}: must be a multiple of page_size ({page})"
            )
        for name in ("chunked_prefill_size", "max_prefill_tokens"):
            most = getattr(self, name)
            if 0 < most < align:
                raise ConfigError(
                    f"truncation_align_size {align}: must be at most {name} ({most}), or no long"
                    " prompt could ever be cut"
                )
        if self.capacity_tokens < 3 * page:
            raise ConfigError(
                f"max_total_tokens {self.capacity_tokens}: must be at least three pages"
                f" ({3 * page}), one of which is reserved"
            )
        for name, value, allowed in (
            ("schedule_policy", self.schedule_policy, POLICIES),
            ("eviction_policy", self.eviction_policy, EVICTION_POLICIES),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} {value!r}: must be one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Model and device."""

    model: str | None = option(
        None,
        "a Hugging Face folder or a .gguf file; without it the embedded SmolLM2-135M-Instruct",
        metavar="PATH",
    )
    cache_dir: str | None = option(
        None,
        "folder for the embedded model and compiled kernels"
        " (else $LOOMSERVE_CACHE, else ~/.cache/loomserve)",
    )
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto",
        "type of weights and KV; auto: the checkpoint's, bfloat16 where the device has it",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    quantization: str | None = option(
        None, "weight-only quantization of the linear layers", choices=("int8", "int4")
    )
    context_length: int | None = option(None, "tokens of a sequence; else the model's own")
    max_total_tokens: int | None = option(
        None, "KV tokens of the pool; else 32768 on a CPU, what memory allows on a GPU"
    )
    mem_fraction_static: float = option(
        0.88, "share of the GPU's memory for weights and KV together"
    )
    seed: int = option(0, "seed of everything random that no request's own seed rules")
    cpu_kernels: str = option(
        "auto", "native CPU kernels or plain torch", choices=("auto", "native", "torch")
    )
    cpu_threads: int = option(0, "threads of the CPU kernels; 0: one per core available")
    cpu_pinning: bool = option(False, "bind the CPU kernels' threads to cores")
    cuda_graph_max_bs: int = option(256, "largest decode batch replayed as a CUDA graph")
    disable_cuda_graph: bool = option(False, "run decode steps eagerly")
