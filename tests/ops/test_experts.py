"""Routing and experts: the reference against transformers, every backend against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from ops import load
from ops.op_set import Routing
from ops.reference import ReferenceOps, route
from tests.ops.cpu.conftest import best  # noqa: F401  (a fixture)

if TYPE_CHECKING:
    from torch import Tensor

    from ops.op_set import OpSet

HIDDEN, INNER, EXPERTS, TOP_K = 48, 32, 8, 3
REFERENCE = ReferenceOps()

pytestmark = [
    # exp(-x) of a very negative gate is inf, and x / inf the right 0.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    gate_up = randn(EXPERTS, 2 * INNER, HIDDEN, seed=1) * HIDDEN**-0.5
    down = randn(EXPERTS, HIDDEN, INNER, seed=2) * INNER**-0.5
    return list(zip(gate_up.to(dtype), down.to(dtype), strict=True))


def problem(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights of some tokens; no token goes through expert 5."""
    logits = randn(tokens, EXPERTS, seed=3)
    logits[:, 5] = -100.0
    return randn(tokens, HIDDEN, seed=4).to(dtype), *route(logits, Routing(TOP_K, True))


@pytest.mark.parametrize("renormalise", [True, False])
def test_routing_equals_qwen3(renormalise: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=renormalise,
    )
    router = Qwen3MoeTopKRouter(config)
    x = randn(40, HIDDEN)
    with torch.no_grad():
        router.weight.copy_(randn(EXPERTS, HIDDEN, seed=1))
        logits, want_weights, want_ids = router(x)
    ids, got = route(logits, Routing(TOP_K, renormalise))
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(got, want_weights)


def test_routing_equals_mixtral() -> None:
    config = MixtralConfig(hidden_size=HIDDEN, num_local_experts=4, num_experts_per_tok=2)
    router = MixtralTopKRouter(config)
    with torch.no_grad():
        router.weight.copy_(randn(4, HIDDEN, seed=1))
        logits, want_weights, want_ids = router(randn(40, HIDDEN))
    ids, got = route(logits, Routing(2, True))
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(got, want_weights)


def test_among_equal_experts_the_lower_id_is_chosen() -> None:
    ids, got = route(torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]), Routing(2, True))
    assert ids.tolist() == [[1, 2]]
    assert got.tolist() == [[0.5, 0.5]]


def test_the_reference_equals_qwen3() -> None:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, moe_intermediate_size=INNER)
    config._experts_implementation = "eager"
    theirs = Qwen3MoeExperts(config)
    gate_up, down = (torch.stack(part) for part in zip(*weights(), strict=True))
    x, ids, factors = problem(20)
    with torch.no_grad():
        theirs.gate_up_proj.copy_(gate_up)
        theirs.down_proj.copy_(down)
        want = theirs(x, ids, factors)
    got = REFERENCE.run_experts(x, ids, factors, REFERENCE.pack_experts(weights()), "silu")
    torch.testing.assert_close(got, want)


@pytest.fixture(params=["cpu", "gpu", "native"])
def ops(request: pytest.FixtureRequest) -> OpSet:
    if request.param == "native":
        return request.getfixturevalue("best")
    return load(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("tokens", "activation"), [(1, "silu"), (2, "gelu"), (9, "gelu_tanh")])
def test_experts_equal_the_reference(
    ops: OpSet, tokens: int, activation: str, dtype: torch.dtype
) -> None:
    x, ids, factors = problem(tokens, dtype)
    got = ops.run_experts(x, ids, factors, ops.pack_experts(weights(dtype)), activation)
    # In float32 of the same rounded weights: nothing rounded between the layers.
    exact = REFERENCE.pack_experts([(a.float(), b.float()) for a, b in weights(dtype)])
    want = REFERENCE.run_experts(x.float(), ids, factors, exact, activation)
    assert got.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    assert float((got.float() - want).abs().max()) <= tolerance * float(want.abs().max())


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_token_is_the_same_alone_to_the_bit_on_native_kernels(
    best: Any,  # noqa: F811
    dtype: torch.dtype,
    quantization: str | None,
) -> None:
    packed = best.pack_experts(weights(dtype), quantization=quantization)
    x, ids, factors = problem(33, dtype)
    together = best.run_experts(x, ids, factors, packed, "silu")
    for some in (slice(0, 1), slice(7, 9), slice(20, 33)):
        alone = best.run_experts(x[some], ids[some], factors[some], packed, "silu")
        assert torch.equal(alone, together[some])


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_token_is_nearly_the_same_alone_elsewhere(backend: str) -> None:
    """A matrix product may sum in another order for other numbers of rows."""
    ops = load(backend)
    packed = ops.pack_experts(weights())
    x, ids, factors = problem(9)
    together = ops.run_experts(x, ids, factors, packed, "silu")
    for t in range(9):
        alone = ops.run_experts(x[t : t + 1], ids[t : t + 1], factors[t : t + 1], packed, "silu")
        torch.testing.assert_close(alone[0], together[t], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_an_expert_that_overflows_on_foreign_tokens_harms_none(backend: str) -> None:
    ops, broken = load(backend), weights()
    broken[5][1].fill_(float("inf"))  # the expert that no token goes through
    x, ids, factors = problem(9)
    got = ops.run_experts(x, ids, factors, ops.pack_experts(broken), "silu")
    want = ops.run_experts(x, ids, factors, ops.pack_experts(weights()), "silu")
    assert torch.equal(got, want)


def test_the_gpus_form_takes_as_many_experts_at_once_as_fit(monkeypatch: Any) -> None:
    ops = load("gpu")
    x, ids, factors = problem(9)
    packed = ops.pack_experts(weights())
    whole = ops.run_experts(x, ids, factors, packed, "silu")
    monkeypatch.setattr("ops.gpu.experts._MOST_ELEMENTS", 3 * 9 * 2 * INNER)
    torch.testing.assert_close(ops.run_experts(x, ids, factors, packed, "silu"), whole)
