"""Reads a checkpoint into `DecoderWeights`, strict about names and shapes.

A tensor that the family does not name, or one of another shape than the config says, stops the
start: both mean that the model computed would not be the model that was published.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ops.op_set import AttentionSpec, DecoderWeights, LayerWeights
from runtime.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ops.op_set import DecoderSpec, OpSet
    from runtime.checkpoints.checkpoint import Checkpoint
    from runtime.models.family import Family
    from runtime.models.rope import RopeSpec

# Buffers that old releases saved beside the weights; their values follow from the config.
_BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
_PROGRESS_S = 2.0


class _Reader:
    """Takes named tensors out of a checkpoint and remembers which were taken."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._left = dict.fromkeys(checkpoint.tensors)
        # Some folders are saved from the bare model, without the head's "model." prefix.
        self.prefix = "model." if "model.embed_tokens.weight" in self._left else ""

    def has(self, name: str) -> bool:
        return name in self._left

    def skip(self, name: str) -> None:
        self._left.pop(name, None)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises: ModelError: no such tensor, not of this shape, or not of a float type."""
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise ModelError(f"{self._checkpoint.path}: has no tensor {name!r}")
        if info.shape != shape:
            raise ModelError(
                f"{self._checkpoint.path}: tensor {name!r} has shape {list(info.shape)},"
                f" the config asks for {list(shape)}"
            )
        dtype = getattr(torch, info.dtype)
        if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise ModelError(
                f"{self._checkpoint.path}: tensor {name!r} is of type {info.dtype}; quantized"
                " checkpoints are not supported"
            )
        raw = self._checkpoint.read(name)
        self._left.pop(name, None)
        tensor = torch.frombuffer(raw.buffer, dtype=dtype).view(raw.shape)
        # A copy, since a view would keep the whole mapped file resident for as long as it serves.
        return tensor.to(self._device, self._dtype, copy=True)

    def stack(self, names: tuple[str, ...], suffix: str, shapes: list[tuple[int, ...]]) -> Tensor:
        """Several tensors one below the other. One name takes the whole stack."""
        if len(names) == 1:
            total = (sum(shape[0] for shape in shapes), *shapes[0][1:])
            return self.take(names[0] + suffix, total)
        parts = [self.take(n + suffix, shape) for n, shape in zip(names, shapes, strict=True)]
        return torch.cat(parts)

    def check_all_taken(self) -> None:
        left = [name for name in self._left if not name.endswith(_BUFFERS)]
        if left:
            raise ModelError(
                f"{self._checkpoint.path}: holds {len(left)} tensors that its model type does not"
                f" have, the first of them {left[0]!r}"
            )


class WeightLoader:
    """Loads one model. Used once."""

    def __init__(
        self,
        family: Family,
        checkpoint: Checkpoint,
        ops: OpSet,
        *,
        device: torch.device,
        dtype: torch.dtype,
        context_length: int,
        quantization: str | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._family = family
        self._spec = family.spec
        self._ops = ops
        self._device = device
        self._context_length = context_length
        self._quantization = quantization
        self._progress = progress
        self._reader = _Reader(checkpoint, device, dtype)
        self._ropes: dict[int, Tensor] = {}

    def load(self, sampled_ids: int) -> tuple[DecoderSpec, DecoderWeights]:
        """The weights, and the spec whose `vocab_size` is the number of ids that can be sampled.

        Args:
            sampled_ids: ids from here on cannot be sampled: the tokenizer has no text for them,
                though the embedding may be padded to more rows.
        Raises:
            ModelError: a tensor is missing, of the wrong shape or type, or unknown.
        """
        spec, reader = self._spec, self._reader
        shape = (spec.vocab_size, spec.hidden_size)
        embedding = reader.take(f"{reader.prefix}embed_tokens.weight", shape)
        weights = DecoderWeights(embedding)
        reported = time.monotonic()
        for i in range(spec.num_layers):
            weights.layers.append(self._layer(i))
            if time.monotonic() - reported > _PROGRESS_S:
                reported = time.monotonic()
                self._progress(f"loading layer {i + 1} of {spec.num_layers}")
        weights.final_norm = self._norm(f"{reader.prefix}norm")
        vocab_size = min(sampled_ids, spec.vocab_size)
        head = self._head(embedding, shape)[:vocab_size]
        # The output layer's errors go straight into the choice: never below eight bits.
        weights.lm_head = self._ops.pack_linear(
            head.contiguous(), quantization="int8" if self._quantization else None
        )
        reader.check_all_taken()
        return replace(spec, vocab_size=vocab_size), weights

    def _head(self, embedding: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self._family.tied:
            self._reader.skip("lm_head.weight")  # some files hold the copy
            return embedding
        return self._reader.take("lm_head.weight", shape)

    def _norm(self, name: str, size: int | None = None) -> Tensor:
        weight = self._reader.take(f"{name}.weight", (size or self._spec.hidden_size,))
        offset = self._family.norm_offset
        return (weight.float() + offset).to(weight.dtype) if offset else weight

    def _linear(
        self, names: tuple[str, ...], outputs: list[int], inputs: int, *, bias: bool
    ) -> Any:
        shapes: list[tuple[int, ...]] = [(n, inputs) for n in outputs]
        weight = self._reader.stack(names, ".weight", shapes)
        added = self._reader.stack(names, ".bias", [(n,) for n in outputs]) if bias else None
        return self._ops.pack_linear(weight, added, quantization=self._quantization)

    def _layer(self, i: int) -> LayerWeights:
        family, spec, names = self._family, self._spec, self._family.names
        at = f"{self._reader.prefix}layers.{i}."
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        hidden, inner = spec.hidden_size, spec.intermediate_size
        qkv = tuple(at + name for name in names.qkv)
        gate_up = tuple(at + name for name in names.gate_up)

        def optional_norm(name: str | None, size: int) -> Tensor | None:
            return None if name is None else self._norm(at + name, size)

        return LayerWeights(
            input_norm=self._norm(at + names.input_norm),
            qkv=self._linear(qkv, [q, kv, kv], hidden, bias=family.qkv_bias),
            o=self._linear((at + names.o,), [hidden], q, bias=family.o_bias),
            post_attention_norm=self._norm(at + names.post_attention_norm),
            gate_up=self._linear(gate_up, [inner, inner], hidden, bias=family.mlp_bias),
            down=self._linear((at + names.down,), [hidden], inner, bias=family.mlp_bias),
            rope=self._rope(family.ropes[i]),
            attention=AttentionSpec(spec.scale, spec.windows[i], spec.attention_soft_cap),
            q_norm=optional_norm(names.q_norm, spec.head_dim),
            k_norm=optional_norm(names.k_norm, spec.head_dim),
            attention_out_norm=optional_norm(names.attention_out_norm, hidden),
            mlp_out_norm=optional_norm(names.mlp_out_norm, hidden),
        )

    def _rope(self, rope: RopeSpec | None) -> Tensor | None:
        """Layers of the same rope share one table."""
        if rope is None:
            return None
        if id(rope) not in self._ropes:
            self._ropes[id(rope)] = rope.table(self._context_length).to(self._device)
        return self._ropes[id(rope)]
