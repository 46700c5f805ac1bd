"""Tiny models in both forms: a Hugging Face folder, and a GGUF file as llama.cpp writes one."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

# Bytes in the order of GPT-2's byte-level alphabet, then two merges, then the special tokens.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHER = [byte for byte in range(256) if byte not in _PRINTABLE]
ALPHABET = {byte: chr(byte) for byte in _PRINTABLE}
ALPHABET |= {byte: chr(256 + i) for i, byte in enumerate(_OTHER)}
MERGES = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("1", "2"), ("h", "i")]
SPECIAL = ["<|end|>", "<|start|>"]
TOKENS = [*(ALPHABET[byte] for byte in range(256)), *(a + b for a, b in MERGES), *SPECIAL]
TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"


def make_llama(*, tied: bool = False, seed: int = 0) -> PreTrainedModel:
    return make_model("llama", tied=tied, seed=seed)


def make_model(model_type: str, *, tied: bool = False, seed: int = 0) -> PreTrainedModel:
    """Random weights in every tensor, biases and norms included."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=tied,
        bos_token_id=TOKENS.index("<|start|>"),
        eos_token_id=TOKENS.index("<|end|>"),
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def write_folder(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Matrices in `dtype`, norms and biases in float32, as in a GGUF file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    tensors = {
        name: tensor.to(dtype) if tensor.ndim == 2 else tensor
        for name, tensor in tensors_of(model).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    name, _, suffix = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if name in top:
        return f"{top[name]}.{suffix}"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[rest]}.{suffix}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's conversion: a head's rows (half, pair) become (pair, half)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: gguf.GGMLQuantizationType,
    blocks: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    template: str | list[dict[str, str]] = TEMPLATE,
) -> Path:
    """The model with matrices of `kind` and norms in float32; `blocks` replaces the data of some
    tensors by quantized blocks, `template` may be several with their names."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(TOKENS.index("<|start|>"))
    writer.add_eos_token_id(TOKENS.index("<|end|>"))
    writer.add_pad_token_id(TOKENS.index("<|end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    for name, tensor in tensors_of(model).items():
        values = tensor.numpy()
        reordered = config.model_type == "llama"
        if reordered and "q_proj" in name:
            values = interleave(values, config.num_attention_heads)
        if reordered and "k_proj" in name:
            values = interleave(values, config.num_key_value_heads)
        own_kind = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data, own_kind = (blocks or {}).get(name) or (quantize(values, own_kind), own_kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=own_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
