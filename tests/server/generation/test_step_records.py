"""The ring of step records."""

from __future__ import annotations

from dataclasses import replace

import pytest

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


def timed(queueing_s: float = 0.0) -> StepRecord:
    """Planned for 2 ms, launched for 1, read 10 later, applied and delivered for 4."""
    return replace(
        record(0),
        planned_s=1.0,
        launched_s=1.002,
        sent_s=1.003,
        ended_s=1.012,
        done_s=1.013,
        applied_s=1.014,
        committed_s=1.017,
        plan_s=0.002,
        queueing_s=queueing_s,
    )


def test_the_host_s_work_for_a_step_is_all_but_waiting():
    assert timed().host_s == pytest.approx(0.002 + 0.001 + 0.004)


def test_where_a_thread_queues_the_step_its_time_counts():
    """While the loop goes on; what the caller queues itself is not counted twice."""
    assert timed(queueing_s=0.006).host_s == pytest.approx(0.002 + 0.006 + 0.004)
    assert timed(queueing_s=0.0009).host_s == timed().host_s
