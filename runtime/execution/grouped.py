"""Integers of a checkpoint in groups, on a device: what `ops.coded_weight.GroupedMatrix` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ops.coded_weight import GROUP_KINDS, GROUP_OF, GroupedMatrix, are_in_one_order
from ops.op_set import GroupedWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ops.coded_weight import CodedMatrix

_ROWS = 4096  # that are unpacked at a time


def grouped_weight(
    matrices: Sequence[CodedMatrix | GroupedMatrix | None], device: torch.device
) -> GroupedWeight | None:
    """Matrices one below the other; None where they are not all in groups of one kind and in one
    order, or of groups that kernels have no place for."""
    parts = [matrix for matrix in matrices if isinstance(matrix, GroupedMatrix)]
    if len(parts) < len(matrices) or len({(part.kind, part.group) for part in parts}) != 1:
        return None
    if not are_in_one_order(parts):
        return None
    kind, group, k, order = parts[0].kind, parts[0].group, parts[0].k, parts[0].order
    scales = np.concatenate([part.scales for part in parts]).astype(np.float32)
    table = parts[0].table
    if any(part.table is not None and bool((part.table != table).any()) for part in parts):
        return None
    zeros = [part.zeros for part in parts if part.zeros is not None]
    if all((zero == 1 << (GROUP_KINDS[kind] - 1)).all() for zero in zeros):
        zeros = []
    if group % GROUP_OF or (zeros and (scales.view(np.uint32) & 255).any()):
        return None
    codes = torch.empty((len(scales), k), dtype=torch.uint8, device=device)
    for part, rows in zip(parts, codes.split([part.n for part in parts]), strict=True):
        for first in range(0, part.n, _ROWS):
            last = min(first + _ROWS, part.n)
            read = np.ascontiguousarray(part.read(first, last), np.uint8)
            if kind == "fp8" and (read & 127 == 127).any():  # NaN, which kernels take for a number
                return None
            rows[first:last].copy_(torch.from_numpy(read))
    return GroupedWeight(
        kind,
        codes,
        torch.from_numpy(scales).to(device),
        torch.from_numpy(np.concatenate(zeros)).to(device) if zeros else None,
        None if table is None else torch.from_numpy(table.copy()).to(device),
        None if order is None else torch.from_numpy(order.astype(np.int64)).to(device),
    )
