"""The sampler's own part: what it feeds the op set with, from requests and masks."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from ops.op_set import SamplingTensors
from ops.reference import ReferenceOps, adjust_logits
from runtime.execution.forward_batch import SampledRows
from runtime.execution.sampler import Sampler
from runtime.request import Request, SamplingParams
from runtime.runner import SampleMasks
from runtime.scheduling.schedule_batch import ScheduleBatch
from tests.values import present

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.execution.device import Device

VOCAB = 70
EOS = frozenset({2})


class RecordingOps(ReferenceOps):
    """Notes what each step's logits were after bias, penalties, bans and masks."""

    def __init__(self) -> None:
        self.seen: list[SamplingTensors] = []
        self.adjusted: list[Tensor] = []

    def sample(self, logits: Tensor, s: SamplingTensors) -> Tensor:
        self.seen.append(s)
        self.adjusted.append(adjust_logits(logits.clone(), s))
        return ReferenceOps.sample(logits, s)


class Bench:
    """A sampler and hand-made steps."""

    def __init__(self, rows: int = 9) -> None:
        self.ops = RecordingOps()
        device = SimpleNamespace(
            torch_device=torch.device("cpu"), ops=self.ops, upload=torch.from_numpy
        )
        self.sampler = Sampler(cast("Device", device), rows, VOCAB, EOS)

    def step(
        self,
        rows: list[tuple[int, Request]],
        logits: Tensor,
        *,
        prefill: bool,
        masks: SampleMasks | None = None,
    ) -> list[int]:
        count = len(rows)
        requests = [item for _, item in rows]
        batch = ScheduleBatch(
            step=0,
            num_prefill=count if prefill else 0,
            requests=requests,
            rows=array("i", [row for row, _ in rows]),
            extend_lens=array("i", [1] * count),
            sampled=array("i", range(count)),
            sample_positions=array("i", [len(r.input_ids) + len(r.output_ids) for r in requests]),
            output_counts=array("i", [len(r.output_ids) for r in requests]),
        )
        which = SampledRows(
            rows=torch.tensor([row for row, _ in rows]),
            positions=torch.tensor(list(batch.sample_positions)),
        )
        self.sampler.take_over(batch)
        sampled = self.sampler.sample(batch, which, logits, masks)
        ids = sampled.token_ids.tolist()
        for item, token in zip(requests, ids, strict=True):
            item.output_ids.append(token)
        return ids


def make(prompt: list[int], outputs: tuple[int, ...] = (), **sampling: Any) -> Request:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    made = Request("r", array("i", prompt), params, 0.0)
    made.output_ids.extend(outputs)
    return made


def bits(*allowed: list[int]) -> np.ndarray:
    words = np.zeros((len(allowed), (VOCAB + 31) // 32), dtype=np.uint32)
    for row, ids in enumerate(allowed):
        for token in ids:
            words[row, token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


def test_frequency_and_presence_see_outputs_alone_and_repetition_everything_once() -> None:
    logits = torch.full((1, VOCAB), 2.0)
    logits[0, 7] = -2.0
    for name, changed in (
        ("frequency_penalty", {9: 1.5}),
        ("presence_penalty", {9: 1.5}),
        ("repetition_penalty", {5: 4.0, 7: -1.0, 9: 4.0}),
    ):
        bench = Bench()
        # As after a retraction: the prompt is computed again behind a committed output.
        bench.step([(3, make([5, 5, 7], (9,), **{name: 0.5}))], logits.clone(), prefill=True)
        want = logits.clone()
        for token, value in changed.items():
            want[0, token] = value
        torch.testing.assert_close(bench.ops.adjusted[0], want)


def test_a_penalty_counts_each_sampled_token_and_a_rows_next_request_starts_anew() -> None:
    bench = Bench()
    logits = torch.zeros(1, VOCAB)
    logits[0, 30] = 10.0
    item = make([1, 4], frequency_penalty=1.0)
    for step, expected in enumerate((10.0, 9.0, 8.0)):
        assert bench.step([(2, item)], logits.clone(), prefill=step == 0) == [30]
        assert bench.ops.adjusted[step][0, 30] == expected
    bench.step([(2, make([1, 4], frequency_penalty=1.0))], logits.clone(), prefill=True)
    assert bench.ops.adjusted[-1][0, 30] == 10.0
    bench.step([(2, make([1, 4]))], logits.clone(), prefill=True)
    assert bench.ops.seen[-1].penalties is None


def test_many_penalised_rows_keep_their_counts_while_the_tables_grow() -> None:
    bench = Bench(rows=40)
    items = [(row, make([row], frequency_penalty=0.5)) for row in range(1, 40)]
    logits = torch.zeros(1, VOCAB)
    for row, item in items:
        favourite = logits.clone()
        favourite[0, row] = 5.0
        bench.step([(row, item)], favourite, prefill=True)
    bench.step(items, torch.zeros(39, VOCAB), prefill=False)
    want = torch.zeros(39, VOCAB)
    want[range(39), range(1, 40)] = -0.5
    torch.testing.assert_close(bench.ops.adjusted[-1], want)


def test_rows_are_told_apart_whatever_their_place_in_the_batch() -> None:
    bench = Bench()
    warm = make([1], temperature=0.7, top_k=5, top_p=0.8, min_p=0.1, seed=-3)
    cold = make([1], logit_bias=((8, 4.0), (VOCAB + 3, 9.0)))
    bench.step([(4, warm), (1, cold)], torch.zeros(2, VOCAB), prefill=True)
    bench.step([(1, cold), (4, warm)], torch.zeros(2, VOCAB), prefill=False)
    first, second = bench.ops.seen
    assert not second.all_greedy
    assert second.any_filter
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        assert getattr(second, name).tolist() == getattr(first, name).tolist()[::-1]
    assert second.temperature.tolist() == [0.0, pytest.approx(0.7)]
    assert second.position.tolist() == [2, 2]
    assert [t.tolist() for t in present(second.bias)] == [[0], [8], [4.0]]
    bench.step([(1, cold)], torch.zeros(1, VOCAB), prefill=False)
    assert bench.ops.seen[2].all_greedy
    assert not bench.ops.seen[2].any_filter


def test_min_tokens_bans_every_end_until_the_count_is_reached() -> None:
    bench = Bench()
    item = make([1], min_tokens=2, stop_token_ids=frozenset({60, VOCAB + 1}))
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 60]] = torch.tensor([9.0, 8.0])
    got = [bench.step([(1, item)], logits.clone(), prefill=i == 0)[0] for i in range(3)]
    assert got == [0, 0, 2]
    ignoring = make([1], min_tokens=1, ignore_eos=True, stop_token_ids=frozenset({60}))
    assert bench.step([(1, ignoring)], logits.clone(), prefill=True) == [2]


def test_the_grammar_wins_over_min_tokens_where_it_allows_nothing_but_the_end() -> None:
    bench = Bench()
    item = make([1], min_tokens=50)
    logits = torch.zeros(1, VOCAB)
    only_end = SampleMasks([0], bits([2]))
    assert bench.step([(1, item)], logits.clone(), prefill=True, masks=only_end) == [2]
    end_or_more = SampleMasks([0], bits([2, 65]))
    assert bench.step([(1, item)], logits.clone(), prefill=False, masks=end_or_more) == [65]


def test_masks_apply_to_their_rows_and_an_empty_one_fails_its_row_alone() -> None:
    bench = Bench()
    rows = [(row, make([row])) for row in (1, 2, 3)]
    logits = torch.zeros(3, VOCAB)
    logits[:, 4] = 1.0
    masks = SampleMasks([0, 2], bits([33, 69], []))
    assert bench.step(rows, logits, prefill=True, masks=masks) == [33, 4, -1]


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, -1, -(2**63), 2**70 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    bench = Bench()
    bench.step([(1, make([1], temperature=1.0, seed=seed))], torch.zeros(1, VOCAB), prefill=True)
    assert int(bench.ops.seen[0].seed[0]) % 2**64 == seed % 2**64
