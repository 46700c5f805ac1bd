"""Qwen 3 Next against transformers: a recurrent state by row beside keys and values by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.config import RunnerConfig, SchedulerConfig
from runtime.errors import ConfigError
from runtime.execution.build import build_runner
from runtime.execution.kv_pool import bytes_per_state
from runtime.execution.kv_sizing import check_memory
from runtime.execution.model_runner import ModelRunner
from runtime.offload.build import build_tier
from runtime.request import SamplingParams
from runtime.scheduling.scheduler import Scheduler
from tests.ops.gpu.tiny_decoder import queued
from tests.runtime.execution.drivers import request, run
from tests.runtime.models.test_greedy_by_family import PROMPTS, requests, tokens
from tests.runtime.models.tiny_models import (
    Probe,
    expected_logits,
    make_model,
    open_runner,
    random_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from runtime.scheduling.schedule_batch import ScheduleBatch

SHAPE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SHAPE |= {"shared_expert_intermediate_size": 40, "head_dim": 16, "linear_key_head_dim": 8}
SHAPE |= {"linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
SHAPE |= {"linear_conv_kernel_dim": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "as-published": SHAPE,
    "others": SHAPE
    | {"layer_types": ["full_attention", "linear_attention"] * 2, "attention_bias": True}
    | {"norm_topk_prob": False, "mlp_only_layers": [1], "linear_conv_kernel_dim": 2}
    | {"linear_num_value_heads": 2, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module", params=VARIANTS)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_model(folder, "qwen3_next", **VARIANTS[request.param])


def test_logits_equal_transformers(folder: tuple[Path, PreTrainedModel]) -> None:
    """Whole, in pieces that end inside pages, and token by token, in rows beside one another."""
    path, model = folder
    runner = open_runner(path)
    # Among those of seed 1 is one whose logits float32 gives to 1e-4 only, transformers' too.
    tokens, other = random_tokens(90, seed=3), random_tokens(31, seed=2)
    want, want_other = expected_logits(model, tokens), expected_logits(model, other)

    def close(got: torch.Tensor, expected: torch.Tensor) -> None:
        # Of the largest logit: theirs differ by as much between float32 and float64.
        assert float((got - expected).abs().max()) < 1e-4 * float(want.abs().max())

    probe = Probe(runner)
    (whole,) = probe.step({1: (0, tokens[:86])})
    close(whole, want[:86])
    first, decoded = probe.step({2: (0, tokens[:17]), 1: (86, tokens[86:87])})
    close(first, want[:17])
    close(decoded, want[86:87])
    second, decoded, begun = probe.step(
        {2: (17, tokens[17:18]), 1: (87, tokens[87:88]), 3: (0, other[:30])}
    )
    close(second, want[17:18])
    close(decoded, want[87:88])
    close(begun, want_other[:30])
    decoded, third, ended = probe.step(
        {1: (88, tokens[88:]), 2: (18, tokens[18:]), 3: (30, other[30:])}
    )
    close(decoded, want[88:])
    close(third, want[18:])
    close(ended, want_other[30:])
    # Another sequence in a row that had one.
    (again,) = probe.step({1: (0, other)})
    close(again, want_other)
    runner.close()


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_bfloat16_is_no_further_from_float32_than_transformers_own(
    folder: tuple[Path, PreTrainedModel], kernels: str, tmp_path: Path
) -> None:
    rounded = type(folder[1]).from_pretrained(folder[0], dtype=torch.bfloat16)
    rounded.save_pretrained(tmp_path)
    tokens = random_tokens(43)
    theirs = expected_logits(rounded, tokens).float()
    want = expected_logits(rounded.float(), tokens)
    runner = open_runner(tmp_path, dtype="bfloat16", cpu_kernels=kernels, cpu_threads=1)
    (ours,) = Probe(runner).step({1: (0, tokens)})
    runner.close()
    # A rounding may choose another expert: compared is what a quarter of the tokens stay below.
    error, their_error = ((got - want).abs().mean(-1).quantile(0.25) for got in (ours, theirs))
    assert error < 1.5 * their_error


@pytest.fixture
def runner(folder: tuple[Path, PreTrainedModel]) -> Iterator[ModelRunner]:
    runner = built(folder[0])
    yield runner
    runner.close()


def built(folder: Path, kernels: str = "auto") -> ModelRunner:
    config = RunnerConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_total_tokens=2048,
        cpu_threads=1,
        cpu_kernels=kernels,
    )
    return build_runner(config, page_size=2, max_running_requests=8)[0]


def scheduler(**options: Any) -> Scheduler:
    config = {"capacity_tokens": 2048, "context_length": 512, "page_size": 2}
    config |= {
        "max_running_requests": 8,
        "recurrent": True,
        "state_slots": 60,
        "state_interval": 10,
    }
    return Scheduler(SchedulerConfig(**{**config, **options}))


def generated(runner: ModelRunner, made: Scheduler, **options: Any) -> list[list[int]]:
    return tokens(run(made, runner, requests(), check=False, **options))


def is_greedy(model: PreTrainedModel, given: list[list[int]]) -> bool:
    """Whether each token is the likeliest one behind those before it."""
    rows = zip(PROMPTS, given, strict=True)
    logits = [expected_logits(model, [*p, *ids[:-1]])[len(p) - 1 :] for p, ids in rows]
    return given == [row.argmax(-1).tolist() for row in logits]


@pytest.mark.slow
def test_greedy_tokens_on_every_path_equal_transformers(
    folder: tuple[Path, PreTrainedModel], runner: ModelRunner
) -> None:
    whole = generated(runner, scheduler(chunked_prefill_size=0))
    assert is_greedy(folder[1], whole)
    for chunk in (7, 64):
        for overlap in (True, False):
            chunked = scheduler(chunked_prefill_size=chunk)
            assert generated(runner, chunked, overlap=overlap) == whole
            again = run(chunked, runner, requests(), overlap=overlap, check=False)
            assert tokens(again) == whole
            assert again.cached_tokens > 100
    without = scheduler(chunked_prefill_size=7, disable_radix_cache=True)
    assert generated(runner, without) == whole
    tight = scheduler(chunked_prefill_size=64, capacity_tokens=240, schedule_conservativeness=0.001)
    retracted = run(tight, runner, requests(), check=False)
    assert tokens(retracted) == whole
    assert retracted.retractions > 0


@pytest.mark.parametrize("way", ["host", pytest.param("queued", marks=pytest.mark.slow)])
def test_steps_that_fail_leave_the_states_of_before(
    folder: tuple[Path, PreTrainedModel], way: str
) -> None:
    """Rows that a lost step has moved on, and the one launched behind it, go on as if it had not."""
    runner = built(folder[0], "auto" if way == "host" else "torch")
    if way == "queued":
        runner.close()
        runner = ModelRunner(queued(runner.device), runner.decoder, runner.sizes)
    wanted = generated(runner, scheduler(chunked_prefill_size=16))
    lost: list[str] = []

    def fails(batch: ScheduleBatch) -> bool:
        if batch.step % 5 or len(batch.requests) == 1 or len(lost) > 12:
            return False
        lost.append(batch.kind)
        return True

    assert generated(runner, scheduler(chunked_prefill_size=16), fails=fails) == wanted
    runner.close()
    assert {"mixed", "decode"} <= set(lost)


@pytest.mark.parametrize("slots", [0, 2, 8])
def test_a_cached_prompt_goes_on_from_its_deepest_saved_state(
    runner: ModelRunner, slots: int
) -> None:
    """Behind the last page border of the same prompt, behind a multiple of the interval of one that
    only begins alike, and of what was generated; in two slots are the newest states alone."""
    prompt, other = random_tokens(75, seed=5), random_tokens(75, seed=6)
    other[:50] = prompt[:50]

    def answer(tokens: list[int], scheduler: Scheduler) -> tuple[list[int], int]:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=9)
        result = run(scheduler, runner, [request("a", tokens, sampling)])
        return result.outputs["a"].token_ids, result.cached_tokens

    whole = scheduler(chunked_prefill_size=0, disable_radix_cache=True)
    (wanted, _), (other_wanted, _) = answer(prompt, whole), answer(other, whole)
    made = scheduler(chunked_prefill_size=16, state_slots=slots, state_interval=20)
    assert answer(prompt, made) == (wanted, 0)
    assert answer(prompt, made) == (wanted, 74 if slots else 0)
    assert answer(other, made) == (other_wanted, 40 if slots == 8 else 0)
    assert answer(other, made) == (other_wanted, 74 if slots else 0)
    following = [*prompt, *wanted, 7, 8]
    next_wanted, _ = answer(following, whole)
    again = scheduler(chunked_prefill_size=16, state_slots=slots, state_interval=20)
    assert answer(prompt, again) == (wanted, 0)
    assert answer(following, again) == (next_wanted, 80 if slots else 0)


def test_what_predicts_further_tokens_is_not_read(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen3_next", **SHAPE)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "mtp.fc.weight": torch.ones(48, 96)}, path)
    tokens = random_tokens(9)
    runner = open_runner(tmp_path)
    (got,) = Probe(runner).step({1: (0, tokens)})
    runner.close()
    torch.testing.assert_close(got, expected_logits(model, tokens), atol=1e-3, rtol=1e-3)


def test_what_rows_keep_is_told_and_counted(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_next", **SHAPE)
    runner = open_runner(tmp_path)
    runner.close()
    inputs, matrices = 3 * (2 * 2 * 8 + 6 * 12), 6 * 8 * 12
    assert bytes_per_state(runner.decoder.model) == 3 * 4 * (inputs + matrices)
    states = sum(tensor.nbytes for cache in runner.memory.pool.caches for tensor in cache)
    states -= sum(tensor.nbytes for tensor in runner.memory.pool.tensors())
    # Of 8 rows, of padding, and half as much as KV takes.
    each = 3 * 4 * (inputs + matrices)
    saved = 4096 * (2 * 2 * 16 * 4) // 2 // each
    assert runner.info.state_slots == saved
    assert states == (9 + saved) * each
    small: Any = SimpleNamespace(memory_bytes=lambda: 1, kv_dtype=torch.float32)
    with pytest.raises(ConfigError, match=f"recurrent states of {states:,}"):
        check_memory(runner.sizes, small, runner.decoder.model)
    with pytest.raises(ConfigError, match=r"kv_offload_gb.*recurrent state"):
        build_tier(RunnerConfig(kv_offload_gb=1.0), runner, tmp_path, print)
