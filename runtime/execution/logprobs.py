"""Log-probabilities of a step: computed on the device, made into records on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.request import TokenLogprobs

if TYPE_CHECKING:
    from runtime.execution.device import Device


@dataclass(slots=True)
class LogprobTensors:
    """Log-probabilities at n places.

    Args:
        token_ids: [n] int64. chosen: [n] float32, their log-probabilities.
        top_ids, top: [n, k] int64 and float32, the k most likely, most likely first.
    """

    token_ids: Tensor
    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.token_ids, self.chosen, self.top_ids, self.top

    def to_host(self, device: Device) -> LogprobTensors:
        """The same in host memory (see `Device.to_host`)."""
        return LogprobTensors(*(device.to_host(tensor) for tensor in self.tensors()))


def logprobs_of(logits: Tensor, token_ids: Tensor, top: int) -> LogprobTensors:
    """log softmax(logits) of the given tokens and of the `top` most likely ones.

    Shapes: logits [n, V], token_ids [n] int64; a negative id (a row that failed) is
    looked up as 0.
    """
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, token_ids.clamp(min=0)[:, None]) - total
    values, ids = logits.topk(top, dim=-1)
    return LogprobTensors(token_ids, chosen[:, 0], ids, values - total)


def concatenate(parts: list[LogprobTensors]) -> LogprobTensors:
    """The parts one after the other. They have the same k."""
    columns = zip(*(part.tensors() for part in parts), strict=True)
    return LogprobTensors(*(torch.cat(column) for column in columns))


def records(on_host: LogprobTensors, counts: list[int]) -> list[TokenLogprobs]:
    """One record per place, with `counts[i]` alternatives at place i."""
    columns = (tensor.tolist() for tensor in on_host.tensors())
    return [
        TokenLogprobs(token, chosen, tuple(zip(ids[:count], top[:count], strict=True)))
        for token, chosen, ids, top, count in zip(*columns, counts, strict=True)
    ]
