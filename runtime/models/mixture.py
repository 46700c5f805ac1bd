"""How a mixture of experts stands in a config and in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ops.blocks.mixture import MixtureOfExperts
from ops.op_set import Routing
from runtime.errors import ModelError
from runtime.models import config_values as values
from runtime.models.family import activation
from runtime.models.sources import Linear, Source

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.models.sources import WeightReader

_MOST_EXPERTS = 2**16


@dataclass(frozen=True, slots=True)
class Experts(Source):
    """The experts of a layer, each with tensors of its own.

    Args:
        path: the names of expert 3 begin with "{path}.3.". gate, up, down: how they go on.
    """

    path: str
    gate: str
    up: str
    down: str
    count: int
    hidden_size: int
    intermediate_size: int

    def load(self, reader: WeightReader) -> Any:
        experts = (self._expert(reader, i) for i in range(self.count))
        return reader.ops.pack_experts(experts, quantization=reader.quantization)

    def _expert(self, reader: WeightReader, i: int) -> tuple[Tensor, Tensor]:
        at, hidden, inner = f"{self.path}.{i}.", self.hidden_size, self.intermediate_size
        gate_up = Linear((at + self.gate, at + self.up), (inner, inner), hidden)
        down = Linear((at + self.down,), (hidden,), inner)
        return gate_up.read(reader, ".weight", hidden), down.read(reader, ".weight", inner)


def mixture_of_experts(
    config: dict[str, Any],
    *,
    path: str,
    renormalise: bool,
    intermediate_key: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> MixtureOfExperts:
    """The experts and the router of a layer, at "{path}.experts" and "{path}.gate".

    Args:
        intermediate_key: of the width of an expert. names: of gate, up and down.
    Raises:
        ModelError: the config's numbers are missing or do not fit together.
    """
    # transformers 5 writes one name for what published configs of Qwen call by another.
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    count = values.integer(config, key, high=_MOST_EXPERTS)
    top_k = values.integer(config, "num_experts_per_tok")
    if top_k > count:
        raise ModelError(f"config.json: num_experts_per_tok {top_k} is more than {key} {count}")
    hidden = values.integer(config, "hidden_size")
    inner = values.integer(config, intermediate_key)
    return MixtureOfExperts(
        # Small, and a rounding of its outputs may choose other experts.
        router=Linear((f"{path}.gate",), (count,), hidden, quantized=False),
        experts=Experts(f"{path}.experts", *names, count, hidden, inner),
        routing=Routing(top_k, renormalise),
        activation=activation(config),
    )
