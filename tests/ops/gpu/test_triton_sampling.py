"""The Triton sampler against the reference: same tokens, since the random numbers are the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from ops import reference
from ops.gpu import filtered_draw
from ops.gpu.sampling import sample
from ops.op_set import Penalties, SamplingTensors
from tests.ops.gpu.launches import recorded_launches

VOCAB = 1003  # not a multiple of 4, of 32 or of a tile
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a function takes the interpreter a millisecond, however many tokens it is of."""
    monkeypatch.setattr(filtered_draw, "BLOCK", 1024)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_logits(
    rows: int, vocab: int = VOCAB, *, step: float = 0.0, seed: int = 0
) -> torch.Tensor:
    """step > 0 rounds to its multiples, which makes many ties."""
    logits = torch.randn(rows, vocab, generator=generator(seed)) * 3
    return (logits / step).round() * step if step else logits


def tensors(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> SamplingTensors:
    """Seeds and positions that use all 64 bits, negative seeds among them."""
    draws = generator(seed + 100)
    return SamplingTensors(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=draws),
        position=torch.randint(0, 2**40, (rows,), generator=draws),
        all_greedy=temperature == 0,
        any_filter=top_k > 0 or top_p < 1 or min_p > 0,
    )


def check_agreement(logits: torch.Tensor, s: SamplingTensors) -> torch.Tensor:
    """Samples with both, on copies of everything that they change; the common tokens."""
    other = s
    if s.penalties is not None:
        counts = s.penalties.output_counts.clone()
        other = replace(s, penalties=replace(s.penalties, output_counts=counts))
    expected = reference.sample(logits.clone(), other)
    got = sample(logits.clone(), s)
    assert got.dtype == torch.int64
    assert got.tolist() == expected.tolist()
    if s.penalties is not None and other.penalties is not None:
        assert torch.equal(s.penalties.output_counts, other.penalties.output_counts)
    return got


@pytest.mark.parametrize("step", [0.0, 0.5, 3.0], ids=["distinct", "ties", "many-ties"])
def test_greedy_takes_the_largest_and_the_lowest_id_among_equals(step: float) -> None:
    check_agreement(random_logits(16, step=step), tensors(16, temperature=0.0))
    logits = torch.zeros(2, VOCAB)
    logits[1, [900, 41, 42]] = 1.0
    assert sample(logits, tensors(2, temperature=0.0)).tolist() == [0, 41]


def test_equal_logits_show_the_generators_integers() -> None:
    """With equal logits the token is the largest uniform number's: any other bit would show. Tokens
    past 4096 come from a second tile."""
    s = tensors(8)
    chosen = check_agreement(torch.zeros(8, 9001), s)
    uniform = reference.philox_uniform(s.seed, s.position, 9001)
    assert chosen.tolist() == uniform.argmax(-1).tolist()


FILTERS = list(product([0, 1, 20, VOCAB], [1.0, 0.9, 0.3], [0.0, 0.2]))[1:]


@pytest.mark.slow
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize("step", [0.0, 1.0], ids=["distinct", "ties"])
def test_filters_and_their_ties(step: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(2, step=step, seed=top_k)
    check_agreement(logits, tensors(2, temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p))


@pytest.mark.slow
def test_filters_differ_by_row() -> None:
    """Greedy, plain, and each filter side by side, over three slices."""
    s = tensors(6, top_k=1)
    s.temperature = torch.tensor([0.0, 0.7, 1.0, 1.0, 2.0, 0.5])
    s.top_k = torch.tensor([0, 0, 4000, 0, 3, 50], dtype=torch.int32)
    s.top_p = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.99, 0.8])
    s.min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.1])
    check_agreement(random_logits(6, 5001), s)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0.0, 1.0], ids=["distinct", "ties"])
def test_slices_of_any_size_give_the_same_tokens(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thresholds and ties in several slices, the last of them short; sums are exact in any order,
    so not a bit depends on how a row is cut."""
    logits, s = random_logits(2, step=step), tensors(2, temperature=0.8, top_k=60, top_p=0.95)
    whole = check_agreement(logits, s)
    monkeypatch.setattr(filtered_draw, "BLOCK", 256)
    monkeypatch.setattr(filtered_draw, "SLICE", 512)
    assert check_agreement(logits, s).tolist() == whole.tolist()


@pytest.mark.parametrize("rows", [1, 7])
def test_launches_do_not_depend_on_what_the_rows_ask_for(rows: int) -> None:
    """One for the largest logits, seven histograms, ties, draw, end: 8 bits a pass."""
    for options in ({"top_k": 5}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.1}):
        with recorded_launches() as launched:
            sample(random_logits(rows), tensors(rows, **options))
        names = [kernel.name for kernel in launched]
        assert names == [
            "_top_kernel",
            *["_histogram_kernel"] * 7,
            "_ties_kernel",
            "_draw_kernel",
            "_finish_kernel",
        ]
        assert len(set(launched)) == 5, "one kernel for all seven histograms"


@pytest.mark.slow
def test_ties_at_the_threshold_are_kept_by_id() -> None:
    """Ten equal logits and top-k 3: only ids 5, 6 and 7 can come. The same where top-p cuts."""
    logits = torch.full((12, 64), -5.0)
    logits[:, 5:15] = 1.0
    by_count = check_agreement(logits, tensors(12, top_k=3))
    assert set(by_count.tolist()) == {5, 6, 7}
    logits[:, :5] = logits[:, 15:] = -INF
    by_mass = check_agreement(logits, tensors(12, top_p=0.25))
    assert set(by_mass.tolist()) == {5, 6, 7}


def test_top_p_of_zero_keeps_the_first_token() -> None:
    chosen = check_agreement(random_logits(4, step=2.0), tensors(4, top_p=0.0))
    assert chosen.tolist() == random_logits(4, step=2.0).argmax(-1).tolist()


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits, s = random_logits(5), tensors(5, top_k=30, top_p=0.8)
    together = sample(logits.clone(), s)
    for i in range(5):
        parts = {
            name: getattr(s, name)[i : i + 1]
            for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position")
        }
        assert sample(logits[i : i + 1].clone(), replace(s, **parts)).item() == together[i]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "random"])
@pytest.mark.parametrize("top_k", [0, 5])
def test_rows_without_a_token_give_minus_one(temperature: float, top_k: int) -> None:
    logits = random_logits(4)
    logits[0, 7] = NAN
    logits[2] = -INF
    logits[3] = -INF
    logits[3, 11] = -50.0
    got = check_agreement(logits, tensors(4, temperature=temperature, top_k=top_k))
    assert got[0] == got[2] == -1
    assert got[3] == 11


def test_bias_bans_and_masks() -> None:
    """A pair that is named twice is added twice; a mask of some rows only; words past the end."""
    logits = random_logits(4)
    s = tensors(4, temperature=0.0)
    s.bias = (
        torch.tensor([0, 0, 1, 3]),
        torch.tensor([17, 17, VOCAB - 1, 0]),
        torch.tensor([50.0, 50.0, 100.0, -100.0]),
    )
    s.banned = (torch.tensor([2, 2]), logits[2].topk(2).indices)
    allowed = torch.randperm(VOCAB, generator=generator(5))[:10]
    bits = torch.zeros(2, (VOCAB + 31) // 32, dtype=torch.int64)
    for token in allowed.tolist():
        bits[0, token // 32] |= 1 << (token % 32)
    s.mask_rows = torch.tensor([3, 2])
    s.mask_bits = torch.where(bits >= 2**31, bits - 2**32, bits).int()
    got = check_agreement(logits, s)
    assert got[:2].tolist() == [17, VOCAB - 1]
    assert got[3] in allowed
    assert got[2] == -1  # its mask allows nothing


def penalties(rows: int) -> Penalties:
    """Rows 0, 2, 4 … have a state, in reverse order; two states belong to nobody."""
    states = rows + 2
    return Penalties(
        state_rows=torch.tensor([rows - i if i % 2 == 0 else -1 for i in range(rows)]).int(),
        repetition=torch.tensor([1.0, 1.3, 0.8, 2.0]).repeat(rows)[:rows],
        presence=torch.tensor([0.0, 0.5, -0.7]).repeat(rows)[:rows],
        frequency=torch.tensor([0.4, -0.2]).repeat(rows)[:rows],
        prompt_mask=torch.rand(states, VOCAB, generator=generator(7)) < 0.2,
        output_counts=torch.randint(0, 4, (states, VOCAB), generator=generator(8)).int(),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "random"])
def test_penalties_and_their_counts(temperature: float) -> None:
    """Several steps in a row, so that a step sees the counts of the one before."""
    s = tensors(7, temperature=temperature)
    s.penalties = penalties(7)
    before = s.penalties.output_counts.sum()
    for step in range(3):
        logits = random_logits(7, seed=step)
        logits[4, 0] = NAN  # its state must not count a -1
        check_agreement(logits, s)
    assert s.penalties.output_counts.sum() - before == 3 * 3


@pytest.mark.slow
def test_all_steps_together_keep_their_order() -> None:
    s = tensors(6, temperature=1.1, top_k=40, top_p=0.9, min_p=0.01)
    s.penalties = penalties(6)
    s.bias = (torch.tensor([0, 5]), torch.tensor([3, 4]), torch.tensor([4.0, -4.0]))
    s.banned = (torch.tensor([1]), torch.tensor([9]))
    s.mask_rows = torch.tensor([2])
    s.mask_bits = torch.full((1, (VOCAB + 31) // 32), 0x55555555, dtype=torch.int32)
    check_agreement(random_logits(6, step=0.25), s)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"top_k": 9, "min_p": 0.05}], ids=str
)
@pytest.mark.parametrize("penalised", [False, True], ids=["plain", "penalties"])
@pytest.mark.sampled(2)
def test_bfloat16_logits_give_the_tokens_of_their_float32_values(
    options: dict, penalised: bool
) -> None:
    """And stay as they are: a captured step's output."""
    narrow = random_logits(5).bfloat16()
    s = tensors(5, **options)
    if penalised:
        s.penalties = penalties(5)
    kept = narrow.clone()
    expected = check_agreement(narrow.float(), s)
    if penalised:
        s.penalties = penalties(5)
    assert torch.equal(check_agreement(narrow, s), expected)
    sample(narrow, s)
    assert torch.equal(narrow, kept)


def test_logits_with_a_row_stride() -> None:
    """A replayed step's logits are a view into a wider buffer."""
    wide = random_logits(4, VOCAB + 29)
    s = tensors(4, top_k=9)
    expected = reference.sample(wide[:, :VOCAB].clone(), s)
    assert sample(wide[:, :VOCAB], s).tolist() == expected.tolist()


def test_an_infinite_logit_never_gives_an_id_outside_of_the_vocabulary() -> None:
    logits = random_logits(2)
    logits[:, 77] = INF
    assert sample(logits.clone(), tensors(2, temperature=0.0)).tolist() == [77, 77]
    assert sample(logits.clone(), tensors(2)).tolist() == [77, 77]
