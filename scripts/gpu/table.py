"""What `scripts/gpu_check.py` measured, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.config import SchedulerOptions

Rows = Iterable[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Column:
    """A column. key: of a row; form: how its value is written; words stand to the left."""

    title: str
    key: str
    form: str = ".1f"

    @property
    def width(self) -> int:
        return max(len(self.title), 28 if self.form == "s" else 7)

    def cell(self, row: dict[str, Any]) -> str:
        value = row[self.key]
        return self.aligned("-" if value is None else format(value, self.form))

    def aligned(self, text: str) -> str:
        return text.ljust(self.width) if self.form == "s" else text.rjust(self.width)


US = Column("us", "us")
BYTES_US, FLOPS_US = Column("bytes, us", "byte_floor_us"), Column("FLOPs, us", "flop_floor_us")
OPS = (Column("op", "op", "s"), Column("rows", "rows", "d"), US, BYTES_US)
EXPERTS = (Column("tokens", "tokens", "d"), US, BYTES_US, FLOPS_US)
INTEGERS = (
    Column("kind", "kind", "s"),
    Column("tokens", "tokens", "d"),
    US,
    BYTES_US,
    FLOPS_US,
    Column("floats, us", "float_us"),
)
EXTEND_ATTENTION = (
    Column("prefix", "prefix", "d"),
    Column("new", "new", "d"),
    Column("TFLOP/s", "tflops"),
    Column("flash", "sdpa_tflops"),
    Column("share", "of_sdpa", ".2f"),
)
DECODE = (
    Column("batch", "batch", "d"),
    Column("kv_len", "kv_len", "d"),
    Column("ms", "ms", ".2f"),
    Column("bytes", "byte_floor_ms", ".2f"),
    Column("FLOPs", "flop_floor_ms", ".2f"),
    Column("x floor", "over_floor", ".2f"),
)
SERVED = (
    Column("sampling", "sampling", "s"),
    Column("rows", "rows", "d"),
    Column("wall, ms", "wall_ms", ".2f"),
    Column("device", "device_ms", ".2f"),
    Column("host", "host_ms", ".2f"),
)
MIXED = (
    Column("rows", "rows", "d"),
    Column("chunk", "chunk", "d"),
    Column("device, ms", "device_ms", ".2f"),
    Column("host", "host_ms", ".2f"),
)


def table(results: dict[str, Any]) -> str:
    """Every part of the results that was measured; of the others the heads."""
    limits = results["limits"]
    lines = [
        "",
        f"{results['machine']['device']}: copy {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s,"
        f" matmul {limits['matmul_flops'] / 1e12:.0f} TFLOP/s",
        *_part("single ops", OPS, results.get("ops", ())),
        *_part("experts", EXPERTS, results.get("experts", ())),
        *_part("layers of codes", INTEGERS, results.get("integers", ())),
        *_part("extend attention", EXTEND_ATTENTION, results.get("extend_attention", ())),
    ]
    for name, model in results["models"].items():
        lines += _part(f"{name}: decode", DECODE, model.get("decode", ()))
        lines += _part(f"{name}: served steps", SERVED, model.get("served", ()))
        lines += _part(f"{name}: mixed steps", MIXED, model.get("mixed", ()))
        lines += ["", *_sentences(name, model)]
    return "\n".join(lines)


def _part(title: str, columns: Sequence[Column], rows: Rows) -> list[str]:
    return [
        "",
        title,
        "  ".join(column.aligned(column.title) for column in columns),
        *("  ".join(column.cell(row) for column in columns) for row in rows),
    ]


def _sentences(name: str, model: dict[str, Any]) -> list[str]:
    told = []
    if "rows_that_pay" in model:
        default = SchedulerOptions().max_running_requests
        told.append(
            f"{model['rows_that_pay']} rows pay: the last doubling brings a quarter more"
            f" tokens a second; --max-running-requests is {default} by default"
        )
    if idle := model.get("idle"):
        told.append(
            f"idle between decode steps: {idle['overlap']:.1%} with overlap,"
            f" {idle['synchronous']:.1%} without"
        )
    if offline := model.get("offline"):
        told.append(
            f"offline: {offline['output_tokens_per_s']:.0f} output tokens/s"
            f" ({offline['requests']} requests, {offline['output_tokens']} tokens)"
        )
    return [f"{name}: {text}" for text in told]
