"""Reads a checkpoint into a `DecoderModel`, strict about names and shapes.

A tensor that the family does not name, or one of another shape than the config says, stops the
start: both mean that the model computed would not be the model that was published.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from runtime.errors import ModelError
from runtime.models.sources import loaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ops.blocks.block import Block
    from ops.decoder import DecoderModel
    from ops.op_set import OpSet
    from runtime.checkpoints.checkpoint import Checkpoint
    from runtime.models.family import Family
    from runtime.models.sources import Source
    from runtime.rope_layout import RopeLayout

# Buffers that old releases saved beside the weights; their values follow from the config.
_BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
_PROGRESS_S = 2.0


class _Reader:
    """Takes named tensors out of a checkpoint and remembers which were taken: a `WeightReader`.

    Args:
        prefix: of the names that are taken, "model.layers.3." for example.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: OpSet,
        *,
        device: torch.device,
        dtype: torch.dtype,
        rope_layout: RopeLayout,
        quantization: str | None,
        progress: Callable[[str], None],
    ) -> None:
        self.ops = ops
        self.quantization = quantization
        self.rope_layout = rope_layout
        self.prefix = ""
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._left = dict.fromkeys(checkpoint.tensors)
        self._progress = progress
        self._reported = time.monotonic()
        self._shared: dict[int, Tensor] = {}

    def has(self, name: str) -> bool:
        return name in self._left

    def skip(self, name: str) -> None:
        self._left.pop(name, None)

    def skip_all(self, prefix: str) -> None:
        for name in [name for name in self._left if name.startswith(prefix)]:
            self.skip(name)

    def take(self, name: str, shape: tuple[int, ...], *, wide: bool = False) -> Tensor:
        """Raises: ModelError: no such tensor, not of this shape, or not of a float type."""
        name = self.prefix + name
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
                f"{self._checkpoint.path}: tensor {name!r} is of type {info.dtype}, and the config"
                " names no quantization that it belongs to"
            )
        self._report()
        raw = self._checkpoint.read(name)
        self._left.pop(name, None)
        tensor = torch.frombuffer(raw.buffer, dtype=dtype).view(raw.shape)
        # A copy, since a view would keep the whole mapped file resident for as long as it serves.
        copied = tensor.to(self._device, torch.float32 if wide else self._dtype, copy=True)
        raw.release()
        return copied

    def _report(self) -> None:
        if time.monotonic() - self._reported > _PROGRESS_S:
            self._reported = time.monotonic()
            total = len(self._checkpoint.tensors)
            self._progress(f"loading: {total - len(self._left) + 1} of {total} tensors")

    def shared(self, source: Source, make: Callable[[], Tensor]) -> Tensor:
        if id(source) not in self._shared:
            self._shared[id(source)] = make().to(self._device)
        return self._shared[id(source)]

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
        rope_layout: RopeLayout,
        quantization: str | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._family = family
        self._ops = ops
        self._reader = _Reader(
            checkpoint,
            ops,
            device=device,
            dtype=dtype,
            rope_layout=rope_layout,
            quantization=quantization,
            progress=progress,
        )

    def load(self, sampled_ids: int) -> DecoderModel:
        """The model; its `vocab_size` is the number of ids that can be sampled.

        Args:
            sampled_ids: ids from here on cannot be sampled: the tokenizer has no text for them,
                though the embedding may be padded to more rows.
        Raises:
            ModelError: a tensor is missing, of the wrong shape or type, or unknown.
        """
        reader, model = self._reader, self._family.model
        # Some folders are saved from the bare model, without the head's "model." prefix.
        root = "model." if reader.has("model.embed_tokens.weight") else ""
        reader.prefix = root
        embedding = model.embedding.read(reader, ".weight", model.hidden_size)
        final_norm = loaded(model.final_norm, reader)
        layers = self._layers(root)
        reader.prefix = ""
        vocab_size = min(sampled_ids, model.vocab_size)
        lm_head = self._head(embedding, vocab_size)
        count = len(model.layers)
        for i in range(count, count + self._family.unread_layers):
            reader.skip_all(f"{root}layers.{i}.")
        if self._family.unread:
            reader.skip_all(self._family.unread)
        reader.check_all_taken()
        return replace(
            model,
            vocab_size=vocab_size,
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            lm_head=lm_head,
        )

    def _layers(self, root: str) -> tuple[tuple[Block, ...], ...]:
        layers = []
        for i, layer in enumerate(self._family.model.layers):
            self._reader.prefix = f"{root}layers.{i}."
            layers.append(loaded(layer, self._reader))
        return tuple(layers)

    def _head(self, embedding: Tensor, vocab_size: int) -> Any:
        """The output layer, packed, without the rows of ids that are never sampled."""
        model, reader = self._family.model, self._reader
        if self._family.tied:
            reader.skip("lm_head.weight")  # some files hold the copy
            weight = embedding
        else:
            weight = model.lm_head.read(reader, ".weight", model.hidden_size)
        # The output layer's errors go straight into the choice: never below eight bits.
        return self._ops.pack_linear(
            weight[:vocab_size].contiguous(), quantization="int8" if reader.quantization else None
        )
