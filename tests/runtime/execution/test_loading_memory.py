"""What loading takes of memory, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ops.cpu import build
from tests.cache import cache_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc"),
    pytest.mark.skipif(not build.available_paths(), reason="no native instruction path"),
]

LAYERS, HIDDEN, INNER, VOCAB = 12, 512, 2048, 1024
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SHAPES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
# Stacks that are packed at once, blocks that panels are cut from, pages that are not full.
BESIDE_BYTES = 24 << 20

SCRIPT = """
import json, sys
from runtime.execution import build, packed_weights
from runtime.config import RunnerConfig
from ops.cpu.native import PanelMemory

PanelMemory.BLOCK_BYTES = 1 << 20
packed_weights.LEAST_WEIGHTS = 0

def kib(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

def load(model, **options):
    config = RunnerConfig(model=model, device="cpu", max_total_tokens=48, **options)
    return build.build_runner(config, page_size=16, max_running_requests=2)[0]

small, model, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
load(small, **options)  # what torch and the kernels take once
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = kib("VmRSS:")
runner = load(model, **options)
print(kib("VmHWM:") - before, kib("VmRSS:") - before)
"""


def write(folder: Path, layers: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    tensors = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(layers):
        tensors |= {f"model.layers.{i}.{name}.weight": size for name, size in SHAPES.items()}
    made = {name: torch.randn(size).to(torch.bfloat16) for name, size in tensors.items()}
    save_file(made, folder / "model.safetensors")
    return folder


BYTES_OF_A_WEIGHT = {"none": 2.0, "int4": 0.625}


@pytest.mark.parametrize("form", BYTES_OF_A_WEIGHT)
def test_loading_takes_what_is_packed_and_little_beside_it(form, tmp_path):
    small, model = write(tmp_path / "small", 1), write(tmp_path / "model", LAYERS)
    matrices = LAYERS * sum(n * k for n, k in (s for s in SHAPES.values() if len(s) == 2))
    packed = int(matrices * BYTES_OF_A_WEIGHT[form])
    kept = packed + 2 * 2 * VOCAB * HIDDEN  # embedding and output layer
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / build.FOLDER).symlink_to(cache_folder() / build.FOLDER)
    for gigabytes in (0.0, 1.0, 1.0):  # without a file, writing it, from it
        options = {"quantization": form, "packed_cache_gb": gigabytes, "cache_dir": str(cache)}
        command = [sys.executable, "-c", SCRIPT, str(small), str(model), json.dumps(options)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak, after = (int(kib) * 1024 for kib in done.stdout.split())
        assert 0.9 * packed < after <= peak < kept + BESIDE_BYTES, gigabytes
