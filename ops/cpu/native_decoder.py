"""A whole decoder as one native call (csrc/decoder.cpp)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from ops.blocks.attention import Attention
from ops.cpu import native_blocks, structs
from ops.cpu.arguments import CODES, FLOATS, POOLS, NativeLinear, batch_struct, check
from ops.cpu.library import TYPES, Library
from ops.kv_codes import scale_shapes
from ops.op_set import PackedEmbedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ops.blocks.block import DecoderStep
    from ops.decoder import DecoderModel


_PACKED_EMBEDDING = -1  # beside the types of tensors


def fits(model: DecoderModel) -> bool:
    """Whether the native step covers this model; if not, it runs op by op."""
    return (
        isinstance(model.lm_head, NativeLinear)
        and _embedding_fits(model.embedding)
        and native_blocks.norm_fits(model.final_norm)
        and any(isinstance(block.mixer, Attention) for block in model.blocks)
        and all(native_blocks.fits(block) for block in model.blocks)
    )


def _embedding_fits(embedding: Any) -> bool:
    return isinstance(embedding, PackedEmbedding) or embedding.dtype in FLOATS


def _embedding_fields(embedding: Any, hidden: int, kept: native_blocks.Kept) -> dict[str, Any]:
    """Those of structs.Decoder that tell of it."""
    if isinstance(embedding, PackedEmbedding):
        rows = embedding.linear
        struct = kept.keep(kept.linear("embedding", rows, rows.n, hidden))
        fields = _PACKED_EMBEDDING, ctypes.addressof(struct), rows.n
    else:
        check("embedding", embedding, (None, hidden), *FLOATS)
        pointer = kept.keep(embedding).data_ptr()
        fields = TYPES[embedding.dtype], pointer, embedding.shape[0]
    names = "embedding_type", "embedding", "embedding_rows"
    return dict(zip(names, fields, strict=True))


class NativeDecoder:
    """See `ops.decoder.CompiledDecoder`. Keeps the weights it points to alive.

    Between linear layers everything is float32: only inputs of linear layers, queries and what
    goes to the pool are rounded, so results are closer to float32 ones than an op by op bfloat16
    run. A token's result depends on its own sequence alone, to the bit.
    """

    def __init__(self, library: Library, model: DecoderModel) -> None:
        """Raises: ValueError: a weight has another shape than its block says."""
        hidden = model.hidden_size
        self._library = library
        self._vocab_size = model.vocab_size
        self._blocks = model.blocks
        self._kept = kept = native_blocks.Kept(hidden)
        count = len(self._blocks)
        structs_of_blocks = [native_blocks.block_struct(block, kept) for block in self._blocks]
        self._pools = (structs.Pools * count)()
        self._pool_slots, self._pool_type = 0, 0
        self._caches: Sequence[tuple[Tensor, ...]] | None = None
        self._decoder = structs.Decoder(
            vocab=model.vocab_size,
            hidden=hidden,
            blocks=count,
            embed_scale=model.embed_scale,
            logit_scale=model.logit_scale,
            logit_soft_cap=model.logit_soft_cap,
            **_embedding_fields(model.embedding, hidden, kept),
            block=(structs.Block * count)(*structs_of_blocks),
            final_norm=kept.norm("final_norm", model.final_norm, hidden),
            lm_head=kept.linear("lm_head", model.lm_head, model.vocab_size, hidden),
        )

    def __call__(self, step: DecoderStep) -> Tensor:
        tokens = step.input_ids.shape[0]
        for name in ("input_ids", "positions", "slots"):
            check(name, getattr(step, name), (tokens,), torch.int64)
        check("logit_tokens", step.logit_tokens, (None,), torch.int64)
        if self._caches is not step.caches:
            self._take_caches(step.caches)
        wanted = step.logit_tokens.shape[0]
        out = torch.empty((wanted, self._vocab_size), dtype=torch.float32)
        if tokens:
            struct = structs.Step(
                *(batch_struct(step.attention, tokens), step.input_ids.data_ptr()),
                *(step.positions.data_ptr(), step.slots.data_ptr()),
                *(step.logit_tokens.data_ptr(), wanted),
                *(self._pools, self._pool_slots, self._pool_type, out.data_ptr()),
            )
            self._library.call("loom_decode_step", self._decoder, struct)
        return out

    def _take_caches(self, caches: Sequence[tuple[Tensor, ...]]) -> None:
        """Checks and remembers the pools, which stay the same for the life of a runner."""
        if len(caches) != len(self._blocks):
            raise ValueError(f"caches: {len(caches)}, expected one per block, {len(self._blocks)}")
        first = next(cache[0] for cache in caches if cache)
        slots, coded = first.shape[0], first.dtype in CODES
        for i, (block, cache) in enumerate(zip(self._blocks, caches, strict=True)):
            shapes = block.mixer.cache_shapes
            scales = scale_shapes(shapes) if coded else ()
            expected = len(shapes) + len(scales)
            if len(cache) != expected:
                raise ValueError(f"caches[{i}]: {len(cache)} tensors, expected {expected}")
            for j, (pool, shape) in enumerate(zip(cache, (*shapes, *scales), strict=True)):
                dtypes = POOLS if pool is first else (first.dtype,)
                dtypes = (torch.float32,) if j >= len(shapes) else dtypes
                check(f"caches[{i}][{j}]", pool, (slots, *shape), *dtypes)
                # A step reads rows scattered over the pools.
                self._library.use_large_pages(pool)
            if cache:
                self._pools[i] = structs.Pools(*(pool.data_ptr() for pool in cache))
        self._pool_slots, self._pool_type = slots, TYPES[first.dtype]
        self._caches = caches
