"""The budgets of one step, against worked examples."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from runtime.errors import ConfigError
from runtime.request import Request, RequestRecord
from runtime.scheduling.accounting import BlockingTerm
from runtime.scheduling.prefill_adder import PrefillAdder, StepLoad, Verdict
from runtime.scheduling.radix_cache import NO_MATCH, PrefixMatch
from runtime.scheduling.radix_tree import Node
from tests.runtime.scheduling.scheduler_harness import config, request


class FakeMemory:
    """A pool with this many tokens available, some of them on a prefix that a lock takes out."""

    def __init__(self, available: int, prefix_tokens: int = 0) -> None:
        self.available_tokens = available
        self.prefix_tokens = prefix_tokens

    def lock(self, node: Node | None) -> None:
        self.available_tokens -= self.prefix_tokens if node else 0

    def unlock(self, node: Node | None) -> None:
        self.available_tokens += self.prefix_tokens if node else 0


def waiting(tokens: int, max_new: int, **sampling: Any) -> Request:
    made = request("w", tokens, max_new, **sampling)
    made.max_new_tokens = max_new
    made.scheduling = RequestRecord(seq=0, stop_ids=frozenset(), target=tokens)
    return made


def decoding(max_new: int, out: int, tokens: int = 10, **sampling: Any) -> Request:
    made = waiting(tokens, max_new, **sampling)
    made.launched_tokens = out
    made.length = tokens + out - 1
    made.pages = array("i", range(made.length))
    return made


def adder(
    available: int = 100_000,
    running: list[Request] | None = None,
    *,
    mixed: int = 0,
    mixed_page_tokens: int = 0,
    ratio: float = 0.7,
    chunk: int | None = 4096,
    memory: FakeMemory | None = None,
    **options: Any,
) -> PrefillAdder:
    return PrefillAdder(
        config(**options),
        memory or FakeMemory(available),
        StepLoad(mixed, mixed_page_tokens, running or [], ratio),
        chunk,
    )


def test_forecast_refuses_what_would_not_fit_and_admits_what_does() -> None:
    running = [decoding(100, 20), decoding(100, 20)]
    step = adder(1000, running)
    assert step.taken_total == 112
    assert step.left_total == 888
    assert step.add(waiting(300, 600), NO_MATCH) is Verdict.NO_TOKEN
    assert step.term is BlockingTerm.KV_TOTAL
    assert not step.admitted
    assert step.add(waiting(200, 600), NO_MATCH) is Verdict.CONTINUE
    assert (step.left_total, step.left_step) == (87, 799)


def test_mixed_rows_count_one_token_each_in_the_forecast() -> None:
    running = [decoding(100, 20), decoding(100, 20)]
    assert adder(1000, running, mixed=2, mixed_page_tokens=2).taken_total == 114


def test_a_need_equal_to_what_remains_is_refused() -> None:
    # 100 input + 50 output + 1 page
    assert adder(151).add(waiting(100, 50), NO_MATCH) is Verdict.NO_TOKEN
    step = adder(152)
    step.add(waiting(100, 50), NO_MATCH)
    assert len(step.admitted) == 1


def test_a_prompt_as_long_as_the_chunk_is_admitted_whole_and_closes_the_step() -> None:
    step = adder(chunk=4096, page_size=16)
    assert step.add(waiting(4096, 4), NO_MATCH) is Verdict.OTHER
    assert step.term is BlockingTerm.CHUNK_BUDGET
    assert step.admitted[0].last
    assert step.chunked is None


def chunks_of(prompt: int, rows: int, **options: Any) -> list[int]:
    """Chunk lengths of one prompt, `rows` decode rows riding along in each step."""
    made = waiting(prompt, 4)
    running = [decoding(100, 20) for _ in range(rows)]
    sizes: list[int] = []
    while made.length < prompt:
        step = adder(running=running, mixed=rows, **options)
        if made.length:
            step.add_chunked(made)
        else:
            step.add(made, NO_MATCH)
        sizes.append(step.admitted[0].tokens)
        made.length += sizes[-1]
        assert (step.chunked is None) == (made.length == prompt)
    return sizes


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        (0, {"page_size": 1, "chunk": 4096}, [4096, 4096, 1808]),
        (3, {"page_size": 16, "chunk": 4096}, [4080, 4093, 1827]),
    ],
    ids=["alone", "three decode rows, pages of 16"],
)
def test_chunks_of_a_10_000_token_prompt(
    rows: int, options: dict[str, Any], expected: list[int]
) -> None:
    assert chunks_of(10_000, rows, **options) == expected


@pytest.mark.parametrize("rows", [64, 80])
def test_decode_rows_never_take_the_whole_chunk(rows: int) -> None:
    running = [decoding(100, 20) for _ in range(rows)]
    step = adder(running=running, mixed=rows, chunk=64, page_size=16)
    assert step.left_chunk == 16


def test_a_new_prompt_is_cut_at_a_page() -> None:
    step = adder(running=[decoding(100, 20)], mixed=1, chunk=64, page_size=32)
    assert step.left_chunk == 63
    step.add(waiting(1000, 4), NO_MATCH)
    assert step.admitted[0].tokens == 32


def test_a_chunk_below_two_pages_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"64 with page_size 64.*128"):
        config(page_size=64, chunked_prefill_size=64, capacity_tokens=6400)


def test_the_lock_on_a_prefix_takes_it_out_of_what_is_available() -> None:
    # 60 of the 160 available tokens are the prefix itself: 100 + 20 + 1 do not fit the rest.
    node = Node(None, 0, bytearray(), array("i"))
    memory = FakeMemory(160, prefix_tokens=60)
    step = adder(memory=memory)
    match = PrefixMatch(60, node)
    assert step.add(waiting(160, 20), match) is Verdict.NO_TOKEN
    assert not step.admitted
    assert memory.available_tokens == 160, "the lock of a refused request is dropped"


def test_pages_of_this_step_are_kept_for_the_decode_rows() -> None:
    # The forecast for rows about to end is small; their new pages in this step are not.
    running = [decoding(20, 19) for _ in range(10)]
    step = adder(
        1280,
        running,
        mixed=10,
        mixed_page_tokens=640,
        ratio=0.1,
        page_size=64,
        chunked_prefill_size=4096,
        capacity_tokens=6400,
    )
    assert step.add(waiting(700, 1), NO_MATCH) is Verdict.NO_TOKEN
    assert step.term is BlockingTerm.KV_STEP
    assert not step.admitted


def test_without_chunking_the_first_prompt_always_gets_in() -> None:
    step = adder(chunk=None, max_prefill_tokens=100)
    assert step.add(waiting(500, 4), NO_MATCH) is Verdict.OTHER
    assert step.admitted[0].last
    step = adder(chunk=None, max_prefill_tokens=600)
    assert step.add(waiting(500, 4), NO_MATCH) is Verdict.CONTINUE
    assert step.add(waiting(100, 4), NO_MATCH) is Verdict.OTHER
    assert step.term is BlockingTerm.INPUT_BUDGET
    assert len(step.admitted) == 1


def test_request_cap_of_a_step() -> None:
    step = adder(max_prefill_requests=1)
    assert step.add(waiting(10, 4), NO_MATCH) is Verdict.CONTINUE
    assert step.add(waiting(10, 4), NO_MATCH) is Verdict.OTHER
    assert step.term is BlockingTerm.POLICY


def test_aligned_cuts_end_at_multiples_wherever_the_prompt_begins() -> None:
    step = adder(chunk=100, page_size=1, truncation_align_size=64)
    step.add(waiting(1000, 4), NO_MATCH)
    assert step.admitted[0].tokens == 64
    step = adder(chunk=100, page_size=1, truncation_align_size=64)
    step.add(waiting(1000, 4), PrefixMatch(50, None))
    assert (step.admitted[0].start, step.admitted[0].tokens) == (50, 128 - 50)


def test_a_size_below_the_alignment_is_raised_to_it_for_the_first_prompt_of_a_step() -> None:
    step = adder(chunk=100, page_size=1, truncation_align_size=128, chunked_prefill_size=128)
    assert step.add(waiting(1000, 4), NO_MATCH) is Verdict.OTHER
    assert step.admitted[0].tokens == 128
    step = adder(chunk=100, page_size=1, truncation_align_size=128, chunked_prefill_size=128)
    step.add(waiting(10, 4), NO_MATCH)
    assert step.add(waiting(1000, 4), NO_MATCH) is Verdict.OTHER
    assert step.term is BlockingTerm.CHUNK_BUDGET
    assert len(step.admitted) == 1


def test_what_an_aligned_cut_leaves_of_the_chunk_takes_whole_prompts_only() -> None:
    pending = waiting(500, 4)
    pending.length = 64
    for first in ("pending", "cut"):
        step = adder(chunk=100, page_size=1, truncation_align_size=64)
        if first == "pending":
            step.add_chunked(pending)
        else:
            assert step.add(waiting(1000, 4), NO_MATCH) is Verdict.CONTINUE
        assert (step.admitted[0].tokens, step.left_chunk) == (64, 36)
        assert step.add(waiting(1000, 4), PrefixMatch(50, None)) is Verdict.OTHER
        assert len(step.admitted) == 1
        assert step.add(waiting(30, 4), NO_MATCH) is Verdict.CONTINUE
        assert len(step.admitted) == 2


def test_an_aligned_chunk_that_no_memory_reaches_waits() -> None:
    made = waiting(500, 4)
    made.length = 64
    step = adder(63, page_size=1, truncation_align_size=64)
    step.add_chunked(made)
    assert not step.admitted
    assert step.term is BlockingTerm.KV_STEP
    step = adder(64, page_size=1, truncation_align_size=64)
    step.add_chunked(made)
    assert step.admitted[0].tokens == 64


def test_outputs_beyond_the_clip_are_not_reserved() -> None:
    step = adder(1000, clip_max_new_tokens=100)
    step.add(waiting(50, 4000), NO_MATCH)
    assert step.left_total == 1000 - 50 - 100 - 1


def test_only_the_last_chunk_reserves_decode_tokens() -> None:
    step = adder(10_000, chunk=64)
    step.add(waiting(100, 500), NO_MATCH)
    assert step.left_total == 10_000 - 64 - 1


def test_a_pending_chunk_takes_what_is_really_free_and_waits_with_nothing() -> None:
    made = waiting(500, 4)
    made.length = 64
    step = adder(40)
    step.add_chunked(made)
    assert step.admitted[0].tokens == 40
    step = adder(0)
    step.add_chunked(made)
    assert not step.admitted
    assert step.chunked is made
    assert step.term is BlockingTerm.KV_STEP


class TestMostPrefillTokens:
    """max_prefill_tokens bounds a step also where prompts are cut."""

    @pytest.mark.parametrize("mixed", [0, 8, 300])
    def test_a_long_prompt_is_cut_by_it(self, mixed: int) -> None:
        step = adder(chunk=4096, mixed=mixed, page_size=16, max_prefill_tokens=256)
        step.add(waiting(10_000, 4), NO_MATCH)
        # 256 - 8 in whole pages; however many rows there are, a quarter of it is left.
        assert step.admitted[0].tokens == {0: 256, 8: 240, 300: 64}[mixed]
        assert step.add(waiting(20, 4), NO_MATCH) is Verdict.OTHER
        assert len(step.admitted) == 1

    def test_a_pending_chunk_is_cut_by_it(self) -> None:
        step = adder(chunk=4096, max_prefill_tokens=256)
        long = waiting(10_000, 4)
        long.length = 100
        step.add_chunked(long)
        assert step.admitted[0].tokens == 256

    def test_short_prompts_together_stay_within_it(self) -> None:
        step = adder(chunk=4096, max_prefill_tokens=256)
        for _ in range(3):
            step.add(waiting(100, 4), NO_MATCH)
        assert [item.tokens for item in step.admitted] == [100, 100, 56]
        assert step.term is BlockingTerm.INPUT_BUDGET

    def test_a_size_chosen_for_a_latency_target_is_cut_by_it(self) -> None:
        made = config(max_prefill_tokens=256, page_size=16)
        load = StepLoad(8, 0, [], 0.7)
        step = PrefillAdder(made, FakeMemory(100_000), load, 1024, exact_chunk=True)
        step.add(waiting(10_000, 4), NO_MATCH)
        assert step.admitted[0].tokens == 240

    def test_less_than_a_page_is_refused_where_prompts_are_cut(self) -> None:
        with pytest.raises(ConfigError, match=r"max_prefill_tokens 8.*at least a page \(16\)"):
            config(max_prefill_tokens=8, page_size=16)
        assert config(max_prefill_tokens=8, page_size=16, chunked_prefill_size=0)


@pytest.mark.parametrize(("available", "taken"), [(932, 0), (933, 20)])
def test_who_goes_ahead_leaves_the_pending_chunk_more_than_it_needs(
    available: int, taken: int
) -> None:
    """As everywhere, equality refuses: 20 + 10 + 1 tokens for the one, 800 + 100 + 1 for the other."""
    chunked = waiting(1000, 100)
    chunked.length = 200
    step = adder(available, chunk=64)
    assert step.add_ahead(waiting(20, 10), NO_MATCH, chunked, 64.0, 64) == taken


@pytest.mark.parametrize(("available", "fits"), [(151, False), (152, True)])
def test_a_request_of_known_length_needs_more_than_a_token_beside_all_that_it_holds(
    available: int, fits: bool
) -> None:
    step = adder(available, disable_radix_cache=True)
    step.add(waiting(100, 50, ignore_eos=True), NO_MATCH)
    assert bool(step.admitted) == fits


@pytest.mark.parametrize(("rows", "left"), [(8, 92), (99, 16), (200, 16)])
def test_decode_rows_take_their_share_also_where_prompts_are_not_cut(rows: int, left: int) -> None:
    step = adder(chunk=None, mixed=rows, max_prefill_tokens=100, page_size=16)
    assert step.left_input == left
