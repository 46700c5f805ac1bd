"""What families share: how a `config.json` becomes blocks, and what a model is beside its decoder.

A family file maps a config to a `Family`. Everything that is usual is here, so that such a file
says only what is special about its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ops.blocks.attention import Attention
from ops.blocks.block import Block, Norm
from ops.blocks.dense_mlp import DenseMlp
from ops.blocks.latent_attention import LatentAttention
from ops.decoder import DecoderModel
from ops.op_set import AttentionSpec
from runtime.errors import ModelError
from runtime.models import config_values as values
from runtime.models.rope import RopeSpec
from runtime.models.sources import Linear, Vector
from runtime.rope_layout import RopeLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ops.blocks.block import Mixer

_MOST_HEAD_DIM = 2**16
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model as read from its config.

    Args:
        model: has a `Source` for every weight, a `Linear` for embedding and output layer.
            `model.vocab_size` is the rows of the embedding.
        tied: the output layer is the embedding.
        context_length: tokens of a sequence that the model is meant for.
        unread_layers: layers of the checkpoint behind the model's, which predict further tokens.
        unread: what the names of such layers' tensors begin with where they stand apart.
    """

    model: DecoderModel
    tied: bool
    context_length: int
    unread_layers: int = 0
    unread: str = ""

    @property
    def ropes(self) -> list[RopeSpec]:
        """The rotary embeddings of the blocks that have one, in their order."""
        return [rope for rope in _ropes(self.model.blocks) if isinstance(rope, RopeSpec)]

    def rope_layout(self, context: int, step_tokens: int) -> RopeLayout:
        """See `RopeLayout`.

        Raises:
            ModelError: the model's rotary embeddings do not agree on which prompts are long.
        """
        found = {rope.long_prompts(context) for rope in self.ropes} - {None}
        if len(found) > 1:
            raise ModelError(
                "config.json: rotary embeddings with different original contexts are not supported"
            )
        return RopeLayout(context, next(iter(found), None), max(context, step_tokens))


def _ropes(blocks: list[Block]) -> list[Any]:
    """What stands for the rotary embedding in each block with attention."""
    mixers = (block.mixer for block in blocks)
    return [mixer.rope for mixer in mixers if isinstance(mixer, Attention | LatentAttention)]


def rope_tables(family: Family, model: DecoderModel) -> list[tuple[RopeSpec, Tensor]]:
    """The rotary embeddings of a loaded model with their tables, each once."""
    pairs = zip(_ropes(family.model.blocks), _ropes(model.blocks), strict=True)
    return list({id(table): (rope, table) for rope, table in pairs if rope is not None}.values())


def head_dim(config: dict[str, Any], default: int | None = None) -> int:
    """The dimension of a head, given or derived."""
    if default is None:
        default = values.integer(config, "hidden_size") // values.integer(
            config, "num_attention_heads"
        )
    return values.integer(config, "head_dim", default, high=_MOST_HEAD_DIM)


def activation(config: dict[str, Any], key: str = "hidden_act") -> str:
    """`DenseMlp.activation`. Raises: ModelError: not one that the ops have."""
    name = values.text(config, key, "silu")
    if name not in ACTIVATIONS:
        raise ModelError(
            f"config.json: {key} {name!r} is not supported; it must be one of"
            f" {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def sliding_window(config: dict[str, Any]) -> int:
    """Keys that a sliding layer attends to; 0: no layer slides."""
    return values.integer(config, "sliding_window", 0, low=0)


def sliding_layers(config: dict[str, Any], default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Which layers slide.

    Args:
        default: whether layer i does where the config has no `layer_types`.
    """
    types = values.per_layer(config, "layer_types")
    if types is None:
        return tuple(default(i) for i in range(values.layers(config)))
    return tuple(kind == "sliding_attention" for kind in types)


def windows_by_type(config: dict[str, Any], default: Callable[[int], bool]) -> tuple[int, ...]:
    """The sliding window of each layer, 0 for full attention. default: see `sliding_layers`."""
    window = sliding_window(config)
    if not window:
        return (0,) * values.layers(config)
    return tuple(window if slides else 0 for slides in sliding_layers(config, default))


def _longest(config: dict[str, Any]) -> int:
    return values.integer(config, "max_position_embeddings", high=values.MOST_POSITIONS)


def norm(
    config: dict[str, Any],
    name: str,
    *,
    size: int | None = None,
    offset: float = 0.0,
    centered: bool = False,
) -> Norm:
    """A norm of the hidden size, or of `size`. offset: see `Vector`. centered: see `Norm`."""
    weight = Vector(name, size or values.integer(config, "hidden_size"), offset)
    if centered:
        return Norm(weight, values.number(config, "layer_norm_eps", 1e-5), centered=True)
    return Norm(weight, values.number(config, "rms_norm_eps", 1e-6))


def attention(
    config: dict[str, Any],
    rope: RopeSpec | None,
    *,
    dim: int | None = None,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm_offset: float | None = None,
    qk_norm_whole: bool = False,
    rope_interleaved: bool = False,
    qkv_names: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
) -> Attention:
    """Attention as Llama has it, apart from the arguments.

    Args:
        dim: of a head; None: the config's. scale: None: dim ** -0.5.
        qk_norm_offset: the offset of norms on q and k; None: no such norms.
        qk_norm_whole, rope_interleaved: see `Attention`.
    Raises:
        ModelError: the config's numbers are missing or do not fit together.
    """
    heads, kv_heads = _head_counts(config)
    hidden = values.integer(config, "hidden_size")
    dim = dim or head_dim(config)

    def qk_norm(name: str, width: int) -> Norm | None:
        if qk_norm_offset is None:
            return None
        size = width if qk_norm_whole else dim
        return norm(config, name, size=size, offset=qk_norm_offset)

    widths = (heads * dim, kv_heads * dim, kv_heads * dim)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        qkv=Linear(qkv_names, widths, hidden, qkv_bias),
        o=Linear(("self_attn.o_proj",), (hidden,), heads * dim, o_bias),
        spec=AttentionSpec(dim**-0.5 if scale is None else scale, window, soft_cap),
        rope=rope,
        rope_interleaved=rope_interleaved,
        q_norm=qk_norm("self_attn.q_norm", widths[0]),
        k_norm=qk_norm("self_attn.k_norm", widths[1]),
        qk_norm_whole=qk_norm_whole,
    )


def _head_counts(config: dict[str, Any]) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    heads = values.integer(config, "num_attention_heads")
    kv_heads = values.integer(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is no multiple of"
            f" num_key_value_heads {kv_heads}"
        )
    return heads, kv_heads


def dense_mlp(
    config: dict[str, Any],
    *,
    path: str = "mlp",
    inner: int | None = None,
    bias: bool = False,
    activation_key: str = "hidden_act",
    gate_up_names: tuple[str, ...] = ("gate_proj", "up_proj"),
) -> DenseMlp:
    """The MLP as Llama has it, apart from the arguments.

    Args:
        path: what the names of its tensors begin with. inner: None: the config's.
    Raises:
        ModelError: see `attention`.
    """
    hidden = values.integer(config, "hidden_size")
    inner = inner or values.integer(config, "intermediate_size")
    names = tuple(f"{path}.{name}" for name in gate_up_names)
    return DenseMlp(
        intermediate_size=inner,
        gate_up=Linear(names, (inner, inner), hidden, bias),
        down=Linear((f"{path}.down_proj",), (hidden,), inner, bias),
        activation=activation(config, activation_key),
    )


def pre_norm_layer(
    config: dict[str, Any],
    first: Mixer,
    second: Mixer,
    *,
    beside: Mixer | None = None,
    residual_scale: float = 1.0,
    norm_offset: float = 0.0,
) -> tuple[Block, ...]:
    """A layer as Llama has it: two blocks with a norm before each.

    Args:
        beside: reads what the second reads (an expert that every token goes through).
        norm_offset: see `Vector`.
    """
    names = ("input_layernorm", "post_attention_layernorm")
    before, between = (norm(config, name, offset=norm_offset) for name in names)
    layer = (
        Block(mixer=first, norm=before, residual_scale=residual_scale),
        Block(mixer=second, norm=between, residual_scale=residual_scale),
    )
    if beside is None:
        return layer
    return *layer, Block(mixer=beside, norm=between, residual_scale=residual_scale, parallel=True)


def family(
    config: dict[str, Any],
    layers: tuple[tuple[Block, ...], ...],
    *,
    tied: bool = False,
    norm_offset: float = 0.0,
    norm_centered: bool = False,
    unread_layers: int = 0,
    unread: str = "",
    **special: Any,
) -> Family:
    """A model of these layers.

    Args:
        tied: where the config does not say.
        norm_offset, norm_centered: of the norm behind the last layer.
        unread_layers, unread: see `Family`.
        special: fields of `DecoderModel`.
    """
    vocab, hidden = values.integer(config, "vocab_size"), values.integer(config, "hidden_size")
    ropes = _ropes([block for layer in layers for block in layer])
    contexts = [rope.context for rope in ropes if rope is not None]
    return Family(
        model=DecoderModel(
            vocab_size=vocab,
            hidden_size=hidden,
            embedding=Linear(("embed_tokens",), (vocab,), hidden),
            layers=layers,
            final_norm=norm(config, "norm", offset=norm_offset, centered=norm_centered),
            lm_head=Linear(("lm_head",), (vocab,), hidden),
            **special,
        ),
        tied=values.flag(config, "tie_word_embeddings", tied),
        context_length=min(contexts) if contexts else _longest(config),
        unread_layers=unread_layers,
        unread=unread,
    )
