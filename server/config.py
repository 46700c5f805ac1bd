"""ServerConfig: everything that the server is told at start."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from runtime.config import RunnerConfig, SchedulerOptions, check_capacity
from runtime.errors import ConfigError
from runtime.options import check_options, option, options_of
from runtime.scheduling.policies import POLICIES
from server.formats.reasoning import REASONING_FAMILIES
from server.formats.tool_families import TOOL_FAMILIES
from server.formats.volatile_lines import VolatileLines
from server.generation.params import DEFAULT_MAX_LOGPROBS, DEFAULT_MAX_N

_SENDABLE = re.compile(r"[\x21-\x7e]+")
METRICS_COMPAT = ("vllm", "sglang")
_OF_THE_DELAYER = tuple(
    item.name for item in options_of(SchedulerOptions) if item.name.startswith("delayer_")
)
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The options of the server, with those of model and device and of the scheduler."""

    runner: RunnerConfig = field(default_factory=RunnerConfig)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one", at_least=0, at_most=65535)
    uds: str | None = option(
        None, "unix socket to listen on, in place of host and port", metavar="PATH"
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names of the model in the API; answers carry the first",
        metavar="NAME",
        otherwise="its folder's",
    )
    kv_events: str | None = option(
        None,
        "ZMQ endpoint at which changes of the prefix cache are published in vLLM's format, such as"
        " tcp://*:5557; one without * is connected to",
        metavar="ENDPOINT",
    )
    kv_events_replay: str | None = option(
        None, "ZMQ endpoint at which missed events can be asked for", metavar="ENDPOINT"
    )
    kv_events_topic: str = option("", "topic of the events, such as kv@POD@MODEL", metavar="TOPIC")
    weight_version: str = option(
        "default",
        "a label of the weights that /model_info and /server_info report, to tell servers with new"
        " weights from those with old ones",
        metavar="NAME",
    )
    log_level: str = option("info", "least severe messages shown", choices=LOG_LEVELS)
    disable_overlap: bool = option(False, "read each step's result before the next step is planned")
    record: str | None = option(
        None,
        "write every input and decision of the scheduler to this file, for scripts/replay.py"
        " and scripts/simulate.py",
        metavar="FILE",
    )
    otlp_endpoint: str | None = option(
        None,
        "OpenTelemetry collector to which each request is sent as spans, over HTTP, such as"
        " http://127.0.0.1:4318",
        metavar="URL",
    )
    trace: str | None = option(
        None,
        "write what the server did when, for each step and request, to this file, for Perfetto",
        metavar="FILE",
    )

    chat_template: str | None = option(
        None, "a Jinja chat template that replaces the model's", metavar="FILE"
    )
    allow_special_in_content: bool = option(
        False,
        "let <|im_end|> and the like in client text act as control tokens, which it otherwise"
        " spells as plain text",
    )
    volatile_line: tuple[str, ...] = option(
        (),
        "regular expressions (RE2's) of whole lines in system messages that differ from request to"
        " request, such as 'Current time: .*'; they are told behind the conversation, so that the"
        " cache goes on holding what follows them",
        metavar="REGEX",
    )
    generation_config: str = option(
        "auto",
        "where the defaults of temperature, top_p and other sampling fields come from: the model's"
        " generation_config.json (auto), that of a folder, or the API's own defaults (none)",
        metavar="{auto,none,FOLDER}",
    )
    tool_call_parser: str | None = option(
        None,
        "format of the model's tool calls",
        choices=tuple(TOOL_FAMILIES),
        otherwise="derived from the chat template",
    )
    reasoning_parser: str | None = option(
        None,
        "format of the model's reasoning",
        choices=tuple(REASONING_FAMILIES),
        otherwise="none: reasoning stays in the content",
    )

    api_key: str | None = option(
        None,
        "requests must carry this key (Bearer or X-Api-Key); better kept out of the command line,"
        " which others on the machine can read",
        variable="LOOMSERVE_API_KEY",
        secret=True,
    )
    cors_allow_origins: str = option(
        "", "origins that browsers may call from, comma separated; * for any"
    )
    max_body_bytes: int = option(
        # A parser lets nobody else run: 11 ms for so many bytes at worst.
        4 * 2**20,
        "larger request bodies get 413",
        at_least=1,
        at_most=2**40,
    )
    strict_fields: bool = option(
        False, "refuse request fields that nobody reads, instead of naming them in a header"
    )
    max_logprobs: int = option(
        DEFAULT_MAX_LOGPROBS, "alternatives per token that a request may ask for", at_least=0
    )
    max_n: int = option(
        DEFAULT_MAX_N,
        "choices that one request may ask for; of /generate also its prompts",
        at_least=1,
    )
    max_connections: int = option(4096, "open connections; further ones get 503", at_least=1)
    header_timeout: float = option(
        20.0, "seconds for a new connection to send its request head", above=0
    )
    idle_timeout: float = option(
        120.0, "seconds that a connection may wait between two requests", above=0
    )
    body_timeout: float = option(60.0, "seconds to receive a request body", above=0)
    slow_reader_timeout: float = option(
        60.0, "seconds that a client may leave its answer unread before it is cut off", above=0
    )
    sse_keepalive: float = option(
        5.0,
        "seconds after which a stream that has nothing to tell says that it is still there; 0: off,"
        " and its headers wait for its first token, so that a router can ask elsewhere until then",
        at_least=0,
    )
    request_timeout: float = option(
        0.0, "seconds from arrival to the end of an answer; 0: off", at_least=0
    )
    drain_timeout: float = option(
        30.0, "seconds that running requests get to finish after SIGTERM or SIGHUP", at_least=0
    )
    metrics_compat: tuple[str, ...] = option(
        (),
        "/metrics also has all names that vLLM, SGLang or both have for its figures",
        choices=METRICS_COMPAT,
        metavar="{vllm,sglang}",
    )
    access_log: bool = option(False, "one line of JSON per request on standard error")
    ssl_certfile: str | None = option(None, "certificate chain, for TLS", metavar="FILE")
    ssl_keyfile: str | None = option(None, "private key, for TLS", metavar="FILE")

    def __post_init__(self) -> None:
        check_options(self)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile: both or neither must be given")
        if self.api_key is not None and not _SENDABLE.fullmatch(self.api_key):
            raise ConfigError(
                "api_key: must be printable ASCII without spaces (no line end either), or no header"
                " could carry it"
            )
        if self.kv_events is None and (self.kv_events_replay or self.kv_events_topic):
            raise ConfigError("kv_events_replay and kv_events_topic: need kv_events")
        if self.kv_events is not None and self.scheduler.disable_radix_cache:
            raise ConfigError("kv_events with disable_radix_cache: there is no cache to tell of")
        offload = self.runner.kv_offload_gb or self.runner.kv_offload_path
        if offload and self.scheduler.disable_radix_cache:
            raise ConfigError(
                "kv_offload_gb and kv_offload_path with disable_radix_cache: there is no cache to"
                " keep more of"
            )
        if self.runner.max_total_tokens is not None:
            check_capacity(self.runner.max_total_tokens, self.scheduler.page_size)
        VolatileLines(self.volatile_line)
        _check_chunking(self.scheduler)
        _check_effects(self.runner, self.scheduler)


def _check_chunking(options: SchedulerOptions) -> None:
    """Refuses options of which one makes another void: their user expects both."""
    whole = options.chunked_prefill_size is not None and options.chunked_prefill_size <= 0
    if options.enable_dynamic_chunking and options.tpot_slo_ms > 0:
        raise ConfigError(
            "enable_dynamic_chunking and tpot_slo_ms: each sizes the chunks by time in its own way;"
            " give one of them"
        )
    if options.enable_dynamic_chunking and whole:
        raise ConfigError(
            f"enable_dynamic_chunking with chunked_prefill_size {options.chunked_prefill_size}:"
            " prompts that are never cut have no chunks to size"
        )
    if options.truncation_align_size and whole and not options.tpot_slo_ms:
        raise ConfigError(
            f"truncation_align_size {options.truncation_align_size} with chunked_prefill_size"
            f" {options.chunked_prefill_size}: prompts that are never cut have no chunks to align"
        )


def _check_effects(runner: RunnerConfig, options: SchedulerOptions) -> None:
    """Refuses values that do nothing beside another option: their user expects them to."""
    given = _given(runner, RunnerConfig) | _given(options, SchedulerOptions)
    policy = POLICIES[options.schedule_policy]
    named = f"with schedule_policy {policy.name}"
    uncached = options.disable_radix_cache
    for void, beside, names in (
        (runner.kv_offload_path is None, "without kv_offload_path", ("kv_offload_path_gb",)),
        (
            uncached,
            "with disable_radix_cache",
            ("eviction_policy", "pin_share", "state_interval", "state_slots"),
        ),
        (uncached and policy.cache_aware, "with disable_radix_cache", ("schedule_policy",)),
        (policy.keys is None, named, ("max_queue_skip_ms",)),
        (not policy.shuffled, named, ("policy_seed",)),
        (not options.enable_prefill_delayer, "without enable_prefill_delayer", _OF_THE_DELAYER),
        (
            options.disable_priority_preemption,
            "with disable_priority_preemption",
            ("priority_preemption_threshold",),
        ),
        (
            runner.disable_cuda_graph,
            "with disable_cuda_graph",
            ("cuda_graph_max_bs", "cuda_graph_max_tokens"),
        ),
    ):
        for name in names:
            if void and name in given:
                raise ConfigError(f"{name} {given[name]}: has no effect {beside}")


def _given(record: Any, kind: type) -> dict[str, Any]:
    """The options that differ from their defaults."""
    values = {item.name: (getattr(record, item.name), item.default) for item in options_of(kind)}
    return {name: value for name, (value, default) in values.items() if value != default}
