"""What layers keep between steps: keys and values as codes, and recurrent states."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from ops.kv_codes import CODE_DTYPES
from ops.op_set import HeadNorm, KvScales
from ops.reference import ReferenceOps
from runtime.execution.state_rows import StateRows
from scripts._paged import relative_error
from scripts.gpu.correctness import TOLERANCE, Check
from scripts.gpu.engine import mixed_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ops.op_set import RecurrentBatch
    from runtime.execution.device import Device

# Rounded apart in its last bit before it is coded, a value may get the code beside its own.
_MOST_APART = 0.02


def check_kv_codes(device: Device) -> Iterator[Check]:
    """Stored and placed as codes as the reference does it, in slots of any order."""
    tokens, heads, dim, turned = 33, 2, 128, 64
    where: dict[str, Any] = {"device": device.torch_device}
    qkv = torch.randn(tokens, 12, dim, dtype=device.dtype, **where)
    norm = HeadNorm(torch.randn(dim, dtype=device.dtype, **where), 1e-5)
    angles = torch.rand(64, turned // 2, **where) * 6
    rope = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slots, positions = torch.randperm(64, **where)[:tokens], torch.arange(tokens, **where)
    for kind, codes in CODE_DTYPES.items():
        stored: list[list[Tensor]] = []
        placed: list[list[Tensor]] = []
        for ops in (device.ops, ReferenceOps()):
            for results, place in ((stored, False), (placed, True)):
                pools = [torch.zeros(64, heads, dim, **where).to(codes) for _ in range(2)]
                scales = KvScales(torch.zeros(64, heads, **where), torch.zeros(64, heads, **where))
                q, k, v = qkv.clone().split((8, heads, heads), dim=1)
                if place:
                    ops.place_heads(
                        q, k, v, pools[0], pools[1], positions, slots,
                        q_norm=norm, k_norm=norm, rope=rope, interleaved=False, scales=scales,
                    )  # fmt: skip
                else:
                    ops.store_kv(k, v, pools[0], pools[1], slots, scales)
                results.append([*(pool.float() for pool in pools), *scales])
        same = all(map(torch.equal, *stored)) and torch.equal(placed[0][1], placed[1][1])
        yield Check(f"store_kv as {kind}", same, f"codes and scales equal to the bit: {same}")
        (keys, _, of_keys, _), (want, _, of_want, _) = placed
        apart = float((keys != want).float().mean())
        error, limit = relative_error(of_keys, of_want), TOLERANCE[device.dtype]
        detail = f"{apart:.2%} of the codes differ, scales by {error:.1e}"
        yield Check(f"place_heads as {kind}", apart <= _MOST_APART and error <= limit, detail)


def check_recurrent(device: Device, *, tiny: bool) -> Iterator[Check]:
    """The short convolution and the gated delta rule at a Qwen3-Next's shape, of a new prompt and
    of rows that go on: results and states, against the reference on a CPU."""
    key_heads, heads, dim, taps = (2, 4, 16, 4) if tiny else (16, 32, 128, 4)
    tokens, rows = (9, 2) if tiny else (150, 5)
    batch = StateRows(device).of(mixed_batch(tokens, rows, 20), decode_first=True)
    there = replace(batch, **_on_a_cpu(batch))
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    count, channels = tokens + rows, (2 * key_heads + heads) * dim
    q, k, v = draw(count, 2 * key_heads + heads, dim).split((key_heads, key_heads, heads), dim=1)
    decay, rate = -draw(count, heads).exp(), draw(count, heads).sigmoid()
    x, weight = draw(count, channels).to(device.dtype), draw(taps, channels)
    inputs, matrices = draw(rows + 2, taps - 1, channels), draw(rows + 2, heads, dim, dim)
    problems: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {
        "causal_conv": ((x, weight), inputs),
        "gated_delta": ((q, k, v, decay, rate), matrices),
    }
    limit = TOLERANCE[torch.float32]
    for name, (arguments, states) in problems.items():
        kept = states.to(device.torch_device, copy=True)
        moved = [argument.to(device.torch_device) for argument in arguments]
        got = getattr(device.ops, name)(*moved, kept, batch)
        want = getattr(ReferenceOps(), name)(*arguments, states, there)
        error = max(relative_error(got.cpu(), want), relative_error(kept.cpu(), states))
        yield Check(name, error <= limit, f"error {error:.1e}, allowed {limit:.0e}")


def _on_a_cpu(batch: RecurrentBatch) -> dict[str, Any]:
    values = {each.name: getattr(batch, each.name) for each in fields(batch)}
    return {n: value.cpu() for n, value in values.items() if isinstance(value, torch.Tensor)}
