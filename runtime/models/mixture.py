"""How a mixture of experts stands in a config and in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ops.blocks.mixture import MixtureOfExperts
from ops.coded_weight import CODED_ROWS, CodedWeight
from ops.op_set import Expert, GroupedWeight, Routing
from runtime.errors import ModelError
from runtime.models import config_values as values
from runtime.models.family import activation
from runtime.models.sources import Linear, Source, Wide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from runtime.models.sources import WeightReader

_MOST_EXPERTS = 2**16
_NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Experts(Source):
    """The experts of a layer, each with tensors of its own.

    Args:
        path: the names of expert 3 begin with "{path}.3.". gate, up, down: how they go on.
        bias: of every layer.
    """

    path: str
    gate: str
    up: str
    down: str
    count: int
    hidden_size: int
    intermediate_size: int
    bias: bool = False

    def load(self, reader: WeightReader) -> Any:
        experts = (self._expert(reader, i) for i in range(self.count))
        return reader.ops.pack_experts(experts, quantization=reader.quantization)

    def _expert(self, reader: WeightReader, i: int) -> Expert:
        at, hidden, inner = f"{self.path}.{i}.", self.hidden_size, self.intermediate_size
        gate_up = Linear((at + self.gate, at + self.up), (inner, inner), hidden)
        down = Linear((at + self.down,), (hidden,), inner)
        layers = gate_up, down
        biases = [layer.read(reader, ".bias") for layer in layers] if self.bias else []
        return Expert(gate_up.weight(reader), down.weight(reader), *biases)


@dataclass(frozen=True, slots=True)
class StackedExperts(Source):
    """The experts of a layer in one tensor for all, with biases, as gpt-oss has them: inputs before
    outputs, and the columns of gate and up in turns."""

    path: str
    count: int
    hidden_size: int
    intermediate_size: int

    def load(self, reader: WeightReader) -> Any:
        return reader.ops.pack_experts(self._experts(reader), quantization=reader.quantization)

    def _experts(self, reader: WeightReader) -> Iterator[Expert]:
        count, hidden, inner = self.count, self.hidden_size, self.intermediate_size
        gate_up = self._matrices(reader, "gate_up_proj", 2, inner, hidden)
        gate_up_bias = reader.take(f"{self.path}.gate_up_proj_bias", (count, 2 * inner))
        down = self._matrices(reader, "down_proj", 1, hidden, inner)
        down_bias = reader.take(f"{self.path}.down_proj_bias", (count, hidden))
        for i, bias in enumerate(gate_up_bias):
            yield Expert(
                gate_up(i),
                down(i),
                bias.view(inner, 2).t().reshape(2 * inner),
                down_bias[i].clone(),
            )

    def _matrices(
        self, reader: WeightReader, name: str, layers: int, outputs: int, inputs: int
    ) -> Callable[[int], Any]:
        """Gives the weight of an expert, as `OpSet.pack_linear` takes it.

        Args: layers: whose outputs take turns in the checkpoint; in the weight they stand one below
            the other, so many outputs of each.
        """
        name, rows = f"{self.path}.{name}", layers * outputs
        coded = reader.coded((name,), (self.count * rows,), inputs)
        if isinstance(coded, CodedWeight) and (layers == 1 or outputs % CODED_ROWS == 0):
            (matrix,) = coded.parts

            def parts(i: int) -> CodedWeight:
                of_layers = (matrix.every(layers, i * rows + j, outputs) for j in range(layers))
                return CodedWeight(tuple(of_layers))

            return parts
        if isinstance(coded, GroupedWeight):
            weight, each = coded, torch.arange(rows, device=coded.codes.device)
            return lambda i: weight.rows(i * rows + each.view(outputs, layers).t().flatten())
        stack = reader.take(name, (self.count, inputs, rows), exact=True)

        def values_of(i: int) -> Tensor:
            in_turns = stack[i].t().view(outputs, layers, inputs)
            return in_turns.transpose(0, 1).reshape(rows, inputs).contiguous()

        return values_of


def mixture_of_experts(
    config: dict[str, Any],
    *,
    path: str,
    renormalise: bool,
    intermediate_key: str,
    names: tuple[str, str, str] = _NAMES,
    score: str = "softmax",
    scale: float = 1.0,
    groups: tuple[int, int, str] = (1, 1, "max"),
    corrected: bool = False,
) -> MixtureOfExperts:
    """The experts and the router of a layer, at "{path}.experts" and "{path}.gate".

    Args:
        intermediate_key: of the width of an expert. names: of gate, up and down.
        score, scale: see `Routing`. groups: its groups, top_groups and group_score.
        corrected: with `MixtureOfExperts.correction`.
    Raises:
        ModelError: the config's numbers are missing or do not fit together.
    """
    count, top_k = _experts_of_a_token(config)
    if count % groups[0] or not 1 <= groups[1] <= groups[0]:
        raise ModelError(
            f"config.json: {count} experts do not make {groups[0]} groups of which {groups[1]} are"
            " taken (n_group, topk_group)"
        )
    size = count // groups[0]
    if top_k > size * groups[1] or (groups[2] == "top2" and size < 2 and groups[0] > 1):
        raise ModelError(f"config.json: groups of {size} experts (n_group {groups[0]}) are too few")
    hidden = values.integer(config, "hidden_size")
    inner = values.integer(config, intermediate_key)
    return MixtureOfExperts(
        router=Linear((f"{path}.gate",), (count,), hidden, wide=True),
        experts=Experts(f"{path}.experts", *names, count, hidden, inner),
        routing=Routing(top_k, renormalise, score, scale, *groups),
        activation=activation(config),
        correction=Wide(f"{path}.gate.e_score_correction_bias", count) if corrected else None,
    )


def stacked_mixture_of_experts(config: dict[str, Any], *, path: str) -> MixtureOfExperts:
    """The experts of gpt-oss: at "{path}.experts" (`StackedExperts`, or `Experts` where the config
    has `stacked_experts` as false, which it has of GGUF files), a router with biases at
    "{path}.router", clamped activation. Raises: ModelError: see `mixture_of_experts`."""
    count, top_k = _experts_of_a_token(config)
    hidden = values.integer(config, "hidden_size")
    inner = values.integer(config, "intermediate_size")
    sizes, experts = (count, hidden, inner), f"{path}.experts"
    stacked = values.flag(config, "stacked_experts", True)
    return MixtureOfExperts(
        router=Linear((f"{path}.router",), (count,), hidden, bias=True, wide=True),
        experts=StackedExperts(experts, *sizes)
        if stacked
        else Experts(experts, *_NAMES, *sizes, bias=True),
        routing=Routing(top_k, renormalise=True),
        activation="clamped_silu",
    )


def _experts_of_a_token(config: dict[str, Any]) -> tuple[int, int]:
    """How many experts there are, and of a token."""
    # transformers 5 writes one name for what published configs call by others.
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    key = next((key for key in keys if config.get(key) is not None), keys[-1])
    count = values.integer(config, key, high=_MOST_EXPERTS)
    top_k = values.integer(config, "num_experts_per_tok")
    if top_k > count:
        raise ModelError(f"config.json: num_experts_per_tok {top_k} is more than {key} {count}")
    return count, top_k
