"""What a model family is to the code that loads and runs it: a decoder's shape and its names.

A family file maps a `config.json` to a `Family`. Everything that families share is here, so that
such a file says only what is special about its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ops.op_set import DecoderSpec
from runtime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.models.rope import RopeSpec

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


def required_int(config: dict[str, Any], key: str) -> int:
    """config[key]. Raises: ModelError: absent, or not a positive integer."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer: {value!r}")
    return value


def head_dim(config: dict[str, Any]) -> int:
    """The dimension of a head, given or derived."""
    if config.get("head_dim"):
        return required_int(config, "head_dim")
    return required_int(config, "hidden_size") // required_int(config, "num_attention_heads")


def activation(config: dict[str, Any], key: str = "hidden_act") -> str:
    """`DecoderSpec.activation`. Raises: ModelError: not one that the ops have."""
    name = config.get(key) or "silu"
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
    layers = required_int(config, "num_hidden_layers")
    window = config.get("sliding_window")
    if not window:
        return (0,) * layers
    types = config.get("layer_types")
    if types is None:
        return tuple(window if default(i) else 0 for i in range(layers))
    if len(types) != layers:
        raise ModelError(f"config.json: layer_types has {len(types)} entries for {layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def decoder_spec(config: dict[str, Any], *, rotary_dim: int, **special: Any) -> DecoderSpec:
    """The spec of a Llama-like config; `special` replaces fields."""
    heads = required_int(config, "num_attention_heads")
    dim = head_dim(config)
    layers = required_int(config, "num_hidden_layers")
    fields: dict[str, Any] = {
        "vocab_size": required_int(config, "vocab_size"),
        "hidden_size": required_int(config, "hidden_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": dim,
        "intermediate_size": required_int(config, "intermediate_size"),
        "rms_eps": float(config.get("rms_norm_eps", 1e-6)),
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
