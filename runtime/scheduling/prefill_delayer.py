"""PrefillDelayer: gathers prompts, where decode throughput matters more than first tokens."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.config import SchedulerConfig

RECENT_BATCHES = 32


class PrefillDelayer:
    """Holds prompts back for a few passes, so that they come in one step together: every prefill
    step slows down all decode rows; fewer and fuller ones slow them down less.

    Asked once per pass; `finalize` closes the pass.

    Args:
        config: bounds, watermark and ratio.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._recent: deque[int] = deque(maxlen=RECENT_BATCHES)  # prompts per prefill step
        self._passes = 0
        self._since_s: float | None = None

    def allow(
        self, now: float, *, waiting: int, running: int, free_rows: int, kv_usage: float
    ) -> bool:
        """Whether prompts may be admitted in this pass.

        Args:
            waiting: requests in the queue.
            free_rows: requests that could be admitted.
            kv_usage: share of the pool that is neither free nor evictable.
        """
        config = self._config
        if not waiting or not running:
            self._reset()
            return True
        if kv_usage < config.delayer_low_watermark:
            return True
        largest = max(self._recent, default=0)
        few = waiting < min(running * config.delayer_running_ratio, largest)
        if free_rows >= largest and not few:
            return True
        if self._since_s is None:
            self._since_s = now
        delayed_ms = (now - self._since_s) * 1000
        if self._passes >= config.delayer_max_passes or delayed_ms >= config.delayer_max_ms:
            return True
        self._passes += 1
        return False

    def finalize(self, prefilled: int) -> None:
        """Closes a pass that admitted this many prompts."""
        if prefilled:
            self._recent.append(prefilled)
            self._reset()

    def _reset(self) -> None:
        self._passes = 0
        self._since_s = None
