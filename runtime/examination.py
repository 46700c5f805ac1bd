"""What was found out about a machine, and about a model on it: records that need no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured limits: bytes read per second, and operations per second of products with bfloat16
    weights: bfloat16 ones where there are instructions for them, else float32 ones."""

    bandwidth: float
    bf16_flops: float

    def best_of(self, other: Machine) -> Machine:
        """Both limits at their better measurement: what else ran can only have slowed one."""
        return Machine(max(self.bandwidth, other.bandwidth), max(self.bf16_flops, other.bf16_flops))


@dataclass(frozen=True, slots=True)
class FormCost:
    """What the linear layers of the model cost in one form of its weights.

    Args:
        bytes: in memory.
        seconds: of a step, parallel to `Examination.rows`.
        floors: below which this machine's memory and arithmetic do not let them go.
    """

    form: str
    bytes: int
    seconds: tuple[float, ...]
    floors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Examination:
    """What a machine has, and what serving would choose on it.

    Args:
        instructions: those of the CPU that kernels use. paths: of kernels that run here.
        compiler: the command, or why there is none.
        device, weights: what would be chosen, and why, in words. chosen: the weights' form.
        rows: of the steps that `costs` were measured with.
        machine, costs: None and empty where no native kernels run.
    """

    cores: int
    memory_bytes: int
    instructions: tuple[str, ...]
    paths: tuple[str, ...]
    compiler: str
    device: str
    weights: str
    chosen: str
    rows: tuple[int, ...]
    machine: Machine | None
    costs: tuple[FormCost, ...]
