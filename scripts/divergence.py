#!/usr/bin/env python3
"""How far each form of a model's weights is from float32: the mean Kullback-Leibler divergence of
its next-token distributions from float32's, and how often both have the same likeliest token.

One pass over scripts/reference_text.txt. Float32 has the weights as the checkpoint's values say.
Usage: python scripts/divergence.py [--model FOLDER] [--forms default,bfloat16,int8,int4]
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
}


def log_probabilities(folder: Path, ids: list[int], embedded: bool, form: str) -> Any:
    """[T, V] float32 of all tokens of the text, and the form in words."""
    config = RunnerConfig(
        model=str(folder), device="cpu", max_total_tokens=2 * len(ids) + 3 * PAGE, **FORMS[form]
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face folder; default: the embedded model")
    parser.add_argument("--forms", default="default,bfloat16,int8,int4", help="comma-separated")
    args = parser.parse_args()
    folder = RunnerConfig().cache_folder
    folder = Path(args.model) if args.model else ensure_embedded_model(folder, print)
    ids = list(Tokenizer.load(folder, None).encode(TEXT.read_text()))
    embedded = args.model is None
    want, _ = log_probabilities(folder, ids, embedded, "float32")
    results = {}
    print(f"{len(ids)} tokens; against float32:\n| form | mean KL, nats | same first token |")
    print("|---|---|---|")
    for form in args.forms.split(","):
        got, words = log_probabilities(folder, ids, embedded, form)
        divergence = float((want.exp() * (want - got)).sum(dim=1).mean())
        same = float((want.argmax(dim=1) == got.argmax(dim=1)).float().mean())
        results[form] = {"kl": divergence, "same": same, "weights": words}
        shown = f"{form}: {words}" if form == "default" else form
        print(f"| {shown} | {divergence:.5f} | {100 * same:.1f} % |", flush=True)
    print(json.dumps({"tokens": len(ids), "model": folder.name, "results": results}))


if __name__ == "__main__":
    main()
