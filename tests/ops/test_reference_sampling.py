"""The sampler's reference and the CPU's: the random generator by its published vectors, the
distribution by chi-square against probabilities computed independently, the order by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import ops
from ops.op_set import Penalties, SamplingTensors
from ops.reference import filter_logits, philox_uniform

BACKENDS = ["reference", "cpu"]
LOGITS = [1.2, -0.3, 0.8, 0.8, -2.0, 2.1, 0.0, 0.5, -1.0, 1.9, -3.0, 0.1]
DRAWS = 20_000


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in plain integers (Salmon et al., SC 2011, section 3.3)."""
    c, k, low = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & low, (a >> 32) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_plain_philox_gives_the_published_vectors(
    counter: list[int], key: list[int], words: str
) -> None:
    """The known answers of the Random123 distribution (kat_vectors)."""
    assert philox4x32(counter, key) == [int(word, 16) for word in words.split()]


@pytest.mark.parametrize(
    ("seed", "position"),
    [
        (0, 0),
        (1, 0),
        (0, 1),
        (2**32 + 5, 7),
        (2**63 - 1, 2**31 + 3),
        (-1, 2**33 + 1),
        (-(2**63), 9),
    ],
)
def test_uniforms_are_those_of_philox(seed: int, position: int) -> None:
    vocab = 103
    got = philox_uniform(torch.tensor([seed]), torch.tensor([position]), vocab)
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    words: list[int] = []
    for group in range(math.ceil(vocab / 4)):
        counter = [group, position & 0xFFFFFFFF, (position >> 32) & 0xFFFFFFFF, 0]
        words += philox4x32(counter, key)
    want = [((word >> 9) + 0.5) / 2**23 for word in words[:vocab]]
    assert got.tolist() == [want]
    assert got.min() > 0
    assert got.max() < 1


def test_no_random_word_makes_the_noise_infinite() -> None:
    """With one bit more, the largest word would round to 1: noise that beats every logit."""
    for word in (0, 2**32 - 1):
        uniform = torch.tensor([word >> 9]).float().add(0.5).mul(2.0**-23)
        assert (-torch.log(-torch.log(uniform))).isfinite().all()


def tensors(rows: int, **given: Any) -> SamplingTensors:
    """Parameters of `rows` rows that differ only in their position."""
    fields: dict[str, Any] = {
        "temperature": torch.full((rows,), float(given.pop("temperature", 1.0))),
        "top_k": torch.full((rows,), given.pop("top_k", 0), dtype=torch.int32),
        "top_p": torch.full((rows,), float(given.pop("top_p", 1.0))),
        "min_p": torch.full((rows,), float(given.pop("min_p", 0.0))),
        "seed": torch.full((rows,), given.pop("seed", 11), dtype=torch.int64),
        "position": torch.arange(rows),
    }
    fields["all_greedy"] = not bool((fields["temperature"] > 0).any())
    fields["any_filter"] = bool(
        (fields["top_k"] > 0).any() or (fields["top_p"] < 1).any() or (fields["min_p"] > 0).any()
    )
    return SamplingTensors(**{**fields, **given})


def penalties(
    rows: int,
    *,
    prompt: list[int],
    outputs: list[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> Penalties:
    counts = torch.zeros(rows, len(LOGITS), dtype=torch.int32)
    mask = torch.zeros(rows, len(LOGITS), dtype=torch.bool)
    for token in outputs:
        counts[:, token] += 1
    mask[:, prompt] = True
    return Penalties(
        state_rows=torch.arange(rows, dtype=torch.int32),
        repetition=torch.full((rows,), repetition),
        presence=torch.full((rows,), presence),
        frequency=torch.full((rows,), frequency),
        prompt_mask=mask,
        output_counts=counts,
    )


def exact(
    logits: list[float],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """The probabilities after the filters, by their definitions, in float64."""
    x = np.array(logits) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda t: (-p[t], t))
    kept = order[: top_k or len(order)]
    p = np.where(np.isin(np.arange(len(p)), kept), p, 0)
    p /= p.sum()
    total = 0.0
    nucleus: list[int] = []
    for token in kept:
        if nucleus and total >= top_p:
            break
        nucleus.append(token)
        total += p[token]
    p = np.where(np.isin(np.arange(len(p)), nucleus) & (p >= min_p * p.max()), p, 0)
    return p / p.sum()


def assert_distribution(token_ids: torch.Tensor, probabilities: np.ndarray) -> None:
    counts = np.bincount(token_ids.numpy(), minlength=len(probabilities))
    possible = probabilities > 0
    assert not counts[~possible].any(), "a token was sampled that cannot be"
    if possible.sum() > 1:
        expected = probabilities[possible] * counts.sum()
        assert stats.chisquare(counts[possible], expected).pvalue > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 1, "temperature": 2.0},
        {"top_k": 3},
        {"top_k": 5},  # cuts between two equal logits: the lower id stays
        {"top_k": 99},
        {"top_p": 0.6},
        {"top_p": 0.05},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.8, "min_p": 0.1},
    ],
    ids=str,
)
@pytest.mark.sampled(8)
def test_draws_follow_the_exact_probabilities(backend: str, filters: dict[str, Any]) -> None:
    logits = torch.tensor([LOGITS]).repeat(DRAWS, 1)
    got = ops.load(backend).sample(logits, tensors(DRAWS, **filters))
    assert_distribution(got, exact(LOGITS, **filters))


@pytest.mark.parametrize(("top_p", "kept"), [(0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: int) -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    left = filter_logits(logits, tensors(1, top_p=top_p)) > -math.inf
    assert left[0].nonzero().flatten().tolist() == sorted([1, 2, 0][:kept])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_penalties_bans_and_mask_change_the_distribution_in_that_order(backend: str) -> None:
    rows = DRAWS
    bias = (torch.arange(rows), torch.full((rows,), 4), torch.full((rows,), 3.5))
    banned = (torch.arange(rows), torch.full((rows,), 5))
    bits = 0b0111_1111_1111  # all but token 11
    s = tensors(
        rows,
        temperature=0.8,
        bias=bias,
        penalties=penalties(
            rows, prompt=[0, 4], outputs=[9, 9, 2], repetition=1.5, presence=0.3, frequency=0.2
        ),
        banned=banned,
        mask_rows=torch.arange(rows),
        mask_bits=torch.full((rows, 1), bits, dtype=torch.int32),
    )
    adjusted = list(LOGITS)
    adjusted[4] += 3.5
    for token in (0, 4, 9, 2):  # the bias made token 4 positive before it is divided
        adjusted[token] = adjusted[token] / 1.5 if adjusted[token] > 0 else adjusted[token] * 1.5
    adjusted[9] -= 0.3 + 2 * 0.2
    adjusted[2] -= 0.3 + 0.2
    adjusted[5] = adjusted[11] = -math.inf
    got = ops.load(backend).sample(torch.tensor([LOGITS]).repeat(rows, 1), s)
    assert_distribution(got, exact(adjusted, temperature=0.8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_penalties_count_prompt_and_output_as_published(backend: str) -> None:
    """Presence and frequency see outputs alone, repetition sees both, each token once."""
    on: dict[str, Any] = {"prompt": [5, 5, 7], "outputs": [9]}
    logits = torch.tensor([[2.0] * 12])
    logits[0, 7] = -2.0
    sampler = ops.load(backend)

    def best_after(index: int, **amounts: Any) -> int:
        """The token chosen when all but two are banned and penalties act on the first."""
        p = penalties(1, **on, **{"repetition": 1.0, "presence": 0.0, "frequency": 0.0, **amounts})
        others = [t for t in range(12) if t not in (index, 0)]
        banned = (torch.zeros(len(others), dtype=torch.int64), torch.tensor(others))
        row = logits.clone()
        row[0, 0] = row[0, index] - 0.5
        return int(sampler.sample(row, tensors(1, temperature=0, penalties=p, banned=banned))[0])

    for token, repetition, presence in ((5, 0, 5), (7, 0, 7), (9, 0, 0), (3, 3, 3)):
        assert best_after(token, repetition=2.0) == repetition
        assert best_after(token, presence=1.0) == presence
        assert best_after(token, frequency=1.0) == presence


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_choice_is_counted_once(backend: str) -> None:
    p = penalties(2, prompt=[], outputs=[], repetition=1.0, presence=0.0, frequency=1.0)
    p.state_rows = torch.tensor([-1, 1], dtype=torch.int32)
    logits = torch.tensor([LOGITS, LOGITS])
    got = ops.load(backend).sample(logits, tensors(2, temperature=0, penalties=p))
    assert got.tolist() == [5, 5]
    assert p.output_counts[0].sum() == 0
    assert p.output_counts[1].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_a_token_gives_minus_one_and_leaves_its_neighbours_alone(
    backend: str,
) -> None:
    logits = torch.tensor([LOGITS] * 5)
    logits[1, 3] = math.nan
    logits[2] = -math.inf
    bits = torch.zeros(1, 1, dtype=torch.int32)
    for temperature in (0.0, 0.0001):
        s = tensors(5, temperature=temperature, mask_rows=torch.tensor([3]), mask_bits=bits)
        assert ops.load(backend).sample(logits.clone(), s).tolist() == [5, -1, -1, -1, 5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_takes_the_lowest_id_among_equals(backend: str) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    s = tensors(2, temperature=0)
    assert ops.load(backend).sample(logits, s).tolist() == [1, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draw_depends_on_seed_and_position_alone(backend: str) -> None:
    """Neither the row nor its neighbours matter; greedy rows may stand beside random ones."""
    sampler = ops.load(backend)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 500, generator=generator)
    s = tensors(64, temperature=1.3, top_p=0.9)
    s.temperature[::3] = 0
    s.seed = torch.randint(-(2**62), 2**62, (64,), generator=generator)
    together = sampler.sample(logits.clone(), s)
    order = torch.randperm(64, generator=generator)
    shuffled = SamplingTensors(
        s.temperature[order],
        s.top_k[order],
        s.top_p[order],
        s.min_p[order],
        s.seed[order],
        s.position[order],
        all_greedy=False,
        any_filter=True,
    )
    assert torch.equal(sampler.sample(logits[order].clone(), shuffled), together[order])
    assert torch.equal(together[::3], logits[::3].argmax(-1))
    assert len(set(together.tolist())) > 20
