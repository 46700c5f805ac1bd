"""What a model family is to the code that loads and runs it: a decoder's shape and its names.

A family file maps a `config.json` to a `Family`. Everything that families share is here, so that
such a file says only what is special about its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ops.op_set import DecoderSpec
from runtime.errors import ModelError
from runtime.models import config_values as values

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.models.rope import RopeSpec

_MOST_HEAD_DIM = 2**16
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's tensors below `model.layers.N.`; several are stacked in that order."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    input_norm: str = "input_layernorm"
    post_attention_norm: str = "post_attention_layernorm"
    attention_out_norm: str | None = None
    mlp_out_norm: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model as read from its config.

    Args:
        spec: `spec.vocab_size` is the number of rows of the embedding.
        ropes: per layer; None where rotary is not applied.
        tied: the output layer is the embedding.
        norm_offset: added to the stored weights of the norms (Gemma stores weight - 1).
    """

    spec: DecoderSpec
    ropes: tuple[RopeSpec | None, ...]
    tied: bool
    names: LayerNames = LayerNames()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0

    @property
    def context_length(self) -> int:
        """Tokens of a sequence that the model is meant for."""
        return min(rope.context for rope in self.ropes if rope is not None)


def head_dim(config: dict[str, Any], default: int | None = None) -> int:
    """The dimension of a head, given or derived."""
    if default is None:
        default = values.integer(config, "hidden_size") // values.integer(
            config, "num_attention_heads"
        )
    return values.integer(config, "head_dim", default, high=_MOST_HEAD_DIM)


def activation(config: dict[str, Any], key: str = "hidden_act") -> str:
    """`DecoderSpec.activation`. Raises: ModelError: not one that the ops have."""
    name = values.text(config, key, "silu")
    if name not in ACTIVATIONS:
        raise ModelError(
            f"config.json: {key} {name!r} is not supported; it must be one of"
            f" {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def windows_by_type(config: dict[str, Any], default: Callable[[int], bool]) -> tuple[int, ...]:
    """The sliding window of each layer, 0 for full attention.

    Args:
        default: whether layer i slides where the config has no `layer_types`.
    """
    layers = values.layers(config)
    window = values.integer(config, "sliding_window", 0, low=0)
    if not window:
        return (0,) * layers
    types = values.per_layer(config, "layer_types")
    if types is None:
        return tuple(window if default(i) else 0 for i in range(layers))
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def decoder_spec(config: dict[str, Any], *, rotary_dim: int, **special: Any) -> DecoderSpec:
    """The spec of a Llama-like config; `special` replaces fields."""
    heads = values.integer(config, "num_attention_heads")
    dim = special.get("head_dim") or head_dim(config)
    layers = values.layers(config)
    fields: dict[str, Any] = {
        "vocab_size": values.integer(config, "vocab_size"),
        "hidden_size": values.integer(config, "hidden_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": values.integer(config, "num_key_value_heads", heads),
        "head_dim": dim,
        "intermediate_size": values.integer(config, "intermediate_size"),
        "rms_eps": values.number(config, "rms_norm_eps", 1e-6),
        "scale": dim**-0.5,
        "rotary_dim": rotary_dim,
        "windows": (0,) * layers,
        "rope_layers": (True,) * layers,
        "activation": activation(config),
    }
    spec = DecoderSpec(**{**fields, **special})
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {spec.num_heads} is no multiple of"
            f" num_key_value_heads {spec.num_kv_heads}"
        )
    return spec
