"""Whom to take KV from: the order of retraction, and who yields to a higher priority."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request


def retraction_order(admitted: Sequence[Request]) -> list[Request]:
    """Requests in the order in which they are retracted; the oldest is left out.

    Fewest output tokens first (least work lost), then the longest input (most KV back), then the
    newest. The oldest by arrival is never among them, so that somebody always gets done: with
    victims taken freely, short outputs are thrown back again and again.
    """
    if not admitted:
        return []
    oldest = min(admitted, key=_seq)
    others = [request for request in admitted if request is not oldest]
    others.sort(key=lambda r: (r.launched_tokens, -len(r.input_ids), -_seq(r)))
    return others


def preemption_order(admitted: Sequence[Request], priority: int, threshold: int) -> list[Request]:
    """Requests that one of `priority` may push out: lowest priority first, then newest."""
    below = [request for request in admitted if priority - request.priority > threshold]
    below.sort(key=lambda r: (r.priority, -_seq(r)))
    return below


def _seq(request: Request) -> int:
    return request.scheduling.seq
