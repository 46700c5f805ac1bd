"""What llama.cpp's conversion makes of the tensors of a model, beside new names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    Tensors = Iterator[tuple[str, np.ndarray]]


def converted(name: str, values: np.ndarray, config: Any, *, old: bool) -> Tensors:
    """The tensors that one becomes, under names that the `gguf` package maps, or its own.

    Args: old: as files had it before DeepSeek's kv_b and Qwen 3 Next's projections were split.
    """
    if config.model_type == "gpt_oss":
        return _gpt_oss(name, values)
    if name.endswith(".e_score_correction_bias"):
        return iter([(name.replace("_bias", ".bias"), values)])
    if name.endswith("kv_b_proj.weight") and not old:
        return _kv_b(name, values, config)
    if config.model_type == "qwen3_next":
        return _qwen3_next(name, values, config, old)
    return iter([(name, values)])


def _gpt_oss(name: str, values: np.ndarray) -> Tensors:
    stem, _, kind = name.rpartition(".experts.")
    if name.endswith("sinks"):
        yield f"{name}.weight", values
    elif not stem:
        yield name, values
    else:
        suffix = "bias" if kind.endswith("_bias") else "weight"
        rows = values if suffix == "bias" else values.swapaxes(1, 2)
        if kind.startswith("down"):
            yield f"{stem}.experts.down_proj.{suffix}", rows
        else:
            yield f"{stem}.experts.gate_proj.{suffix}", rows[:, ::2]
            yield f"{stem}.experts.up_proj.{suffix}", rows[:, 1::2]


def _kv_b(name: str, values: np.ndarray, config: Any) -> Tensors:
    plain = config.qk_nope_head_dim
    heads = values.reshape(config.num_attention_heads, -1, values.shape[-1])
    yield name.replace("kv_b_proj", "k_b_proj"), heads[:, :plain].swapaxes(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), heads[:, plain:]


def _qwen3_next(name: str, values: np.ndarray, config: Any, old: bool) -> Tensors:
    if name.endswith("A_log"):
        yield name, -np.exp(values)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), values
    elif name.endswith("conv1d.weight"):
        yield name, values.squeeze()
    elif name.endswith("linear_attn.norm.weight"):
        yield name, values - 1  # of all norms the caller adds it
    elif name.endswith("in_proj_qkvz.weight") and not old:
        block, key = f"blk.{name.split('.')[2]}", config.linear_key_head_dim
        groups = config.linear_num_key_heads
        each = config.linear_num_value_heads // groups * config.linear_value_head_dim
        stored = values.reshape(groups, 2 * key + 2 * each, -1)
        kinds = np.split(stored, np.cumsum([key, key, each]), axis=1)
        q, k, v, z = (kind.reshape(-1, values.shape[-1]) for kind in kinds)
        yield f"{block}.attn_qkv.weight", np.concatenate((q, k, v))
        yield f"{block}.attn_gate.weight", z
    else:
        yield name, values
