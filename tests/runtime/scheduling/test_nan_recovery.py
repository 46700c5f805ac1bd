"""Which requests answer for rows without a token."""

from __future__ import annotations

from array import array

from runtime.request import Request, SamplingParams
from runtime.runner import StepOutput
from runtime.scheduling.nan_recovery import failed_prompts
from runtime.scheduling.schedule_batch import ScheduleBatch


def test_a_decode_row_without_a_token_is_no_prompt() -> None:
    """Nor is the first one behind the prompts."""
    requests = [Request(name, array("i", [1]), SamplingParams(), 0.0) for name in "abcd"]
    batch = ScheduleBatch(
        step=0,
        num_prefill=2,
        requests=requests,
        rows=array("i", [1, 2, 3, 4]),
        prefix_lens=array("i", [0, 0, 5, 5]),
        extend_lens=array("i", [1] * 4),
        sampled=array("i", [1, 2, 3]),  # the first is a middle chunk
    )
    failed = {0: "a NaN among the logits", 1: "a NaN among the logits"}
    found = failed_prompts(batch, StepOutput(token_ids=[-1, -1, 7], failed=failed))
    assert [request.request_id for request in found] == ["b"]
