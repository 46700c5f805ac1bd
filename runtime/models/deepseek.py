"""DeepSeek V2 and V3: latent attention, and experts chosen from the best groups of them.

V2 scores experts by a softmax over all of them, V3 by a sigmoid each, with a correction that
balances their load. The first layers have an MLP; beside the experts is one for every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ops.blocks.block import Norm
from ops.blocks.latent_attention import LatentAttention
from ops.op_set import AttentionSpec
from runtime.errors import ModelError, shown
from runtime.models import config_values as values
from runtime.models.family import Family, dense_mlp, family, pre_norm_layer
from runtime.models.mixture import mixture_of_experts
from runtime.models.rope import parse_rope
from runtime.models.sources import Linear, Source, Vector

if TYPE_CHECKING:
    from torch import Tensor

    from ops.blocks.block import Mixer
    from ops.blocks.mixture import MixtureOfExperts
    from runtime.models.sources import WeightReader

_MOST_DIM = 2**16
_EPS = 1e-6  # of the latents' norms, whatever the config says of the others


@dataclass(frozen=True, slots=True)
class Up(Source):
    """The rows of every head from `begin` to `end` in kv_b_proj: [heads, end - begin, latent]."""

    heads: int
    rows: int
    latent: int
    begin: int
    end: int

    def load(self, reader: WeightReader) -> Tensor:
        shape = (self.heads * self.rows, self.latent)
        weight = reader.take("self_attn.kv_b_proj.weight", shape)
        return weight.view(self.heads, self.rows, -1)[:, self.begin : self.end].contiguous()


def read_v2(config: dict[str, Any]) -> Family:
    if values.flag(config, "norm_topk_prob", False):
        raise ModelError("config.json: norm_topk_prob is true; for deepseek_v2 it must be false")
    method = values.text(config, "topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"config.json: topk_method is {shown(method)}; it must be greedy or"
            " group_limited_greedy"
        )
    groups = _groups(config) if method == "group_limited_greedy" else (1, 1)
    experts = _experts(config, renormalise=False, groups=(*groups, "max"))
    return deepseek_family(config, latent_attention(config, interleaved=True), experts)


def read_v3(config: dict[str, Any]) -> Family:
    interleaved = values.flag(config, "rope_interleave", True)
    config = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, **config}
    mixer = latent_attention(config, interleaved=interleaved)
    return deepseek_family(config, mixer, deepseek_v3_experts(config))


def deepseek_v3_experts(config: dict[str, Any]) -> MixtureOfExperts:
    """The experts of DeepSeek V3, which GLM-4.5 has too."""
    return _experts(
        config,
        renormalise=values.flag(config, "norm_topk_prob", True),
        groups=(*_groups(config), "top2"),
        score="sigmoid",
        corrected=True,
    )


def deepseek_family(config: dict[str, Any], mixer: Mixer, experts: MixtureOfExperts) -> Family:
    """Layers of an MLP first, then of experts with one for every token beside them."""
    count = values.layers(config)
    dense = min(count, values.integer(config, "first_k_dense_replace", 0, low=0))
    inner = values.integer(config, "moe_intermediate_size") * values.integer(
        config, "n_shared_experts", high=_MOST_DIM
    )
    shared = dense_mlp(config, path="mlp.shared_experts", inner=inner)
    first = pre_norm_layer(config, mixer, dense_mlp(config))
    rest = pre_norm_layer(config, mixer, experts, beside=shared)
    return family(
        config,
        (first,) * dense + (rest,) * (count - dense),
        unread_layers=values.integer(config, "num_nextn_predict_layers", 1, low=0, high=1000),
    )


def latent_attention(config: dict[str, Any], *, interleaved: bool) -> LatentAttention:
    """Raises: ModelError: the config's numbers are missing."""

    def size(key: str) -> int:
        return values.integer(config, key, high=_MOST_DIM)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    plain, rotary, value = size("qk_nope_head_dim"), size("qk_rope_head_dim"), size("v_head_dim")
    latent, bias = size("kv_lora_rank"), values.flag(config, "attention_bias", False)
    query = values.integer(config, "q_lora_rank") if config.get("q_lora_rank") else None
    name = "self_attn.q_proj" if query is None else "self_attn.q_b_proj"
    rope, rows = parse_rope(config, rotary), plain + value
    return LatentAttention(
        heads=heads,
        plain_dim=plain,
        rotary_dim=rotary,
        latent=latent,
        q_a=Linear(("self_attn.q_a_proj",), (query,), hidden, bias) if query else None,
        q_norm=Norm(Vector("self_attn.q_a_layernorm", query), _EPS) if query else None,
        q_b=Linear((name,), (heads * (plain + rotary),), query or hidden),
        kv_a=Linear(("self_attn.kv_a_proj_with_mqa",), (latent + rotary,), hidden, bias),
        kv_norm=Norm(Vector("self_attn.kv_a_layernorm", latent), _EPS),
        k_up=Up(heads, rows, latent, 0, plain),
        v_up=Up(heads, rows, latent, plain, rows),
        o=Linear(("self_attn.o_proj",), (hidden,), heads * value, bias),
        spec=AttentionSpec((plain + rotary) ** -0.5 * rope.score_scale()),
        rope=rope,
        rope_interleaved=interleaved,
    )


def _groups(config: dict[str, Any]) -> tuple[int, int]:
    return values.integer(config, "n_group", 1), values.integer(config, "topk_group", 1)


def _experts(
    config: dict[str, Any],
    *,
    renormalise: bool,
    groups: tuple[int, int, str],
    score: str = "softmax",
    corrected: bool = False,
) -> MixtureOfExperts:
    return mixture_of_experts(
        config,
        path="mlp",
        renormalise=renormalise,
        intermediate_key="moe_intermediate_size",
        score=score,
        scale=values.number(config, "routed_scaling_factor", 1.0),
        groups=groups,
        corrected=corrected,
    )
