"""The options of the engine: frozen, checked when made, changed by `dataclasses.replace`.

Options come from the user; what follows from them, the model and the device is another record
(`SchedulerConfig`, made at start by `runtime.sizing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ConfigError
from runtime.options import check_options, option
from runtime.scheduling.policies import EVICTION_POLICIES, POLICIES

# What the chunk size is by default: a time on a CPU, a size on a GPU.
STEP_BOUND_MS = 150.0
CPU_TOTAL_TOKENS = 32768
MAX_PREFILL_TOKENS = 16384
# Of a scheduler that is made without a device to size it for.
CHUNK_TOKENS = 128
# By the memory of a GPU: a large chunk fills a large card, and its activations crowd a small one.
_GPU_CHUNK_TOKENS = {0: 2048, 36 << 30: 4096, 64 << 30: 8192}


def gpu_chunk_tokens(memory_bytes: int) -> int:
    """Prefill tokens of a step on a GPU with so much memory, where no option says."""
    return max(size for least, size in _GPU_CHUNK_TOKENS.items() if memory_bytes >= least)


# What the scheduler's books are laid out by; all else may change while requests run.
FIXED_OPTIONS = (
    "capacity_tokens",
    "context_length",
    "disable_radix_cache",
    "eos_token_ids",
    "max_running_requests",
    "kv_tier_pages",
    "page_size",
    "recurrent",
    "state_interval",
    "state_slots",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """How requests are scheduled. Token counts are ints, times seconds unless named _ms."""

    page_size: int = option(16, "KV tokens of a page", at_least=1, at_most=4096)
    # Twice as many rows should bring a quarter more tokens a second: up to 256 they do for an 8B
    # model with 1,024 keys a row, by the estimates of docs/gpu.md. scripts/gpu_check.py measures
    # where that ends on a GPU ("rows pay").
    max_running_requests: int = option(
        256, "requests that may hold KV at once", at_least=1, at_most=65536
    )
    chunked_prefill_size: int | None = option(
        None,
        "prefill tokens of a step, two pages or more; 0 or -1: prompts are never cut",
        at_least=-1,
        otherwise=f"on a CPU as many as a step of {STEP_BOUND_MS:g} ms is predicted to compute, on"
        " a GPU 2048, from 36 GiB on 4096, from 64 GiB on 8192",
    )
    max_prefill_tokens: int = option(
        MAX_PREFILL_TOKENS, "upper bound of prefill tokens of a step", at_least=1
    )
    prefill_share: float = option(
        0.25,
        "while a long prompt is computed in chunks, the share of its tokens that shorter ones may"
        " take ahead of it; 0: every prompt in its turn",
        at_least=0,
        at_most=0.9,
    )
    max_prefill_requests: int = option(0, "prompts admitted in one step; 0: no cap", at_least=0)
    truncation_align_size: int = option(
        0,
        "every chunk of a prompt but its last ends at a position that is a multiple of this, itself"
        " one of page_size; 0: off",
        at_least=0,
    )
    disable_mixed_chunk: bool = option(False, "prefill steps carry no decode rows")
    disable_radix_cache: bool = option(False, "no reuse of prefixes between requests")
    eviction_policy: str = option(
        "lru", "what the cache drops first", choices=tuple(EVICTION_POLICIES)
    )
    pin_share: float = option(
        0.5,
        "share of the KV pool that prompts may keep which ask to stay cached (cache_control,"
        " prompt_cache_key); running requests get it all the same where nothing else is left",
        at_least=0,
        at_most=1,
    )
    state_interval: int = option(
        512,
        "of a model with a recurrent state, cached prompts can be gone on from at every multiple of"
        " so many tokens (in whole pages), and at their last page",
        at_least=1,
    )
    state_slots: int | None = option(
        None,
        "recurrent states kept for cached prompts",
        at_least=0,
        at_most=1_000_000,
        otherwise="as many as take half the memory of the KV pool, 8 at least",
    )
    schedule_policy: str = option("fcfs", "order of the waiting queue", choices=tuple(POLICIES))
    max_queue_skip_ms: float = option(
        2000.0,
        "a request passed over for longer is ordered first; fcfs and random pass nobody over",
        at_least=0,
    )
    schedule_conservativeness: float = option(
        1.0, "larger: reserve more KV for running requests, fewer retractions", at_least=0
    )
    clip_max_new_tokens: int = option(
        4096,
        "a request's output counts as at most this many tokens when its KV is reserved",
        at_least=1,
    )
    enable_dynamic_chunking: bool = option(
        False, "cut chunks so that each takes about the same time"
    )
    tpot_slo_ms: float = option(
        0.0,
        "largest chunk whose predicted step stays within this time while running requests wait for"
        " it; 0: off",
        at_least=0,
    )
    enable_prefill_delayer: bool = option(False, "gather prefills to protect decode throughput")
    delayer_max_passes: int = option(
        30, "passes that the prefill delayer may hold prompts back", at_least=0
    )
    delayer_max_ms: float = option(
        5000.0, "time that the prefill delayer may hold prompts back", at_least=0
    )
    delayer_low_watermark: float = option(
        0.3,
        "share of used KV below which the prefill delayer never delays",
        at_least=0,
        at_most=1,
    )
    delayer_running_ratio: float = option(
        0.25,
        "the prefill delayer waits for this share of the running requests to be waiting",
        at_least=0,
    )
    max_queued_requests: int = option(
        0, "waiting requests before newcomers get 503; 0: no cap", at_least=0
    )
    priority_preemption_threshold: int = option(
        10, "priority gap beyond which a waiting request preempts running ones", at_least=0
    )
    disable_priority_preemption: bool = option(False, "priority orders the queue only")
    waiting_timeout_s: float = option(
        0.0, "a request waiting longer ends with an error; 0: off", at_least=0
    )
    running_timeout_s: float = option(
        0.0, "a request running longer ends with an error; 0: off", at_least=0
    )
    policy_seed: int = option(0, "seed of the random policy", at_least=0, at_most=2**63 - 1)

    def __post_init__(self) -> None:
        check_options(self)
        chunk, page, align = self.chunked_prefill_size, self.page_size, self.truncation_align_size
        if chunk is not None and 0 < chunk < 2 * page:
            raise ConfigError(
                f"chunked_prefill_size {chunk} with page_size {page}: must be at least two pages"
                f" ({2 * page}), or 0 for whole prompts"
            )
        if (chunk is None or chunk > 0) and self.max_prefill_tokens < page:
            raise ConfigError(
                f"max_prefill_tokens {self.max_prefill_tokens}: must be at least a page ({page}),"
                " or no long prompt could ever be cut"
            )
        if align % page:
            raise ConfigError(
                f"truncation_align_size {align}: must be a multiple of page_size ({page})"
            )
        for name in ("chunked_prefill_size", "max_prefill_tokens"):
            most = getattr(self, name) or 0
            if 0 < most < align:
                raise ConfigError(
                    f"truncation_align_size {align}: must be at most {name} ({most}), or no long"
                    " prompt could ever be cut"
                )


def check_capacity(tokens: int, page_size: int) -> None:
    """Raises: ConfigError: a pool of so many tokens has no page for a request."""
    if tokens < 3 * page_size:
        raise ConfigError(
            f"max_total_tokens {tokens}: must be at least three pages ({3 * page_size}), one of"
            " which is reserved"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulerOptions):
    """What the scheduler decides by: the options, and what was derived from model and device.

    Args:
        capacity_tokens: KV tokens of the pool, the reserved page 0 included.
        chunked_prefill_size: the option, or what stands for it here.
        step_bound_ms: chunks are such that a step is predicted to take at most this; 0: no bound.
            Not below a floor where no running row waits for the step.
        measured_steps: what the step-time model starts from: (tokens, square, rows, context,
            seconds) of each step, see `runtime.scheduling.step_time_model.StepFeatures`.
        kv_tier_pages: pages that the tier below the pool holds; 0: there is none.
        kv_load_tokens: fewer tokens are computed rather than loaded from it.
        recurrent: cached KV alone is nothing that a request could go on from.
        state_slots: the option, or what stands for it here.
    """

    capacity_tokens: int
    context_length: int
    eos_token_ids: frozenset[int] = frozenset()
    chunked_prefill_size: int = CHUNK_TOKENS
    step_bound_ms: float = 0.0
    measured_steps: tuple[tuple[float, ...], ...] = ()
    kv_tier_pages: int = 0
    kv_load_tokens: int = 0
    recurrent: bool = False
    state_slots: int = 0

    def __post_init__(self) -> None:
        SchedulerOptions.__post_init__(self)  # super() finds no class whose slots were added
        check_capacity(self.capacity_tokens, self.page_size)
        if self.recurrent and self.kv_tier_pages:
            raise ConfigError(
                f"kv_tier_pages {self.kv_tier_pages} with a recurrent state: must be 0, since there"
                " are no states in the tier"
            )

    @property
    def usable_tokens(self) -> int:
        """Tokens of the pool that requests can use: whole pages without the reserved one."""
        return (self.capacity_tokens // self.page_size - 1) * self.page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Model and device."""

    model: str | None = option(
        None,
        "a Hugging Face folder, a .gguf file, or a name on the hub (owner/name[@revision]);"
        " without it the embedded SmolLM2-135M-Instruct",
        metavar="PATH",
    )
    cache_dir: str = option(
        "~/.cache/loomserve",
        "folder for the embedded model, compiled kernels and packed weights",
        metavar="FOLDER",
        variable="LOOMSERVE_CACHE",
    )
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto",
        "type of weights and KV; auto: the checkpoint's, with float16 as bfloat16 but for weights"
        " on a CPU with native kernels, which stay so",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of KV alone: int8 or fp8 with a scale for each token and head; auto: as dtype",
        choices=("auto", "int8", "fp8"),
    )
    quantization: str | None = option(
        None,
        "weight-only quantization of the linear layers (CPU)",
        choices=("none", "int8", "int4"),
        otherwise="none, or what the file's weights are already, where no --dtype is given: GGUF's"
        " types as they are, another form where that is no slower here",
    )
    packed_cache_gb: float = option(
        32.0,
        "GiB of cache_dir for packed weights, which later starts map instead of packing again; what"
        " was used longest ago goes; 0: none are kept (CPU)",
        at_least=0,
    )
    share_weights: bool = option(
        False,
        "map packed weights even where the system keeps files on small pages, which make steps"
        " slower: processes of one model have them in memory once",
    )
    context_length: int | None = option(
        None,
        "tokens of a sequence, at most the model's own",
        at_least=1,
        otherwise="the model's own",
    )
    max_total_tokens: int | None = option(
        None,
        "KV tokens of the pool, three pages or more",
        at_least=3,
        otherwise=f"{CPU_TOTAL_TOKENS} on a CPU, with a kv_cache_dtype more in as much memory; what"
        " memory allows on a GPU",
    )
    kv_offload_gb: float = option(
        0.0,
        "GiB of host memory for cached KV that the pool has no room for any more; 0: off",
        at_least=0,
    )
    kv_offload_path: str | None = option(
        None,
        "file that cached KV is also written to, so that prefixes outlive the process",
        metavar="FILE",
    )
    kv_offload_path_gb: float = option(
        16.0,
        "GiB that the file of kv_offload_path takes at most; what is oldest goes",
        above=0,
        at_most=65_536,
    )
    mem_fraction_static: float = option(
        0.88, "share of the GPU's memory for weights and KV together", above=0, at_most=1
    )
    seed: int = option(
        0,
        "seed of everything random that no request's own seed rules",
        at_least=0,
        at_most=2**63 - 1,
    )
    cpu_kernels: str = option(
        "auto", "native CPU kernels or plain torch", choices=("auto", "native", "torch")
    )
    cpu_threads: int = option(
        0, "threads of the CPU kernels; 0: one per core available", at_least=0, at_most=1024
    )
    cpu_pinning: bool = option(False, "bind the CPU kernels' threads to cores")
    cuda_graph_max_bs: int = option(
        256, "rows of the largest step replayed as a CUDA graph; 0: none", at_least=0
    )
    cuda_graph_max_tokens: int = option(
        1024,
        "tokens of the largest step with prompts replayed as a CUDA graph; 0: none",
        at_least=0,
    )
    disable_cuda_graph: bool = option(False, "replay no step as a CUDA graph")

    def __post_init__(self) -> None:
        check_options(self)
        if self.kv_offload_path is not None and self.kv_offload_path_gb < self.kv_offload_gb:
            raise ConfigError(
                f"kv_offload_path_gb {self.kv_offload_path_gb:g}: must be at least kv_offload_gb"
                f" ({self.kv_offload_gb:g}), since all that is in host memory is in the file too"
            )

    @property
    def cache_folder(self) -> Path:
        """`cache_dir` as a path; it need not be there yet."""
        return Path(self.cache_dir).expanduser()
