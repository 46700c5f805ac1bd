"""Reads a checkpoint into a `DecoderModel`, strict about names and shapes.

A tensor that the family does not name, or one of another shape than the config says, stops the
start: both mean that the model computed would not be the model that was published.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from ops.coded_weight import CODED_ROWS, CodedWeight, are_in_one_order
from ops.op_set import GroupedWeight, PackedEmbedding
from runtime.checkpoints.quantized.in_blocks import in_blocks
from runtime.errors import ModelError
from runtime.execution.device import empty
from runtime.execution.grouped import grouped_weight
from runtime.models.sources import replaced, sources_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from ops.coded_weight import CodedMatrix, GroupedMatrix
    from ops.decoder import DecoderModel
    from ops.op_set import OpSet
    from runtime.checkpoints.checkpoint import Checkpoint
    from runtime.models.family import Family
    from runtime.models.sources import Source
    from runtime.rope_layout import RopeLayout

# Buffers that old releases saved beside the weights; their values follow from the config.
_BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
_PROGRESS_S = 2.0
# What a model keeps beside what its layers and its last norm load.
_EMBEDDING, _HEAD = "embedding", "lm_head"
_KEPT = CodedWeight, GroupedWeight  # weights as integers


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
        keeps_codes: str | None,
        keeps_floats: bool,
        progress: Callable[[str], None],
    ) -> None:
        self.ops = ops
        self.keeps_codes = keeps_codes
        self.keeps_floats = keeps_floats
        self.quantization = quantization
        self.rope_layout = rope_layout
        self.prefix = ""
        self.kept: Mapping[str, Any] | None = None
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._left = dict.fromkeys(checkpoint.tensors)
        self._progress = progress
        self._reported = time.monotonic()
        self._shared: dict[int, Tensor] = {}

    def skip(self, name: str) -> None:
        self._left.pop(name, None)

    def skip_all(self, prefix: str) -> None:
        for name in [name for name in self._left if name.startswith(prefix)]:
            self.skip(name)

    def take(
        self, name: str, shape: tuple[int, ...], *, wide: bool = False, exact: bool = False
    ) -> Tensor:
        """Raises: ModelError: no such tensor, not of this shape, or not of a float type."""
        taken = self._empty((name,), shape, wide, exact)
        self._read(name, taken)
        return taken

    def stacked(
        self,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: tuple[int, ...],
        *,
        wide: bool = False,
        exact: bool = False,
    ) -> Tensor:
        """See `WeightReader.stacked`."""
        stack = self._empty(names, (sum(rows), *columns), wide, exact)
        for name, part in zip(names, stack.split(rows), strict=True):
            self._read(name, part)
        return stack

    def _empty(
        self, names: tuple[str, ...], shape: tuple[int, ...], wide: bool, exact: bool
    ) -> Tensor:
        """Memory for these tensors, in the type that they are taken in."""
        dtype = torch.float32 if wide else self._dtype
        if exact and self.keeps_floats:
            infos = (self._checkpoint.tensors.get(self.prefix + name) for name in names)
            stored = {info.dtype for info in infos if info is not None}
            if len(shape) == 1 and stored != {"bfloat16"}:
                dtype = torch.float32
            elif stored == {"float16"} and not wide:
                dtype = torch.float16
        return empty(shape, device=self._device, dtype=dtype)

    def _read(self, name: str, out: Tensor) -> None:
        """Copies a tensor, since a view would keep the whole mapped file resident for as long as it
        serves."""
        name = self.prefix + name
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise ModelError(f"{self._checkpoint.path}: has no tensor {name!r}")
        if info.shape != out.shape:
            raise ModelError(
                f"{self._checkpoint.path}: tensor {name!r} has shape {list(info.shape)},"
                f" the config asks for {list(out.shape)}"
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
        out.copy_(torch.frombuffer(raw.buffer, dtype=dtype).view(raw.shape))
        raw.release()

    def coded(
        self, names: tuple[str, ...], outputs: tuple[int, ...], inputs: int
    ) -> CodedWeight | GroupedWeight | None:
        """See `WeightReader.coded`. A tensor of another shape is left to `take`, which refuses
        it."""
        if not self.keeps_codes:
            return None
        names = tuple(self.prefix + name for name in names)
        if any(name not in self._checkpoint.tensors for name in names):
            return None
        found = [self._checkpoint.coded(name) for name in names]
        shapes = tuple(matrix and (matrix.n, matrix.k) for matrix in found)
        if shapes != tuple((n, inputs) for n in outputs):
            return None
        self._report()
        kept: CodedWeight | GroupedWeight | None
        if self.keeps_codes == "groups":
            kept = grouped_weight(found, self._device)
        else:
            kept = _in_panels(found)
        if kept is not None:
            for name in names:
                self._left.pop(name, None)
        return kept

    def _report(self) -> None:
        if time.monotonic() - self._reported > _PROGRESS_S:
            self._reported = time.monotonic()
            total = len(self._checkpoint.tensors)
            self._progress(f"loading: {total - len(self._left) + 1} of {total} tensors")

    def shared(self, source: Source, make: Callable[[], Tensor]) -> Tensor:
        if id(source) not in self._shared:
            self._shared[id(source)] = make().to(self._device)
        return self._shared[id(source)]

    def load(self, source: Source) -> Any:
        """What stands for it in the model: as the checkpoint has it, or as it was kept."""
        if self.kept is None or not source.kept:
            return source.load(self)
        return self.kept[self.name_of(source)]

    def name_of(self, source: Source) -> str:
        """The name of what a source loads, among all that the model keeps."""
        return f"{self.prefix}{source!r}"

    def check_all_taken(self) -> None:
        left = [name for name in self._left if not name.endswith(_BUFFERS)]
        if left:
            raise ModelError(
                f"{self._checkpoint.path}: holds {len(left)} tensors that its model type does not"
                f" have, the first of them {left[0]!r}"
            )


def _in_panels(found: Sequence[CodedMatrix | GroupedMatrix | None]) -> CodedWeight | None:
    parts = tuple(part for part in map(in_blocks, found) if part is not None)
    whole = len(parts) == len(found) and not any(part.n % CODED_ROWS for part in parts[:-1])
    alike = are_in_one_order(parts) and len({part.of_floats for part in parts}) == 1
    return CodedWeight(parts) if whole and alike else None


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
        keeps_codes: str | None = None,
        keeps_floats: bool = False,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """keeps_codes, keeps_floats: see `Device`."""
        self._family = family
        self._checkpoint = checkpoint
        self._ops = ops
        self._dtype = dtype
        self._reader = _Reader(
            checkpoint,
            ops,
            device=device,
            dtype=dtype,
            rope_layout=rope_layout,
            quantization=quantization,
            keeps_codes=keeps_codes,
            keeps_floats=keeps_floats,
            progress=progress,
        )

    @property
    def weights(self) -> int:
        """Elements of all tensors of the checkpoint."""
        return sum(math.prod(info.shape) for info in self._checkpoint.tensors.values())

    def load(self, sampled_ids: int, kept: Mapping[str, Any] | None = None) -> DecoderModel:
        """The model; its `vocab_size` is the number of ids that can be sampled.

        Args:
            sampled_ids: ids from here on cannot be sampled: the tokenizer has no text for them,
                though the embedding may be padded to more rows.
            kept: what `pack` gave, by name; the checkpoint's tensors are then not read.
        Raises:
            ModelError: a tensor is missing, of the wrong shape or type, or unknown.
        """
        reader, model = self._reader, self._family.model
        reader.kept = kept
        if kept is None:
            embedding = self._embedding()
            lm_head = self._head(embedding, sampled_ids)
        else:
            embedding = kept[_EMBEDDING]
            lm_head = self._shared_head(embedding, sampled_ids) or kept[_HEAD]
        layers: list[Any] = []
        for reader.prefix, described in self._described():
            layers.append(replaced(described, reader.load))
        if kept is None:
            self._check_all_taken()
        final_norm = layers.pop()
        return replace(
            model,
            vocab_size=min(sampled_ids, model.vocab_size),
            embedding=embedding,
            layers=tuple(layers),
            final_norm=final_norm,
            lm_head=lm_head,
        )

    def pack(self, sampled_ids: int, keep: Callable[[str, Any], None]) -> None:
        """Gives all that a model of this checkpoint keeps, one by one under its name, and holds on
        to none of it. Args and errors: see `load`."""
        reader = self._reader
        embedding = self._embedding()
        keep(_EMBEDDING, embedding)
        if self._shared_head(embedding, sampled_ids) is None:
            keep(_HEAD, self._head(embedding, sampled_ids))
        del embedding
        for reader.prefix, described in self._described():
            for source in sources_in(described):
                if source.kept:
                    keep(reader.name_of(source), source.load(reader))
        self._check_all_taken()

    @property
    def _root(self) -> str:
        """Some folders are saved from the bare model, without the head's "model." prefix."""
        return "model." if "model.embed_tokens.weight" in self._checkpoint.tensors else ""

    def _described(self) -> Iterator[tuple[str, Any]]:
        """The layers and the norm behind them, each with what its names begin with."""
        for i, layer in enumerate(self._family.model.layers):
            yield f"{self._root}layers.{i}.", layer
        yield self._root, self._family.model.final_norm

    def _embedding(self) -> Any:
        """The embedding, as `OpSet.embed` takes it: packed where it is kept in another type than
        the model's."""
        self._reader.prefix = self._root
        weight = self._family.model.embedding.weight(self._reader)
        if not isinstance(weight, _KEPT) and weight.dtype is self._dtype:
            return weight
        packed: Any = self._ops.pack_linear(cast("Any", weight))
        return PackedEmbedding(packed, str(self._dtype).removeprefix("torch."))

    def _shared_head(self, embedding: Any, sampled_ids: int) -> Any:
        """The output layer, where it is the first rows of a packed embedding; None: it is not."""
        if not self._family.tied or not isinstance(embedding, PackedEmbedding):
            return None
        self._reader.skip("lm_head.weight")  # some files hold the copy
        return replace(embedding.linear, n=min(sampled_ids, self._family.model.vocab_size))

    def _head(self, embedding: Any, sampled_ids: int) -> Any:
        """The output layer, packed, without the rows of ids that are never sampled."""
        shared = self._shared_head(embedding, sampled_ids)
        if shared is not None:
            return shared
        model, reader = self._family.model, self._reader
        reader.prefix, count = "", min(sampled_ids, model.vocab_size)
        if self._family.tied:
            reader.skip("lm_head.weight")
            weight = embedding
        else:
            weight = model.lm_head.weight(reader)
            if isinstance(weight, _KEPT):
                return self._ops.pack_linear(cast("Any", weight.first_rows(count)))
        # The output layer's errors go straight into the choice: never below eight bits.
        return self._ops.pack_linear(
            weight[:count].contiguous(), quantization="int8" if reader.quantization else None
        )

    def _check_all_taken(self) -> None:
        count = len(self._family.model.layers)
        for i in range(count, count + self._family.unread_layers):
            self._reader.skip_all(f"{self._root}layers.{i}.")
        if self._family.unread:
            self._reader.skip_all(self._family.unread)
        self._reader.check_all_taken()
