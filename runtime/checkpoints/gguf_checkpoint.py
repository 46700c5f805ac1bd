"""A `.gguf` file of the Llama family as a checkpoint: Hugging Face names, shapes and config.

A GGUF file holds the same matrices under shorter names, quantized or not, with two differences
that matter here: the rows of Llama's q and k projections are reordered for interleaved rotary
(put back below), and config values are single floats (1e-5 comes back as 9.999999747e-06, so the
shortest decimal that gives the same float is taken).

Format and names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantized tensors
are dequantized to float32 by the `gguf` package.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from runtime.checkpoints.checkpoint import RawTensor, TensorInfo, tensor_info
from runtime.checkpoints.gguf_file import GgufFile
from runtime.checkpoints.gguf_metadata import GgufMetadata, shortest
from runtime.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


class _Architecture(NamedTuple):
    class_name: str
    reordered: bool  # q and k have their rows in the order of interleaved rotary


_ARCHITECTURES = {  # by general.architecture, which is transformers' model_type too
    "llama": _Architecture("LlamaForCausalLM", True),
    "qwen2": _Architecture("Qwen2ForCausalLM", False),
    "qwen3": _Architecture("Qwen3ForCausalLM", False),
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQUENCIES = "rope_freqs.weight"  # Llama 3's rotary scaling, as one divisor per frequency
_IGNORED = re.compile(r"rope_freqs\.weight|.*\.rope_freqs\.weight|.*\.attn_rot_embd")
# Texts of tokens by which models end a turn. Files name one end, often the base model's, and leave
# out the one that the chat template writes; llama.cpp too stops at each of these.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>"),
    *("<|end_of_text|>", "</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    "<end_of_utterance>",
)
_PLAIN_TYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


class GgufCheckpoint:
    """See the module docstring. Quantized tensors are float32 when read."""

    def __init__(self, path: Path) -> None:
        """Raises: ModelError: not a GGUF file, or of a family this server does not know."""
        self.path = path
        file = GgufFile(path)
        self.metadata = GgufMetadata(path, file.metadata)
        self._architecture = self.metadata.text("general.architecture")
        if self._architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{path}: architecture {self._architecture!r}: GGUF files of"
                f" {', '.join(_ARCHITECTURES)} can be served"
            )
        if self.metadata.integer("split.count", 1, low=0) > 1:
            raise ModelError(
                f"{path}: is one of several parts; join them (llama-gguf-split --merge)"
            )
        self._sources = {
            self._hugging_face_name(tensor.name): tensor
            for tensor in file.tensors
            if not _IGNORED.fullmatch(tensor.name)
        }
        self.tensors = {
            name: TensorInfo(tensor.shape, _PLAIN_TYPES.get(tensor.type, "float32"))
            for name, tensor in self._sources.items()
        }
        frequencies = next((t.data for t in file.tensors if t.name == _FREQUENCIES), None)
        self.config = self._make_config(frequencies)
        self.generation_config = self._make_generation_config()

    def read(self, name: str) -> RawTensor:
        """See `Checkpoint.read`; the buffer is a copy, quantized values dequantized."""
        info = tensor_info(self, name)
        tensor = self._sources[name]
        values = tensor.data
        if tensor.type not in _PLAIN_TYPES:
            try:
                values = dequantize(tensor.data, tensor.type)
            except NotImplementedError:
                raise ModelError(
                    f"{self.path}: {tensor.name}: {tensor.type.name} is not supported"
                ) from None
        values = self._restore_rows(tensor.name, values.reshape(info.shape))
        buffer = np.array(values, order="C")  # writable, private
        return RawTensor(info.shape, info.dtype, buffer.data.cast("B"))

    def _hugging_face_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if stem in _TOP_NAMES:
            return f"{_TOP_NAMES[stem]}.{suffix}"
        if layer and layer[2] in _LAYER_NAMES:
            return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{suffix}"
        raise ModelError(f"{self.path}: tensor {name!r} is not one of a {self._architecture} model")

    def _restore_rows(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Undoes the reordering of q and k, which took a head's rows from (half, pair) to
        (pair, half)."""
        reordered = _ARCHITECTURES[self._architecture].reordered
        is_query = ".attn_q." in name
        if not reordered or not (is_query or ".attn_k." in name):
            return values
        heads = self.config["num_attention_heads" if is_query else "num_key_value_heads"]
        if values.shape[0] % (2 * heads):
            raise ModelError(
                f"{self.path}: tensor {name!r} has {values.shape[0]} rows, which do not make"
                f" {heads} heads"
            )
        pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    def _make_config(self, frequencies: NDArray[Any] | None) -> dict[str, Any]:
        given = self.metadata
        if isinstance(given.raw("{arch}.attention.head_count"), list):
            raise ModelError(
                f"{self.path}: layers with different numbers of heads cannot be served"
            )
        heads = given.integer("{arch}.attention.head_count")
        hidden = given.integer("{arch}.embedding_length")
        head_dim = given.integer("{arch}.attention.key_length", max(1, hidden // heads))
        context = given.integer("{arch}.context_length")
        theta = given.number("{arch}.rope.freq_base", 10000.0)
        scaling = self._rope_scaling(frequencies, head_dim, theta, context)
        rope = {"rope_theta": theta, **scaling}
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self._architecture].class_name],
            "model_type": self._architecture,
            "vocab_size": tensor_info(self, "model.embed_tokens.weight").shape[0],
            "hidden_size": hidden,
            "intermediate_size": given.integer("{arch}.feed_forward_length"),
            "num_hidden_layers": self._layers(),
            "num_attention_heads": heads,
            "num_key_value_heads": given.integer("{arch}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": given.number("{arch}.attention.layer_norm_rms_epsilon"),
            # transformers 5 reads rope_parameters, older readers rope_theta and rope_scaling.
            "rope_parameters": {"rope_type": "default", **rope},
            "rope_theta": theta,
            "rope_scaling": scaling or None,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.tensors,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self.tensors,
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "dtype": self._common_dtype(),
            "torch_dtype": self._common_dtype(),
        }
        window = given.integer("{arch}.attention.sliding_window", 0, low=0)
        if self._architecture == "llama" and window:  # how Mistral's models are stored
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
            config["sliding_window"] = window
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            config[f"{name}_token_id"] = given.token_id(key)
        return config

    def _layers(self) -> int:
        layers = self.metadata.integer("{arch}.block_count")
        found = {name.split(".")[2] for name in self.tensors if name.startswith("model.layers.")}
        if layers != len(found):
            raise ModelError(
                f"{self.path}: has tensors of {len(found)} layers, its block_count is {layers}"
            )
        return layers

    def _rope_scaling(
        self, frequencies: NDArray[Any] | None, head_dim: int, theta: float, context: int
    ) -> dict[str, Any]:
        given = self.metadata
        if frequencies is not None:
            scaling = llama3_scaling(np.asarray(frequencies, np.float64), head_dim, theta, context)
            if scaling is None:
                raise ModelError(f"{self.path}: {_FREQUENCIES} is no known scaling of positions")
            return scaling
        kind = given.text("{arch}.rope.scaling.type", "none")
        if kind == "none":
            return {}
        if kind not in ("linear", "yarn"):
            raise ModelError(f"{self.path}: rope scaling {kind!r}: must be none, linear or yarn")
        scaling = {"rope_type": kind, "factor": given.number("{arch}.rope.scaling.factor")}
        if kind == "yarn":
            key = "{arch}.rope.scaling.original_context_length"
            scaling["original_max_position_embeddings"] = given.integer(key)
        return scaling

    def _common_dtype(self) -> str:
        """The plain type that the matrices have; quantized ones are best kept in bfloat16."""
        kinds = {t.type for t in self._sources.values() if len(t.shape) == 2}
        return _PLAIN_TYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"

    def _make_generation_config(self) -> dict[str, Any]:
        given = self.metadata
        config = {k: self.config[k] for k in ("bos_token_id", "pad_token_id")}
        named = [given.token_id(name) for name in ("eos", "eot", "eom")]
        known = [i for i, text in enumerate(given.texts("tokenizer.ggml.tokens")) if text in _ENDS]
        ends = list(dict.fromkeys(i for i in (*named, *known) if i is not None))
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
        return {key: value for key, value in config.items() if value is not None}


def llama3_scaling(
    divisors: NDArray[Any], head_dim: int, theta: float, context: int
) -> dict[str, Any] | None:
    """The `llama3` rope scaling that gives these divisors [head_dim / 2], or None.

    A GGUF file keeps only the result of the published formula (transformers'
    `_compute_llama3_parameters`), so its parameters are found by trying those in use.
    """
    if divisors.shape != (head_dim // 2,) or not np.all(np.isfinite(divisors) & (divisors > 0)):
        return None
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    factor = float(divisors.max())
    low, high = 1.0, 4.0
    for original in (8192, context):
        ratio = (original / wavelengths - low) / (high - low)
        smooth = 1 / ((1 - ratio) / factor + ratio)
        middle = np.where(original / wavelengths < low, factor, smooth)
        expected = np.where(original / wavelengths > high, 1.0, middle)
        if np.allclose(expected, divisors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": shortest(factor),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return None
