"""The simulated runner holds a scheduler to what every runner may count on."""

from __future__ import annotations

from array import array
from functools import partial

import pytest

from runtime.request import Request, SamplingParams
from runtime.runner import SampleMasks
from runtime.scheduling.schedule_batch import ScheduleBatch
from runtime.simulation.sim_runner import SimRunner


def batch_of(**changes) -> ScheduleBatch:
    """A whole prompt of three tokens in row 1, its page at 5."""
    request = Request("r", array("i", [7, 8, 9]), SamplingParams(), 0.0)
    arrays = {
        "rows": [1],
        "prefix_lens": [0],
        "extend_lens": [3],
        "input_ids": [7, 8, 9],
        "sampled": [0],
        "sample_positions": [3],
        "output_counts": [0],
        "table_rows": [1],
        "table_indices": [0],
        "table_pages": [5],
    }
    fields = {name: array("i", values) for name, values in {**arrays, **changes}.items()}
    batch = ScheduleBatch(step=0, num_prefill=1, requests=[request])
    for name, value in fields.items():
        setattr(batch, name, value)
    return batch


def test_tokens_come_from_the_script():
    runner = SimRunner(lambda request, index: len(request.input_ids) * 10 + index)
    step = runner.launch(batch_of())
    step.sample(None)
    assert step.result().token_ids == [30]


def test_a_step_is_done_only_once_it_may_sample():
    runner = SimRunner()
    step = runner.launch(batch_of())
    called = []
    step.add_done_callback(lambda: called.append(1))
    assert not called
    step.sample(None)
    step.add_done_callback(lambda: called.append(2))
    assert called == [1, 2]


def test_steps_that_take_time_end_in_the_order_of_their_launch():
    runner = SimRunner(step_seconds=lambda batch: 0.001)
    ended: list[int] = []
    steps = [runner.launch(batch_of()) for _ in range(3)]
    for number, step in enumerate(steps):
        step.add_done_callback(partial(ended.append, number))
    for step in reversed(steps):
        step.sample(None)
    runner.close()
    assert ended == [0, 1, 2]
    runner.close()


def test_a_mask_leaves_its_tokens_only():
    runner = SimRunner(lambda request, index: 3, vocab_size=64)
    step = runner.launch(batch_of())
    step.sample(SampleMasks(rows=[0], bits=array("i", [0, 1 << 8])))
    assert step.result().token_ids == [40]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        pytest.param({"table_pages": [0]}, "page 0", id="the-reserved-page"),
        pytest.param({"rows": [0], "table_rows": [0]}, "row 0", id="the-reserved-row"),
        pytest.param({"table_indices": [1]}, "no page 0", id="a-position-without-a-page"),
        pytest.param(
            {"extend_lens": [2]}, "lengths sum to 2, input_ids are 3", id="lengths-and-ids-differ"
        ),
    ],
)
def test_a_batch_that_no_device_could_run_is_caught(changes, fault):
    with pytest.raises(AssertionError, match=fault):
        SimRunner().launch(batch_of(**changes))


def test_a_failing_script_is_the_steps_error():
    runner = SimRunner(lambda request, index: 1 // 0)
    step = runner.launch(batch_of())
    step.sample(None)
    with pytest.raises(ZeroDivisionError):
        step.result()
