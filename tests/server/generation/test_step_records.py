"""The ring of step records."""

from __future__ import annotations

from server.generation.step_records import StepRecord, StepRecords


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        kind="decode",
        prefill_rows=0,
        decode_rows=1,
        prefill_tokens=0,
        sampled_rows=1,
        masked_rows=0,
        prefill_ids=(),
        decode_ids=("r",),
        reason="",
        planned_s=0.0,
        launched_s=0.0,
        sent_s=0.0,
        ended_s=0.0,
        done_s=0.0,
        applied_s=0.0,
        committed_s=0.0,
        plan_s=0.0,
        device_s=0.0,
        idle_s=None,
    )


def test_the_ring_keeps_the_newest_and_counts_all():
    records = StepRecords(capacity=3)
    for step in range(5):
        records.append(record(step))
    assert [one.step for one in records] == [2, 3, 4]
    assert [one.step for one in records.last(2)] == [3, 4]
    assert records.last(0) == []
    assert (len(records), records.total) == (3, 5)
