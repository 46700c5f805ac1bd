"""Models written as the formats of quantized checkpoints publish them.

Each `pack_*` writes one weight as its format has it (AutoGPTQ and GPTQModel, AutoAWQ,
compressed-tensors, DeepSeek's FP8, bitsandbytes), and gives the values that its reference unpacks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.runtime.models.tiny_models import make_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    Packed = tuple[dict[str, Tensor], Tensor]

SHAPE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
GROUP = 32


def random(low: int, high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def scales_of(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.02 + 0.01


def words_of(values: Tensor, bits: int, axis: int) -> Tensor:
    """Unsigned values in int32 words along an axis, the first one in the lowest bits."""
    parts = values.movedim(axis, -1).unflatten(-1, (-1, 32 // bits)).long()
    words = (parts << torch.arange(0, 32, bits)).sum(-1)
    return words.to(torch.int32).movedim(-1, axis).contiguous()


def pack_gptq(
    shape: torch.Size,
    seed: int,
    *,
    bits: int,
    form: str,
    ordered: bool,
    indexed: bool = True,
    symmetric: bool = False,
) -> Packed:
    n, k = shape
    top, groups = 2**bits, k // GROUP
    index = torch.arange(k) // GROUP
    if ordered:
        index = index[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
    q, scales = random(0, top, k, n, seed=seed), scales_of(groups, n, seed=seed).half()
    # What is stored as the highest code is, in the first form, the zero 0.
    zeros = random(0, top, groups, n, seed=seed + 1)
    if symmetric:
        zeros = torch.full_like(zeros, top // 2)
    stored = zeros if form == "gptq_v2" else (zeros - 1) % top
    values = scales.float()[index] * (q - zeros[index])
    parts = {
        "qweight": words_of(q, bits, 0),
        "qzeros": words_of(stored, bits, 1),
        "scales": scales,
        "g_idx": index.int(),
    }
    if not indexed:
        del parts["g_idx"]
    return parts, values.T


def pack_awq(shape: torch.Size, seed: int) -> Packed:
    n, k = shape
    index, columns = torch.arange(k) // GROUP, torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    q, zeros = random(0, 16, k, n, seed=seed), random(0, 16, k // GROUP, n, seed=seed + 1)
    scales = scales_of(k // GROUP, n, seed=seed).half()

    def words(values: Tensor) -> Tensor:
        return words_of(values.unflatten(1, (-1, 8))[..., columns].flatten(1), 4, 1)

    parts = {"qweight": words(q), "qzeros": words(zeros), "scales": scales}
    return parts, (scales.float()[index] * (q - zeros[index])).T


def pack_int8(shape: torch.Size, seed: int, *, zeros: bool = False) -> Packed:
    q, scales = random(-128, 128, *shape, seed=seed), scales_of(shape[0], 1, seed=seed).bfloat16()
    parts, zero = {"weight": q.to(torch.int8), "weight_scale": scales}, torch.zeros(1)
    if zeros:
        zero = random(-9, 9, shape[0], 1, seed=seed + 1)
        parts["weight_zero_point"] = zero.to(torch.int8)
    return parts, scales.float() * (q - zero)


def pack_words(
    shape: torch.Size, seed: int, *, zeros: bool = False, ordered: bool = False
) -> Packed:
    n, k = shape
    index = torch.arange(k) // GROUP
    if ordered:
        index = index[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
    q, scales = random(-8, 8, n, k, seed=seed), scales_of(n, k // GROUP, seed=seed).bfloat16()
    parts = {
        "weight_packed": words_of(q + 8, 4, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }
    zero = torch.zeros(n, k // GROUP)
    if zeros:
        zero = random(-8, 8, n, k // GROUP, seed=seed + 1)
        parts["weight_zero_point"] = words_of(zero + 8, 4, 0)
    if ordered:
        parts["weight_g_idx"] = index.int()
    return parts, scales.float()[:, index] * (q - zero[:, index])


def pack_fp8(
    shape: torch.Size, seed: int, *, scale: str, blocks: tuple[int, int], static: bool = False
) -> Packed:
    n, k = shape
    q = (scales_of(n, k, seed=seed) * 9000 - 180).to(torch.float8_e4m3fn)
    counts = -(-n // blocks[0]), -(-k // blocks[1])
    scales = scales_of(*counts, seed=seed + 1) / 100
    spread = scales.repeat_interleave(blocks[0], 0)[:n].repeat_interleave(blocks[1], 1)[:, :k]
    parts = {"weight": q, scale: scales[0, 0] if counts == (1, 1) else scales}
    if static:
        parts["input_scale"] = torch.tensor(0.5)
    return parts, q.float() * spread


def pack_bnb(shape: torch.Size, seed: int, *, nested: bool) -> Packed:
    n, k = shape
    block, outer = 64, 256
    codes = random(0, 16, n * k, seed=seed)
    table = torch.linspace(-1, 1, 16) ** 3
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "shape": [n, k]}
    absmax = scales_of(n * k // block, seed=seed)
    parts = {"weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]}
    if nested:
        levels, chosen = torch.linspace(-1, 1, 256), random(0, 256, len(absmax), seed=seed + 1)
        steps = scales_of(-(-len(absmax) // outer), seed=seed + 2)
        absmax = levels[chosen] * steps.repeat_interleave(outer)[: len(absmax)] + 0.03
        state |= {"nested_blocksize": outer, "nested_offset": 0.03, "nested_dtype": "float32"}
        parts["weight.nested_absmax"], parts["weight.nested_quant_map"] = steps, levels
        parts["weight.absmax"] = chosen.to(torch.uint8)
    else:
        parts["weight.absmax"] = absmax
    text = json.dumps(state).encode()
    parts["weight.quant_map"] = table
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return parts, (table[codes] * absmax.repeat_interleave(block)).view(n, k)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "int", "strategy": "channel", **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": False}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Packed], dict[str, Any]]] = {
    "gptq-4": ({**GPTQ, "bits": 4}, pack_gptq, {"bits": 4, "form": "gptq", "ordered": False}),
    "gptq-4-no-index": (
        {**GPTQ, "bits": 4},
        pack_gptq,
        {"bits": 4, "form": "gptq", "ordered": False, "indexed": False},
    ),
    "gptq-4-symmetric": (
        {**GPTQ, "bits": 4, "sym": True},
        pack_gptq,
        {"bits": 4, "form": "gptq", "ordered": False, "symmetric": True},
    ),
    "gptq-8": ({**GPTQ, "bits": 8}, pack_gptq, {"bits": 8, "form": "gptq", "ordered": False}),
    "gptq-8-symmetric": (
        {**GPTQ, "bits": 8, "sym": True},
        pack_gptq,
        {"bits": 8, "form": "gptq", "ordered": False, "symmetric": True},
    ),
    "gptq-8-act-order": (
        {**GPTQ, "bits": 8, "desc_act": True},
        pack_gptq,
        {"bits": 8, "form": "gptq", "ordered": True},
    ),
    "gptq-v2-act-order": (
        {**GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"},
        pack_gptq,
        {"bits": 4, "form": "gptq_v2", "ordered": True},
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, pack_awq, {}),
    "w8a8": (compressed("int-quantized"), pack_int8, {}),
    "w8a8-zeros": (compressed("int-quantized"), pack_int8, {"zeros": True}),
    "w4a16": (compressed("pack-quantized", **INT4), pack_words, {}),
    "w4a16-zeros": (compressed("pack-quantized", **INT4), pack_words, {"zeros": True}),
    "w4a16-act-order": (compressed("pack-quantized", **INT4), pack_words, {"ordered": True}),
    "compressed-fp8": (
        compressed("float-quantized", type="float"),
        pack_fp8,
        {"scale": "weight_scale", "blocks": (1, 10_000)},
    ),
    "compressed-fp8-blocks": (
        compressed("float-quantized", type="float", strategy="block", block_structure=[48, 48]),
        pack_fp8,
        {"scale": "weight_scale", "blocks": (48, 48)},
    ),
    "fp8-blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48]},
        pack_fp8,
        {"scale": "weight_scale_inv", "blocks": (48, 48)},
    ),
    "fp8-narrow-blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 32]},
        pack_fp8,
        {"scale": "weight_scale_inv", "blocks": (48, 32)},
    ),
    "fp8-tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        pack_fp8,
        {"scale": "weight_scale", "blocks": (10_000, 10_000), "static": True},
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        pack_bnb,
        {"nested": False},
    ),
    "nf4-nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        pack_bnb,
        {"nested": True},
    ),
}


def write_config(folder: Path, quantization: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )


def write_quantized(name: str, tmp_path: Path) -> tuple[Any, dict[str, Tensor]]:
    """A model of the format's values, written as the format has it, and those values."""
    quantization, pack, options = FORMATS[name]
    model = make_model(tmp_path, "llama", num_attention_heads=4, **SHAPE)
    stored = load_file(tmp_path / "model.safetensors")
    expected = {}
    with torch.no_grad():
        for i, (module, layer) in enumerate(model.named_modules()):
            if isinstance(layer, torch.nn.Linear) and module != "lm_head":
                parts, values = pack(layer.weight.shape, 10 * i, **options)
                layer.weight.copy_(values)
                expected[f"{module}.weight"] = values
                del stored[f"{module}.weight"]
                stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    save_file(stored, tmp_path / "model.safetensors")
    write_config(tmp_path, quantization)
    return model, expected


def write_gpt_oss(tmp_path: Path) -> tuple[Any, dict[str, Tensor]]:
    """A model with its experts in MXFP4, and their values."""
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
    model = make_model(tmp_path, "gpt_oss", **SHAPE, **experts)
    stored, expected = load_file(tmp_path / "model.safetensors"), {}
    for i, layer in enumerate(model.model.layers):
        for j, name in enumerate(("gate_up_proj", "down_proj")):
            weight = getattr(layer.mlp.experts, name)
            count, inputs, outputs = weight.shape
            shape = (count, outputs, inputs // 32)
            blocks = random(0, 256, *shape, 16, seed=i + 2 * j).to(torch.uint8)
            scales = random(120, 126, *shape, seed=i).to(torch.uint8)
            with torch.no_grad():
                weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            at = f"model.layers.{i}.mlp.experts.{name}"
            expected[at] = stored.pop(at).copy_(weight)
            stored |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
    save_file(stored, tmp_path / "model.safetensors")
    write_config(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model, expected
