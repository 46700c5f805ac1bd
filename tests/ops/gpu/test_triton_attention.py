"""Triton attention against the reference, over pairs of everything that changes its code path."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest
import torch

from ops.gpu.decode_attention import FIRST_SPLIT, decode_attention, num_splits
from ops.gpu.extend_attention import extend_attention
from ops.reference import extend_attention as reference_attention
from scripts._paged import paged_problem, relative_error

# exp of a large argument is inf in the soft cap's tanh, which then is 1: meant, but numpy warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.usefixtures("nan_filled_outputs"),
]

HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 8)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 19},
    "soft_cap": {"soft_cap": 2.0},
    "sink": {"sinks": True},
}
PAGE_SIZES = (1, 16)
LENGTHS = (1, 15, 17, 63, 111, 257)
DTYPES = (torch.float32, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    head_dim: int
    group: int
    feature: str
    page_size: int
    length: int
    prefix: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = "f32" if self.dtype is torch.float32 else "f16"
        return (
            f"d{self.head_dim}-g{self.group}-{self.feature}-p{self.page_size}"
            f"-{self.prefix}+{self.length}-{dtype}"
        )


def make_cases() -> list[Case]:
    """Every (head dimension, group, feature) three times, the other factors drawn for each."""
    draw = random.Random(0).choice
    return [
        Case(
            head_dim,
            group,
            feature,
            draw(PAGE_SIZES),
            draw(LENGTHS),
            draw((0, *LENGTHS)),
            draw(DTYPES),
        )
        for head_dim, group, feature in product(HEAD_DIMS, GROUPS, FEATURES)
        for _ in range(3)
    ]


CASES = make_cases()


def test_cases_hold_every_pair_of_factors() -> None:
    factors = [HEAD_DIMS, GROUPS, tuple(FEATURES), PAGE_SIZES, LENGTHS, (0, *LENGTHS), DTYPES]
    rows = [
        (c.head_dim, c.group, c.feature, c.page_size, c.length, c.prefix, c.dtype) for c in CASES
    ]
    missing = [
        (a, b)
        for i, j in combinations(range(len(factors)), 2)
        for a, b in product(factors[i], factors[j])
        if not any(row[i] == a and row[j] == b for row in rows)
    ]
    assert len(CASES) >= 200
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_extend_and_decode_equal_the_reference(case: Case) -> None:
    """One ragged batch with the case's row first and two shorter ones, then a decode step of the
    same rows. What no row may read holds NaN."""
    rows = [(case.prefix, case.length), (17, 1), (0, 5)]
    options: dict[str, Any] = {
        "head_dim": case.head_dim,
        "group": case.group,
        "kv_heads": 1 if case.group == 8 else 2,
        "page_size": case.page_size,
        "dtype": case.dtype,
        **FEATURES[case.feature],
    }
    for op, problem in (
        (extend_attention, paged_problem(rows, **options)),
        (decode_attention, paged_problem([(p + n - 1, 1) for p, n in rows], **options, seed=1)),
    ):
        got = op(*problem.arguments())
        expected = reference_attention(*problem.arguments())
        assert got.dtype == case.dtype
        assert relative_error(got, expected) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize(
    "group",
    [24, *(pytest.param(group, marks=pytest.mark.slow) for group in (71, 128))],
    ids="g{}".format,
)
def test_large_groups_take_several_tiles(group: int) -> None:
    problem = paged_problem([(40, 1), (0, 1)], head_dim=64, group=group, kv_heads=1)
    expected = reference_attention(*problem.arguments())
    for op in (extend_attention, decode_attention):
        assert relative_error(op(*problem.arguments()), expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 1500])
def test_decode_over_many_splits_equals_the_reference(window: int) -> None:
    """Past 1024 keys the splits grow: 5000 keys are cut at 128 and at 256, 512, 1024."""
    rows = [(4999, 1), (0, 1), (1023, 1), (1024, 1), (3071, 1)]
    problem = paged_problem(rows, head_dim=64, group=2, kv_heads=1, window=window, sinks=True)
    got = decode_attention(*problem.arguments())
    assert relative_error(got, reference_attention(*problem.arguments())) <= 1e-5


def test_a_sink_far_above_every_score_has_all_the_weight() -> None:
    """By so much that 2 to the power of the difference overflows float32."""
    problem = paged_problem([(40, 1), (300, 1)], head_dim=64, group=2, kv_heads=1, sinks=True)
    assert problem.spec.sinks is not None
    problem.spec.sinks.fill_(110.0)
    assert decode_attention(*problem.arguments()).abs().max() < 1e-6


@pytest.mark.slow
def test_a_decode_row_depends_on_nothing_but_itself() -> None:
    """The same bits alone, beside other rows, and under a larger bound of the context."""
    rows = [(700, 1), (3, 1), (2100, 1), (127, 1)]
    problem = paged_problem(rows, head_dim=64, group=3)
    together = decode_attention(*problem.arguments())
    for b in range(len(rows)):
        batch = problem.batch
        alone = type(batch)(
            block_table=batch.block_table,
            rows=batch.rows[b : b + 1],
            qo_indptr=batch.qo_indptr[:2],
            kv_lens=batch.kv_lens[b : b + 1],
            page_size=batch.page_size,
            max_q_len=1,
            max_kv_len=32768,
        )
        q = problem.q[b : b + 1]
        got = decode_attention(q, problem.k_pool, problem.v_pool, alone, problem.spec)
        assert torch.equal(got[0], together[b])


def test_splits_double_after_every_eight() -> None:
    """Counted by hand: 8 of 128 end at 1024, 8 of 256 at 3072, 8 of 512 at 7168."""
    assert FIRST_SPLIT == 128
    expected = {1: 1, 128: 1, 129: 2, 1024: 8, 1025: 9, 1280: 9, 1281: 10, 3072: 16, 3073: 17}
    assert {n: num_splits(n) for n in expected} == expected
    assert [num_splits(n) for n in (7168, 32768, 131072)] == [24, 41, 57]


@pytest.mark.slow
def test_every_row_finds_a_tile_whatever_the_raggedness() -> None:
    """Many rows of one token between longer ones: the tile numbers must reach every row."""
    rows = [(0, 1)] * 9 + [(5, 70)] + [(33, 1)] * 7 + [(0, 33), (2, 32), (0, 1)]
    problem = paged_problem(rows, head_dim=64, group=3, kv_heads=1)
    got = extend_attention(*problem.arguments())
    assert relative_error(got, reference_attention(*problem.arguments())) <= 1e-5
