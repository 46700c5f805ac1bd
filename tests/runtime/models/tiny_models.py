"""Tiny random models of every family, saved by transformers, and a probe for their logits here."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from runtime.config import RunnerConfig
from runtime.execution.build import build_runner
from runtime.execution.forward_batch import make_forward_batch
from runtime.request import Request, SamplingParams
from runtime.scheduling.schedule_batch import ScheduleBatch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from runtime.execution.model_runner import ModelRunner

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_model(
    folder: Path, model_type: str, *, seed: int = 0, scale: float = 0.25, **special: object
) -> PreTrainedModel:
    """A model whose weights, norms and biases included, are all random, saved to `folder`."""
    config = CONFIG_MAPPING[model_type](**{**SHAPE, **special})
    config._attn_implementation = "eager"  # soft caps are left out by the others
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            if parameter.ndim == 1:
                parameter.add_(0.5)
    model.save_pretrained(folder)
    return model


def open_runner(folder: Path, **options: Any) -> ModelRunner:
    """A float32 runner of the model in `folder` with pages of 4 tokens."""
    config = RunnerConfig(
        **{"model": str(folder), "device": "cpu", "max_total_tokens": 4096, **options}
    )
    runner, _ = build_runner(config, page_size=4, max_running_requests=8)
    return runner


def random_tokens(count: int, *, seed: int = 1, vocab_size: int = 131) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (count,), generator=generator).tolist()


def expected_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """transformers' logits at every position, [T, V]."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0]


class Probe:
    """Runs rows of hand-made steps and returns the logits of all their tokens. A row's prompt is
    what its first step computes."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._next_page = 1
        self.pages: dict[int, list[int]] = {}  # by row
        self._requests: dict[int, Request] = {}

    def share(self, row: int, source: int, tokens: int) -> None:
        """Lets `row` begin with the cached pages of another row's first `tokens` tokens."""
        self.pages[row] = self.pages[source][: tokens // 4]

    @torch.inference_mode()
    def step(self, rows: dict[int, tuple[int, list[int]]]) -> list[Tensor]:
        """rows: by request row, (position of the first new token, the new tokens)."""
        batch = ScheduleBatch(step=0, num_prefill=len(rows))
        for row, (start, tokens) in rows.items():
            pages = self.pages.setdefault(row, [])
            batch.table_rows.extend([row] * len(pages))
            batch.table_indices.extend(range(len(pages)))
            batch.table_pages.extend(pages)
            while 4 * len(pages) < start + len(tokens):
                batch.table_rows.append(row)
                batch.table_indices.append(len(pages))
                batch.table_pages.append(self._next_page)
                pages.append(self._next_page)
                self._next_page += 1
            prompt = array("i", [0] * (start + len(tokens)))
            request = Request(str(row), prompt, SamplingParams(), 0.0)
            batch.requests.append(self._requests.setdefault(row, request))
            batch.rows.append(row)
            batch.prefix_lens.append(start)
            batch.extend_lens.append(len(tokens))
            batch.input_ids.extend(array("i", tokens))
        runner = self.runner
        forward = make_forward_batch(
            batch,
            np.arange(len(batch.input_ids), dtype=np.int32),
            runner.staging,
            runner.memory,
        )
        return list(runner.decoder(forward.step).split(list(batch.extend_lens)))
