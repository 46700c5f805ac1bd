"""A `.gguf` file as a checkpoint: Hugging Face names, shapes and config.

A GGUF file holds the same matrices under shorter names, quantized or not. What differs is put back
below (and in `gguf_restored`): the rows of Llama's q and k projections are reordered for
interleaved rotary, Gemma's norms are stored with their 1 added, all experts of a layer stand in one
tensor. Layers that predict further tokens are left out. Config values are single floats (1e-5 comes
back as 9.999999747e-06, so the shortest decimal that gives the same float is taken). Which
architecture is which model is in `gguf_architectures`.

Format and names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantized tensors
are dequantized to float32 by the `gguf` package.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from ops.coded_weight import CodedMatrix
from runtime.checkpoints.checkpoint import RawTensor, TensorInfo, tensor_info
from runtime.checkpoints.gguf_architectures import TOP_NAMES, architecture_of
from runtime.checkpoints.gguf_codes import code_kind, read_codes, values_are_exact
from runtime.checkpoints.gguf_metadata import GgufMetadata, shortest
from runtime.checkpoints.gguf_restored import JOINED, restored_shape, restored_values
from runtime.checkpoints.gguf_split import read_gguf
from runtime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from ops.coded_weight import Codes
    from runtime.checkpoints.gguf_file import GgufTensor


_FREQUENCIES = "rope_freqs.weight"  # Llama 3's rotary scaling, as one divisor per frequency
_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # of longrope
_IGNORED = re.compile(
    r"rope_freqs\.weight|.*\.rope_freqs\.weight|.*\.attn_rot_embd|rope_factors_(long|short)\.weight"
)
# Texts of tokens by which models end a turn. Files name one end, often the base model's, and leave
# out the one that the chat template writes; llama.cpp too stops at each of these.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>"),
    *("<|end_of_text|>", "</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    "<end_of_utterance>",
)
# Of gpt-oss, where <|end|> is but the end of a message.
_HARMONY_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")
_YARN = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
_GATE_UP = ".ffn_gate_up_exps."
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
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
        metadata, tensors = read_gguf(path)
        self.metadata = GgufMetadata(path, metadata)
        self._architecture = architecture_of(self.metadata)
        self._sources: dict[str, list[GgufTensor]] = {}  # one, or the parts of it
        unread = self.metadata.integer("{arch}.nextn_predict_layers", 0, low=0)
        self._blocks = self.metadata.integer("{arch}.block_count") - unread
        for tensor in tensors:
            block = _BLOCK.match(tensor.name)
            beyond = int(block[1]) - self._blocks if block else -1
            if _IGNORED.fullmatch(tensor.name) or 0 <= beyond < unread:
                continue
            for name, source in self._named(tensor):
                self._sources.setdefault(name, []).append(source)
        for parts in self._sources.values():
            parts.sort(key=lambda part: part.name)
        self.tensors = {name: self._info(name, parts) for name, parts in self._sources.items()}
        beside = {tensor.name: tensor.data for tensor in tensors if len(tensor.shape) == 1}
        self.config = self._make_config(beside)
        self.generation_config = self._make_generation_config()

    def read(self, name: str) -> RawTensor:
        """See `Checkpoint.read`; the buffer is a copy, quantized values dequantized."""
        info, parts = tensor_info(self, name), self._sources[name]
        plain = len(parts) == 1 and parts[0].type in _PLAIN_TYPES
        try:
            found = [part.data if plain else self._floats(part) for part in parts]
            values = restored_values(name, found, self.config).reshape(info.shape)
        except ValueError:
            raise self._misfit(name, parts) from None
        buffer = np.array(self._restored(name, values), order="C")  # writable, private
        for part in parts:
            part.release()
        return RawTensor(info.shape, info.dtype, buffer.data.cast("B"))

    def _floats(self, tensor: GgufTensor) -> NDArray[Any]:
        try:
            values: NDArray[Any] = dequantize(tensor.data.view(np.uint8), tensor.type)
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: {tensor.name}: {tensor.type.name} is not supported"
            ) from None
        return values.reshape(tensor.shape)

    def coded(self, name: str) -> CodedMatrix | None:
        """See `Checkpoint.coded`: all types that are served, where a matrix has whole rows."""
        (n, *columns), (tensor, *others) = tensor_info(self, name).shape, self._sources[name]
        kind = code_kind(tensor.type)
        if kind is None or len(columns) != 1 or others:
            return None
        if tensor.type is GGMLQuantizationType.MXFP4 and not values_are_exact(
            tensor.type, tensor.data
        ):
            return None

        @cache
        def rows() -> NDArray[Any]:
            return self._restored(name, tensor.data)

        def read(first: int, last: int) -> Codes:
            found = rows()[first:last]
            if not values_are_exact(tensor.type, found):
                raise ModelError(
                    f"{self.path}: {tensor.name}: a factor is too large to be kept as it is;"
                    " --quantization none reads the file"
                )
            codes = read_codes(tensor.type, found)
            tensor.release()
            return codes

        return CodedMatrix(kind, n, columns[0], read)

    def _named(self, tensor: GgufTensor) -> list[tuple[str, GgufTensor]]:
        """A tensor under its Hugging Face name, or that of all experts under theirs."""
        stem, _, suffix = tensor.name.rpartition(".")
        if stem in TOP_NAMES:
            return [(f"{TOP_NAMES[stem]}.{suffix}", tensor)]
        if _GATE_UP in tensor.name and tensor.data.ndim > 1:  # the rows of both, gate's first
            halves = zip(("gate", "up"), np.array_split(tensor.data, 2, axis=1), strict=True)
            parts = [
                tensor._replace(
                    name=tensor.name.replace("gate_up", which),
                    shape=(tensor.shape[0], half.shape[1], *tensor.shape[2:]),
                    data=half,
                )
                for which, half in halves
            ]
            return [pair for part in parts for pair in self._named(part)]
        block = _BLOCK.fullmatch(tensor.name)
        name = self._architecture.layer_name(block[2]) if block else None
        if block is None or name is None:
            raise ModelError(
                f"{self.path}: tensor {tensor.name!r} is not one of a"
                f" {self._architecture.model_type} model"
            )
        name = f"model.layers.{block[1]}.{name}"
        if "{}" in name:
            return [
                (name.format(i), tensor._replace(shape=tensor.shape[1:], data=part))
                for i, part in enumerate(tensor.data)
            ]
        return [(name, tensor)]

    def _info(self, name: str, parts: list[GgufTensor]) -> TensorInfo:
        """Raises: ModelError: the parts do not make a tensor."""
        if len(parts) > (2 if name.endswith(JOINED) else 1):
            raise self._misfit(name, parts)
        try:
            shape = restored_shape(name, [part.shape for part in parts])
        except ValueError:
            raise self._misfit(name, parts) from None
        plain = _PLAIN_TYPES.get(parts[0].type, "float32") if len(parts) == 1 else "float32"
        return TensorInfo(shape, plain)

    def _misfit(self, name: str, parts: list[GgufTensor]) -> ModelError:
        found = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
        return ModelError(f"{self.path}: {found}: cannot be {name}")

    def _restored(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """The values as transformers has them, but for what `gguf_restored` does."""
        offset = self._architecture.norm_offset
        if offset and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            weight: NDArray[Any] = values - np.asarray(offset, values.dtype)
            return weight
        return self._restore_rows(name, values)

    def _restore_rows(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Undoes the reordering of q and k, which took a head's rows from (half, pair) to
        (pair, half)."""
        reordered = self._architecture.reordered
        is_query = ".q_proj." in name
        if not reordered or not (is_query or ".k_proj." in name):
            return values
        heads = self.config["num_attention_heads" if is_query else "num_key_value_heads"]
        if values.shape[0] % (2 * heads):
            raise ModelError(
                f"{self.path}: tensor {name!r} has {values.shape[0]} rows, which do not make"
                f" {heads} heads"
            )
        pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    def _make_config(self, beside: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """beside: the vectors of the file by their own names."""
        given, architecture = self.metadata, self._architecture
        if isinstance(given.raw("{arch}.attention.head_count"), list):
            raise ModelError(
                f"{self.path}: layers with different numbers of heads cannot be served"
            )
        heads = given.integer("{arch}.attention.head_count")
        hidden = given.integer("{arch}.embedding_length")
        head_dim = given.integer("{arch}.attention.key_length", max(1, hidden // heads))
        context = given.integer("{arch}.context_length")
        theta = given.number("{arch}.rope.freq_base", 10000.0)
        scaling = self._rope_scaling(beside, head_dim, theta, context)
        rope = {"rope_theta": theta, **scaling}
        config: dict[str, Any] = {
            "architectures": [architecture.class_name],
            "model_type": architecture.model_type,
            "vocab_size": tensor_info(self, "model.embed_tokens.weight").shape[0],
            "hidden_size": hidden,
            "intermediate_size": given.integer("{arch}.feed_forward_length", self._inner()),
            "num_hidden_layers": self._layers(),
            "num_attention_heads": heads,
            "num_key_value_heads": given.integer("{arch}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": given.number(
                "{arch}.attention.layer_norm_epsilon"
                if architecture.centered
                else "{arch}.attention.layer_norm_rms_epsilon"
            ),
            # transformers 5 reads rope_parameters, older readers rope_theta and rope_scaling.
            "rope_parameters": {"rope_type": "default", **rope},
            "rope_theta": theta,
            "rope_scaling": scaling or None,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.tensors,
            "use_qk_norm": "model.layers.0.self_attn.q_norm.weight" in self.tensors,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self.tensors,
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "dtype": self._common_dtype(),
            "torch_dtype": self._common_dtype(),
        }
        window = given.integer("{arch}.attention.sliding_window", 0, low=0)
        if architecture.model_type == "llama" and window:  # how Mistral's models are stored
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
            config["sliding_window"] = window
        config |= architecture.extras(given, config)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            config[f"{name}_token_id"] = given.token_id(key)
        return config

    def _inner(self) -> int | None:
        """The width of a dense MLP where the file does not say; Qwen's mixtures have none."""
        return 1 if "moe" in self._architecture.model_type else None

    def _layers(self) -> int:
        found = {name.split(".")[2] for name in self.tensors if name.startswith("model.layers.")}
        if self._blocks != len(found):
            raise ModelError(
                f"{self.path}: has tensors of {len(found)} layers, its block_count is"
                f" {self._blocks}"
            )
        return self._blocks

    def _rope_scaling(
        self, beside: Mapping[str, NDArray[Any]], head_dim: int, theta: float, context: int
    ) -> dict[str, Any]:
        given, frequencies = self.metadata, beside.get(_FREQUENCIES)
        if given.raw("{arch}.rope.dimension_sections") is not None:
            raise ModelError(f"{self.path}: positions of pictures (M-RoPE) are not supported")
        if _FACTORS[0] in beside and _FACTORS[1] in beside:
            return self._long_rope(*(beside[name] for name in _FACTORS))
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
            for name, own in _YARN.items():
                if given.raw(f"{{arch}}.rope.scaling.{own}") is not None:
                    scaling[name] = given.number(f"{{arch}}.rope.scaling.{own}")
        return scaling

    def _long_rope(self, long: NDArray[Any], short: NDArray[Any]) -> dict[str, Any]:
        given = self.metadata
        scaling = {
            "rope_type": "longrope",
            "long_factor": [shortest(value) for value in np.asarray(long, np.float32).tolist()],
            "short_factor": [shortest(value) for value in np.asarray(short, np.float32).tolist()],
            "original_max_position_embeddings": given.integer(
                "{arch}.rope.scaling.original_context_length"
            ),
        }
        if given.raw("{arch}.rope.scaling.attn_factor") is not None:
            scaling["attention_factor"] = given.number("{arch}.rope.scaling.attn_factor")
        return scaling

    def _common_dtype(self) -> str:
        """The plain type that the matrices have; quantized ones are best kept in bfloat16."""
        parts = (part for parts in self._sources.values() for part in parts)
        kinds = {part.type for part in parts if len(part.shape) == 2}
        return _PLAIN_TYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"

    def _make_generation_config(self) -> dict[str, Any]:
        given = self.metadata
        config = {k: self.config[k] for k in ("bos_token_id", "pad_token_id")}
        named = [given.token_id(name) for name in ("eos", "eot", "eom")]
        tokens = given.texts("tokenizer.ggml.tokens")
        texts = _HARMONY_ENDS if {"<|return|>", "<|call|>"} <= set(tokens) else _ENDS
        known = [i for i, text in enumerate(tokens) if text in texts]
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
