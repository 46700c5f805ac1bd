"""What llama.cpp's conversion changed of tensors, put back: shapes, values, and parts joined again.

Of Qwen 3 Next the rows of queries, keys, values and gates stand kind by kind (older files leave
them as they are), and the logarithm of a decay is given as the decay. Of DeepSeek the two halves of
each head in kv_b stand apart, that of the keys transposed (older files have kv_b). Changes that
belong to an architecture as a whole, of norms and of q and k, are `GgufCheckpoint`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Shape = tuple[int, ...]

_KV_B = "self_attn.kv_b_proj.weight"
_QKVZ = "linear_attn.in_proj_qkvz.weight"
JOINED = (_KV_B, _QKVZ)  # ends of the names of those that may stand in two parts


def restored_shape(name: str, shapes: list[Shape]) -> Shape:
    """The shape of a tensor that stands in parts of these shapes, sorted by the names of the parts.

    Raises: ValueError: the parts do not fit together."""
    first = shapes[0]
    if name.endswith("shared_expert_gate.weight"):  # stored as a vector
        return (1, first[-1])
    if name.endswith("linear_attn.conv1d.weight"):
        return (first[0], 1, *first[1:])
    if len(shapes) == 1:
        return first
    second = shapes[1]
    if name.endswith(_KV_B):
        (heads, latent, plain), (_, value, _) = first, second
        return (heads * (plain + value), latent)
    (gates, hidden), (rows, _) = first, second
    return (rows + gates, hidden)


def restored_values(name: str, parts: list[NDArray[Any]], config: dict[str, Any]) -> NDArray[Any]:
    """The values of a tensor that stands in parts with these. Raises: ValueError: see above."""
    if name.endswith("linear_attn.A_log"):
        return np.asarray(np.log(-parts[0]))
    if len(parts) == 1:
        return parts[0]
    if name.endswith(_KV_B):
        keys, values = parts
        return np.concatenate((keys.swapaxes(1, 2), values), axis=1)
    gates, rows = parts
    groups = config["linear_num_key_heads"]
    keys = groups * config["linear_key_head_dim"]
    kinds = *np.split(rows, (keys, 2 * keys)), gates
    return np.concatenate([kind.reshape(groups, -1, kind.shape[-1]) for kind in kinds], axis=1)
