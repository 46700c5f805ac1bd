"""Qwen 3 Next: gated delta nets, and in every fourth layer gated attention.

A quarter of a head turns. Experts are as in Qwen 2 MoE; norms are 1 + the stored weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ops.blocks.block import Norm
from ops.blocks.gated_delta_net import GatedDeltaNet
from runtime.errors import ModelError, shown
from runtime.models import config_values as values
from runtime.models.family import (
    Family,
    attention,
    dense_mlp,
    family,
    head_dim,
    pre_norm_layer,
)
from runtime.models.mixture import mixture_of_experts
from runtime.models.qwen2 import is_dense, shared_expert
from runtime.models.rope import parse_rope
from runtime.models.sources import Linear, Source, Vector, Wide

if TYPE_CHECKING:
    from torch import Tensor

    from ops.blocks.attention import Attention
    from runtime.models.sources import WeightReader

_LAYER_TYPES = ("linear_attention", "full_attention")
_MOST_DIM = 2**16
_MOST_KERNEL = 64


@dataclass(frozen=True, slots=True)
class Sorted(Source):
    """A linear layer whose rows stand in the checkpoint group by group, and here kind by kind.

    Args:
        parts: rows of each kind in a group.
        kinds: those that are taken, in this order.
        below: stacked below them.
        exact: never quantized.
    """

    name: str
    groups: int
    parts: tuple[int, ...]
    kinds: tuple[int, ...]
    inputs: int
    bias: bool = False
    below: Linear | None = None
    exact: bool = False

    def load(self, reader: WeightReader) -> Any:
        weight = self._stack(reader, ".weight", self.inputs)
        bias = self._stack(reader, ".bias") if self.bias else None
        quantization = None if self.exact else reader.quantization
        return reader.ops.pack_linear(weight, bias, quantization=quantization)

    def _stack(self, reader: WeightReader, suffix: str, *columns: int) -> Tensor:
        rows = sum(self.parts)
        stored = reader.take(self.name + suffix, (self.groups * rows, *columns), exact=True)
        kinds = stored.view(self.groups, rows, *columns).split(self.parts, dim=1)
        taken = [kinds[kind].flatten(0, 1) for kind in self.kinds]
        if self.below is not None:
            taken.append(self.below.read(reader, suffix, *columns))
        return torch.cat(taken)


@dataclass(frozen=True, slots=True)
class Taps(Source):
    """The weight of a convolution of each channel by itself: [kernel, channels] float32."""

    name: str
    channels: int
    kernel: int

    def load(self, reader: WeightReader) -> Tensor:
        shape = (self.channels, 1, self.kernel)
        return reader.take(f"{self.name}.weight", shape, wide=True)[:, 0].t().contiguous()


def read(config: dict[str, Any]) -> Family:
    config = {"head_dim": 256, "num_key_value_heads": 2, **config}
    experts = mixture_of_experts(
        config,
        path="mlp",
        renormalise=values.flag(config, "norm_topk_prob", True),
        intermediate_key="moe_intermediate_size",
    )
    shared, mlp = shared_expert(config), dense_mlp(config)
    recurrent, attending = _gated_delta_net(config), _gated_attention(config)
    layers = []
    for kind, dense in zip(_layer_types(config), is_dense(config), strict=True):
        mixer = recurrent if kind == "linear_attention" else attending
        second, beside = (mlp, None) if dense else (experts, shared)
        layers.append(pre_norm_layer(config, mixer, second, beside=beside, norm_offset=1.0))
    # What predicts further tokens stands beside the model, not in it.
    return family(config, tuple(layers), norm_offset=1.0, unread="mtp.")


def _layer_types(config: dict[str, Any]) -> list[str]:
    types = values.per_layer(config, "layer_types")
    if types is None:
        interval = values.integer(config, "full_attention_interval", 4)
        return [_LAYER_TYPES[(i + 1) % interval == 0] for i in range(values.layers(config))]
    for kind in types:
        if kind not in _LAYER_TYPES:
            raise ModelError(
                f"config.json: layer_types holds {shown(kind)}; they must be of"
                f" {', '.join(_LAYER_TYPES)}"
            )
    return types


def _gated_attention(config: dict[str, Any]) -> Attention:
    """Its queries stand beside their gates, head by head."""
    dim, bias = head_dim(config), values.flag(config, "attention_bias", False)
    rope = parse_rope(config, dim, partial_rotary_factor=0.25)
    mixer = attention(config, rope, dim=dim, qkv_bias=bias, o_bias=bias, qk_norm_offset=1.0)
    hidden = values.integer(config, "hidden_size")
    below = Linear(("self_attn.k_proj", "self_attn.v_proj"), mixer.widths[1:], hidden, bias)
    queries = Sorted("self_attn.q_proj", mixer.heads, (dim, dim), (0,), hidden, bias)
    return replace(mixer, qkv=replace(queries, below=below), gate=replace(queries, kinds=(1,)))


def _gated_delta_net(config: dict[str, Any]) -> GatedDeltaNet:
    activation = values.text(config, "hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act is {shown(activation)}; it must be silu")

    def size(key: str, default: int, high: int = _MOST_DIM) -> int:
        return values.integer(config, key, default, high=high)

    hidden = values.integer(config, "hidden_size")
    groups, heads = size("linear_num_key_heads", 16), size("linear_num_value_heads", 32)
    key_dim, value_dim = size("linear_key_head_dim", 128), size("linear_value_head_dim", 128)
    if heads % groups:
        raise ModelError(
            f"config.json: linear_num_value_heads {heads} is no multiple of"
            f" linear_num_key_heads {groups}"
        )
    each, kernel = (
        heads // groups,
        values.integer(config, "linear_conv_kernel_dim", 4, low=2, high=_MOST_KERNEL),
    )
    keys, heads_values = groups * key_dim, heads * value_dim
    parts = (key_dim, key_dim, each * value_dim, each * value_dim)
    path = "linear_attn"
    return GatedDeltaNet(
        key_heads=groups,
        value_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        kernel=kernel,
        qkvz=Sorted(f"{path}.in_proj_qkvz", groups, parts, (0, 1, 2, 3), hidden),
        rates=Sorted(f"{path}.in_proj_ba", groups, (each, each), (0, 1), hidden, exact=True),
        conv=Taps(f"{path}.conv1d", 2 * keys + heads_values, kernel),
        a_log=Wide(f"{path}.A_log", heads),
        dt_bias=Wide(f"{path}.dt_bias", heads),
        norm=Norm(Vector(f"{path}.norm", value_dim), values.number(config, "rms_norm_eps", 1e-6)),
        out=Linear((f"{path}.out_proj",), (hidden,), heads_values),
    )
