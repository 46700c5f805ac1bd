"""Writes what transformers generates greedily in float32, for the tests to compare with.

    python scripts/make_reference.py

24 prompts of 1 to 1,500 tokens, one at a time, 64 tokens each, on the embedded model (about three
minutes). The file also holds the distance between the two best logits at each place: where it is
below a tolerance, another order of summation may rightly pick the other token. Run it again when
the embedded model changes; the file names the weights it was made from by their hash.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime.checkpoints.embedded import ensure_embedded_model  # noqa: E402
from server.args import parse_args  # noqa: E402

OUTPUT = ROOT / "tests" / "runtime" / "execution" / "greedy_reference.json"
NEW_TOKENS = 64
# Around the page and chunk sizes of the tests, then long ones.
LENGTHS = (
    1, 2, 3, 5, 8, 15, 16, 17, 23, 31, 32, 33,
    47, 63, 64, 65, 100, 127, 128, 129, 200, 400, 800, 1500,
)  # fmt: skip
OPENINGS = (
    "The", "My name", "The capital of", "Water boils at a", "In the year 1969 people first walked",
)  # fmt: skip


def make_prompts(tokenizer: transformers.PreTrainedTokenizerBase) -> list[list[int]]:
    """One prompt per length: short openings, then stretches of the licence's text."""
    text = tokenizer.encode((ROOT / "LICENSE").read_text())
    prompts = []
    for i, length in enumerate(LENGTHS):
        ids = tokenizer.encode(OPENINGS[i])[:length] if i < len(OPENINGS) else []
        # Another place for each prompt, so that no prompt is the beginning of another.
        start = 37 * (len(LENGTHS) - 1 - i)
        prompts.append((ids + text[start : start + length])[:length])
    return prompts


def generate(model: transformers.PreTrainedModel, prompt: list[int]) -> dict[str, Any]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [logits[0].topk(2).values.tolist() for logits in out.logits]
    return {
        "prompt": prompt,
        "tokens": out.sequences[0, len(prompt) :].tolist(),
        "margins": [round(first - second, 4) for first, second in best],
    }


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    folder = ensure_embedded_model(parse_args([]).runner.cache_folder, print)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cases = []
    for prompt in make_prompts(AutoTokenizer.from_pretrained(folder)):
        cases.append(generate(model, prompt))
        print(f"{len(prompt)} tokens, smallest margin {min(cases[-1]['margins'])}", flush=True)
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    record = {
        "weights_sha256": digest,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cases": cases,
    }
    OUTPUT.write_text(json.dumps(record, separators=(",", ":")).replace('{"prompt"', '\n{"prompt"'))
    print(f"{OUTPUT}: {len(cases)} prompts")


if __name__ == "__main__":
    main()
