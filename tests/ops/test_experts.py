"""Routing and experts: the reference against transformers, every backend against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from ops import load
from ops.op_set import Expert, Routing
from ops.reference import ReferenceOps, route
from scripts._triton_interpreter import products_rounded_once
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


def weights(dtype: torch.dtype = torch.float32, *, biases: bool = False) -> list[Expert]:
    parts = [
        randn(EXPERTS, 2 * INNER, HIDDEN, seed=1) * HIDDEN**-0.5,
        randn(EXPERTS, HIDDEN, INNER, seed=2) * INNER**-0.5,
    ]
    if biases:
        parts += [randn(EXPERTS, 2 * INNER, seed=5), randn(EXPERTS, HIDDEN, seed=6)]
    return [Expert(*each) for each in zip(*(part.to(dtype) for part in parts), strict=True)]


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


@pytest.mark.parametrize("renormalise", [True, False])
def test_routing_in_groups_equals_deepseek_v3(renormalise: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=renormalise,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        router.weight.copy_(randn(12, HIDDEN, seed=1))
        router.e_score_correction_bias.copy_(randn(12, seed=2))
        logits, want_weights, want_ids = router(randn(40, HIDDEN))
    routing = Routing(4, renormalise, "sigmoid", 2.5, 4, 2, "top2")
    ids, got = route(logits, routing, router.e_score_correction_bias)
    assert_same_experts(ids, got, want_ids, want_weights)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_routing_in_groups_equals_deepseek_v2(groups: tuple[int, int]) -> None:
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_group=groups[0],
        topk_group=groups[1],
        topk_method="greedy" if groups[0] == 1 else "group_limited_greedy",
        routed_scaling_factor=16.0,
    )
    router = DeepseekV2TopkRouter(config)
    with torch.no_grad():
        router.weight.copy_(randn(12, HIDDEN, seed=1))
        logits, want_weights, want_ids = router(randn(40, HIDDEN))
    ids, got = route(logits, Routing(4, False, "softmax", 16.0, *groups))
    assert_same_experts(ids, got, want_ids, want_weights)


def assert_same_experts(ids: Tensor, got: Tensor, want_ids: Tensor, want: Tensor) -> None:
    """Each token's experts and weights are the same, in whatever order."""
    order, want_order = ids.argsort(-1), want_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), want_ids.gather(1, want_order))
    torch.testing.assert_close(got.gather(1, order), want.gather(1, want_order))


def test_the_clamped_activation_equals_gpt_oss() -> None:
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=1)
    gate, up = 6 * randn(30, INNER), 6 * randn(30, INNER, seed=1)
    want = GptOssExperts(config)._apply_gate(torch.stack((gate, up), -1).flatten(1))
    got = REFERENCE.clamped_silu_and_mul(torch.cat((gate, up), -1))
    torch.testing.assert_close(got, want)


def test_among_equal_experts_the_lower_id_is_chosen() -> None:
    ids, got = route(torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]), Routing(2, True))
    assert ids.tolist() == [[1, 2]]
    assert got.tolist() == [[0.5, 0.5]]


def test_the_reference_equals_qwen3() -> None:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, moe_intermediate_size=INNER)
    config._experts_implementation = "eager"
    theirs = Qwen3MoeExperts(config)
    gate_up = torch.stack([expert.gate_up for expert in weights()])
    down = torch.stack([expert.down for expert in weights()])
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


@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    ("tokens", "activation", "biases"),
    [(1, "silu", False), (2, "gelu", True), (9, "gelu_tanh", False), (9, "clamped_silu", True)],
)
@pytest.mark.sampled(8)
def test_experts_equal_the_reference(
    ops: OpSet, tokens: int, activation: str, biases: bool, narrow: bool
) -> None:
    # Products of bfloat16 are wrong in Triton's interpreter.
    half = torch.float16 if ops.name == "gpu" else torch.bfloat16
    dtype = half if narrow else torch.float32
    x, ids, factors = problem(tokens, dtype)
    experts = weights(dtype, biases=biases)
    got = ops.run_experts(x, ids, factors, ops.pack_experts(experts), activation)
    # In float32 of the same rounded weights: nothing rounded between the layers.
    exact = REFERENCE.pack_experts(
        Expert(*(part.float() for part in each if part is not None)) for each in experts
    )
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.sampled(1)
def test_a_token_is_the_same_alone_to_the_bit_on_a_gpu(dtype: torch.dtype) -> None:
    """In tiles of another number of rows, and beside other experts' tokens."""
    ops = load("gpu")
    packed = ops.pack_experts(weights(dtype, biases=True))
    x, ids, factors = problem(70, dtype)
    with products_rounded_once():
        together = ops.run_experts(x, ids, factors, packed, "silu")
        for some in (slice(0, 1), slice(7, 9), slice(20, 53)):
            alone = ops.run_experts(x[some], ids[some], factors[some], packed, "silu")
            assert torch.equal(alone, together[some])


def test_experts_of_more_tiles_than_one_and_of_none_equal_the_reference() -> None:
    """All tokens through few of many experts, the first and the last among them; K and N end
    within a tile."""
    ops, count, inner = load("gpu"), 21, 37
    experts = [
        Expert(randn(2 * inner, HIDDEN + 5, seed=e), randn(HIDDEN + 5, inner, seed=100 + e))
        for e in range(count)
    ]
    x, factors = randn(50, HIDDEN + 9)[:, : HIDDEN + 5], randn(50, 2, seed=1).abs()
    ids = torch.tensor([[0, 20], [7, 0], [20, 8]]).repeat(17, 1)[:50]
    got = ops.run_experts(x, ids, factors, ops.pack_experts(experts), "silu")
    want = REFERENCE.run_experts(x, ids, factors, REFERENCE.pack_experts(experts), "silu")
    assert float((got - want).abs().max()) <= 2e-6 * float(want.abs().max())
    nothing = ops.run_experts(x[:0], ids[:0], factors[:0], ops.pack_experts(experts), "silu")
    assert nothing.shape == (0, HIDDEN + 5)


def test_a_token_is_nearly_the_same_alone_on_torch() -> None:
    """A matrix product may sum in another order for other numbers of rows."""
    ops = load("cpu")
    packed = ops.pack_experts(weights())
    x, ids, factors = problem(9)
    together = ops.run_experts(x, ids, factors, packed, "silu")
    for t in range(9):
        alone = ops.run_experts(x[t : t + 1], ids[t : t + 1], factors[t : t + 1], packed, "silu")
        torch.testing.assert_close(alone[0], together[t], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_an_expert_that_overflows_on_foreign_tokens_harms_none(backend: str) -> None:
    ops, broken = load(backend), weights()
    broken[5].down.fill_(float("inf"))  # the expert that no token goes through
    x, ids, factors = problem(9)
    got = ops.run_experts(x, ids, factors, ops.pack_experts(broken), "silu")
    want = ops.run_experts(x, ids, factors, ops.pack_experts(weights()), "silu")
    assert torch.equal(got, want)
