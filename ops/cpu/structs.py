"""The structs of `csrc/api.h` for ctypes, field by field in the same order."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class Linear(ctypes.Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("kind", c_int32),
        ("parts", c_int32),
        ("order", c_void_p),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("block_table", c_void_p),
        ("table_rows", c_int64),
        ("table_stride", c_int64),
        ("table_pages", c_int64),
        ("rows", c_void_p),
        ("qo_indptr", c_void_p),
        ("kv_lens", c_void_p),
        ("batch", c_int64),
        ("tokens", c_int64),
        ("page_size", c_int64),
    )


class Attention(ctypes.Structure):
    _fields_ = (
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int64),
        ("sinks", c_void_p),
    )


class Pools(ctypes.Structure):
    _fields_ = (("k", c_void_p), ("v", c_void_p), ("k_scales", c_void_p), ("v_scales", c_void_p))


class Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_float), ("reserved", c_int32))


class AttentionBlock(ctypes.Structure):
    _fields_ = (
        ("qkv", Linear),
        ("o", Linear),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("q_norm", Norm),
        ("k_norm", Norm),
        ("rope", c_void_p),
        ("rope_positions", c_int64),
        ("rotary_dim", c_int64),
        ("rope_interleaved", c_int32),
        ("qk_norm_whole", c_int32),
        ("attention", Attention),
    )


class MlpBlock(ctypes.Structure):
    _fields_ = (
        ("gate_up", Linear),
        ("down", Linear),
        ("activation", c_int32),
        ("reserved", c_int32),
    )


class Block(ctypes.Structure):
    _fields_ = (
        ("norm", Norm),
        ("out_norm", Norm),
        ("attention", ctypes.POINTER(AttentionBlock)),
        ("mlp", ctypes.POINTER(MlpBlock)),
        ("residual_scale", c_float),
        ("reserved", c_int32),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        ("vocab", c_int64),
        ("hidden", c_int64),
        ("blocks", c_int64),
        ("embedding_type", c_int32),
        ("embed_scale", c_float),
        ("logit_scale", c_float),
        ("logit_soft_cap", c_float),
        ("embedding", c_void_p),
        ("embedding_rows", c_int64),
        ("block", ctypes.POINTER(Block)),
        ("final_norm", Norm),
        ("lm_head", Linear),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("batch", Batch),
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("logit_tokens", c_void_p),
        ("logits", c_int64),
        ("pools", ctypes.POINTER(Pools)),
        ("pool_slots", c_int64),
        ("pool_type", c_int64),
        ("out", c_void_p),
    )


class Sampling(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("batch", c_int64),
        ("vocab", c_int64),
        ("stride", c_int64),
        ("temperature", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
        ("seed", c_void_p),
        ("position", c_void_p),
        ("out", c_void_p),
        ("bias_row", c_void_p),
        ("bias_token", c_void_p),
        ("bias_value", c_void_p),
        ("biases", c_int64),
        ("state_rows", c_void_p),
        ("repetition", c_void_p),
        ("presence", c_void_p),
        ("frequency", c_void_p),
        ("prompt_mask", c_void_p),
        ("output_counts", c_void_p),
        ("states", c_int64),
        ("banned_row", c_void_p),
        ("banned_token", c_void_p),
        ("banned", c_int64),
        ("mask_rows", c_void_p),
        ("mask_bits", c_void_p),
        ("masks", c_int64),
        ("mask_words", c_int64),
    )


class Expert(ctypes.Structure):
    _fields_ = (("gate_up", Linear), ("down", Linear))


class Experts(ctypes.Structure):
    _fields_ = (
        ("expert", ctypes.POINTER(Expert)),
        ("count", c_int64),
        ("activation", c_int32),
        ("reserved", c_int32),
    )


class ExpertRows(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("tokens", c_int64),
        ("stride", c_int64),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("top_k", c_int64),
        ("out", c_void_p),
        ("type", c_int32),
        ("reserved", c_int32),
    )


class Codes(ctypes.Structure):
    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("minima", c_void_p),
        ("factors", c_void_p),
        ("minimum_factors", c_void_p),
        ("float_scales", c_void_p),
        ("table", c_void_p),
    )


class Recurrent(ctypes.Structure):
    _fields_ = (
        ("sources", c_void_p),
        ("starts", c_void_p),
        ("stops", c_void_p),
        ("stop_tokens", c_void_p),
        ("stop_slots", c_void_p),
        ("batch", c_int64),
        ("tokens", c_int64),
        ("stop_count", c_int64),
        ("before", c_void_p),
        ("states", c_void_p),
        ("before_slots", c_int64),
        ("slots", c_int64),
    )


class Conv(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("stride", c_int64),
        ("channels", c_int64),
        ("kernel", c_int64),
        ("type", c_int32),
        ("reserved", c_int32),
    )


class Delta(ctypes.Structure):
    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("decay", c_void_p),
        ("rate", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("q_head_stride", c_int64),
        ("k_stride", c_int64),
        ("k_head_stride", c_int64),
        ("v_stride", c_int64),
        ("v_head_stride", c_int64),
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
    )


# As `loom_struct_bytes` counts them.
IN_ORDER = (
    *(Linear, Batch, Attention, Pools, Norm, AttentionBlock, MlpBlock, Block),
    *(Decoder, Step, Sampling, Expert, Experts, ExpertRows, Codes),
    *(Recurrent, Conv, Delta),
)
