"""Every operation in plain fp32 torch, written to be obviously right.

This is the truth that the other backends are tested against, and the place where two things are
fixed for all of them: the sampler's order of operations (`sample`) and the random generator
(`philox_uniform`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import kv_codes
from ops.blocks.dense_mlp import act_and_mul

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ops.decoder import CompiledDecoder, DecoderModel
    from ops.op_set import (
        AttentionBatch,
        AttentionSpec,
        Expert,
        HeadNorm,
        KvScales,
        RecurrentBatch,
        Routing,
        SamplingTensors,
    )

NEG_INF = float("-inf")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def rotary(q: Tensor, k: Tensor, positions: Tensor, rope: Tensor, *, interleaved: bool) -> None:
    dim = rope.shape[-1]
    cos, sin = rope[positions].float().unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R / 2]
    for x in (q, k):
        turned = x[..., :dim].float()
        a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
        new_a, new_b = a * cos - b * sin, b * cos + a * sin
        if interleaved:
            x[..., :dim] = torch.stack((new_a, new_b), dim=-1).flatten(-2).to(x.dtype)
        else:
            x[..., :dim] = torch.cat((new_a, new_b), dim=-1).to(x.dtype)


def store_kv(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor,
    scales: KvScales | None = None,
) -> None:  # fmt: skip
    live = slots >= 0
    k_scales, v_scales = scales or (None, None)
    kv_codes.scatter(k[live], k_pool, k_scales, slots[live])
    kv_codes.scatter(v[live], v_pool, v_scales, slots[live])


def place_heads(
    ops: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
    rope: Tensor | None,
    interleaved: bool,
    scales: KvScales | None = None,
) -> Tensor:
    """`OpSet.place_heads` op by op."""
    if q_norm is not None:
        q = ops.rms_norm(q, q_norm.weight, q_norm.eps)
    if k_norm is not None:
        k = ops.rms_norm(k, k_norm.weight, k_norm.eps)
    if rope is not None:
        ops.rotary(q, k, positions, rope, interleaved=interleaved)
    ops.store_kv(k, v, k_pool, v_pool, slots, scales)
    return q


def row_slots(batch: AttentionBatch, b: int) -> Tensor:
    """The slots of batch row b's keys in position order, [kv_len] int64."""
    kv_len = int(batch.kv_lens[b])
    positions = torch.arange(kv_len, device=batch.block_table.device)
    pages = batch.block_table[int(batch.rows[b])].long()[positions // batch.page_size]
    return pages * batch.page_size + positions % batch.page_size


def extend_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, spec: AttentionSpec,
    scales: KvScales | None = None,
) -> Tensor:  # fmt: skip
    """softmax(mask(cap(q k^T * scale)) | sinks) v, row by row (Vaswani et al. 2017, eq. 1)."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    groups = q.shape[1] // k_pool.shape[1]
    k_scales, v_scales = scales or (None, None)
    for b in range(batch.rows.shape[0]):
        lo, hi = int(batch.qo_indptr[b]), int(batch.qo_indptr[b + 1])
        if lo == hi:
            continue
        slots = row_slots(batch, b)
        keys = kv_codes.gather(k_pool, k_scales, slots).float()
        values = kv_codes.gather(v_pool, v_scales, slots).float()
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))  # [K, HQ, D]
        scores = torch.einsum("qhd,khd->hqk", q[lo:hi].float(), keys) * spec.scale
        if spec.soft_cap > 0:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        at = torch.arange(slots.shape[0] - (hi - lo), slots.shape[0], device=q.device)[:, None]
        key_at = torch.arange(slots.shape[0], device=q.device)[None]
        seen = key_at <= at
        if spec.window > 0:
            seen &= key_at > at - spec.window
        scores = scores.masked_fill(~seen, NEG_INF)
        if spec.sinks is not None:
            sink = spec.sinks.float()[:, None, None].expand(-1, hi - lo, 1)
            weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        # A masked key has weight 0, but 0 * NaN is NaN: what is masked must not be read at all.
        values = values.masked_fill(~seen.any(0)[:, None, None], 0.0)
        out[lo:hi] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def mixed_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: AttentionBatch,
    spec: AttentionSpec,
    scales: KvScales | None = None,
    attend: Callable[..., Tensor] = extend_attention,
) -> Tensor:
    """attend: of either kind of rows."""
    assert batch.decode is not None
    decoding, first, last = batch.decode.rows.shape[0], *batch.qo_indptr[[0, -1]].tolist()
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    out[:decoding] = attend(q[:decoding], k_pool, v_pool, batch.decode, spec, scales)
    out[first:last] = attend(q, k_pool, v_pool, batch, spec, scales)[first:last]
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor, *, tanh: bool) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh" if tanh else "none") * up).to(x.dtype)


def clamped_silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(x.dtype)


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    scores = wide.softmax(-1) if routing.score == "softmax" else wide.sigmoid()
    choice = scores if correction is None else scores + correction
    if routing.groups > 1:
        choice = _of_best_groups(choice, routing)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return ids, weights * routing.scale


def _of_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """The scores [T, E], those outside a token's best groups at -inf."""
    grouped = choice.view(choice.shape[0], routing.groups, -1)
    top = 2 if routing.group_score == "top2" else 1
    score = grouped.topk(top, dim=-1).values.sum(-1)
    best = score.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    kept = torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~kept[..., None], NEG_INF).flatten(1)


_MUL_A, _MUL_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox_uniform(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Uniform numbers in (0, 1) for every (row, token): [B, V] float32.

    Philox4x32-10 (Salmon et al., SC 2011) with key = (seed low word, seed high word) and counter =
    (token // 4, position low word, position high word, 0); word token % 4 of the result belongs to
    the token. Its upper 23 bits b give (b + 0.5) / 2**23, exact in float32 (with 24 bits the half
    would round the largest ones up to 1, whose Gumbel noise is infinite). A number depends on
    (seed, position, token) and on nothing else: not on the batch, the row or the backend.
    """
    device = seed.device
    groups = (vocab_size + 3) // 4
    c0 = torch.arange(groups, dtype=torch.int64, device=device)[None].expand(len(seed), -1)
    c1 = (position & _LOW)[:, None].expand(-1, groups)
    c2 = ((position >> 32) & _LOW)[:, None].expand(-1, groups)
    c3 = torch.zeros_like(c0)
    k0, k1 = (seed & _LOW)[:, None], ((seed >> 32) & _LOW)[:, None]
    for _ in range(10):
        # int64 products wrap modulo 2**64, which keeps all 64 bits of a 32 x 32 bit product.
        product_a, product_b = c0 * _MUL_A, c2 * _MUL_B
        high_a, high_b = (product_a >> 32) & _LOW, (product_b >> 32) & _LOW
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, product_b & _LOW, high_a ^ c3 ^ k1, product_a & _LOW
        k0, k1 = (k0 + _WEYL_A) & _LOW, (k1 + _WEYL_B) & _LOW
    words = torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :vocab_size]
    return ((words >> 9).float() + 0.5) * 2.0**-23


def adjust_logits(logits: Tensor, s: SamplingTensors) -> Tensor:
    """In place steps 1 to 4 of `sample`: bias, penalties, bans, grammar mask."""
    if s.bias is not None:
        row, token, value = s.bias
        logits.index_put_((row, token), value, accumulate=True)
    if s.penalties is not None:
        p = s.penalties
        on = p.state_rows >= 0
        state = p.state_rows.clamp(min=0).long()
        counts = p.output_counts[state] * on[:, None]
        seen = (counts > 0) | (p.prompt_mask[state] & on[:, None])
        repetition = p.repetition[:, None]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits.copy_(torch.where(seen, repeated, logits))
        logits -= p.frequency[:, None] * counts + p.presence[:, None] * (counts > 0)
    if s.banned is not None:
        logits[s.banned[0], s.banned[1]] = NEG_INF
    if s.mask_rows is not None and s.mask_bits is not None:
        token = torch.arange(logits.shape[1], device=logits.device)
        allowed = (s.mask_bits[:, token // 32] >> (token % 32)) & 1
        logits[s.mask_rows] = logits[s.mask_rows].masked_fill(allowed == 0, NEG_INF)
    return logits


def filter_logits(logits: Tensor, s: SamplingTensors) -> Tensor:
    """Steps 6 to 8 of `sample` on logits that are already divided by the temperature.

    Tokens are ordered by (logit descending, id ascending), so that ties are broken alike
    everywhere. top-k keeps the first k. top-p keeps the shortest prefix whose probability, among
    what top-k left, reaches top_p (at least one token). min-p keeps tokens whose probability is at
    least min_p times that of the most likely one.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None]
    off = (s.top_k <= 0)[:, None]
    keep = off | (rank < s.top_k[:, None])
    probs = ordered.masked_fill(~keep, NEG_INF).softmax(-1)
    before = probs.double().cumsum(-1) - probs.double()
    keep &= (before < s.top_p[:, None].double()) | (rank == 0) | (s.top_p >= 1)[:, None]
    keep &= probs >= s.min_p[:, None] * probs[:, :1]
    keep_by_token = torch.zeros_like(keep).scatter_(1, order, keep)
    return logits.masked_fill(~keep_by_token, NEG_INF)


def sample(logits: Tensor, s: SamplingTensors) -> Tensor:
    """One token id per row, [B] int64; -1 where a logit is NaN or no token is left.

    The order, the same on every backend: 1 logit bias; 2 repetition, then frequency and presence
    penalties; 3 bans (min_tokens); 4 grammar mask; 5 temperature; 6 top-k; 7 top-p; 8 min-p;
    9 argmax of logit + Gumbel noise, which is an exact draw from the softmax of what is left. A
    row of temperature 0 skips 5 to 9: it takes the largest logit, the lowest id among equals.
    """
    logits = logits.float()
    adjust_logits(logits, s)
    bad = logits.isnan().any(-1) | (logits == NEG_INF).all(-1)
    chosen = logits.argmax(-1)
    if not s.all_greedy:
        greedy = s.temperature <= 0
        scaled = logits / torch.where(greedy, 1.0, s.temperature)[:, None]
        if s.any_filter:
            scaled = filter_logits(scaled, s)
        noise = -torch.log(-torch.log(philox_uniform(s.seed, s.position, logits.shape[1])))
        chosen = torch.where(greedy, chosen, (scaled + noise).argmax(-1))
    chosen = torch.where(bad, -1, chosen)
    if s.penalties is not None:
        p = s.penalties
        live = (p.state_rows >= 0) & ~bad
        p.output_counts[p.state_rows[live].long(), chosen[live]] += 1
    return chosen


def causal_conv(x: Tensor, weight: Tensor, states: Tensor, batch: RecurrentBatch) -> Tensor:
    kept = weight.shape[0] - 1
    out = torch.empty(x.shape, device=x.device)
    for before, first, last, stops in _recurrent_rows(states, batch):
        line = torch.cat((before, x[first:last].float()))
        out[first:last] = line[: last - first] * weight[0]
        for j in range(1, kept + 1):
            out[first:last] += line[j : j + last - first] * weight[j]
        for tokens, slot in stops:
            if slot >= 0:
                states[slot] = line[tokens : tokens + kept]
    return out


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    states: Tensor,
    batch: RecurrentBatch,
) -> Tensor:
    shared = v.shape[1] // k.shape[1]
    q, k = (_of_length_1(x.float()).repeat_interleave(shared, dim=1) for x in (q, k))
    q, v, factor = q * q.shape[-1] ** -0.5, v.float(), decay.exp()
    out = torch.empty(v.shape, device=v.device)
    for state, first, _, stops in _recurrent_rows(states, batch):
        at = first
        for tokens, slot in stops:
            while at < first + tokens:
                key = k[at].unsqueeze(-1)
                state *= factor[at][:, None, None]
                error = v[at] - (state * key).sum(-2)
                state += key * (error * rate[at].unsqueeze(-1)).unsqueeze(-2)
                out[at] = (state * q[at].unsqueeze(-1)).sum(-2)
                at += 1
            if slot >= 0:
                states[slot] = state
    return out


def _recurrent_rows(
    states: Tensor, batch: RecurrentBatch
) -> Iterable[tuple[Tensor, int, int, list[tuple[int, int]]]]:
    """For each row: a copy of its state, its first token, the token behind its last, its stops."""
    before = states[batch.sources.clamp(min=0)]
    before[batch.sources < 0] = 0.0
    starts, stops = batch.starts.tolist(), batch.stops.tolist()
    every = list(zip(batch.stop_tokens.tolist(), batch.stop_slots.tolist(), strict=True))
    for b, state in enumerate(before):
        yield state, starts[b], starts[b + 1], every[stops[b] : stops[b + 1]]


def read_sources(states: Tensor, batch: RecurrentBatch) -> tuple[Tensor, Tensor]:
    """For kernels whose rows run at once: states that nothing of the step writes but the row that
    goes on from one, and which of them each row goes on from (`RecurrentBatch.sources`)."""
    if not batch.crossing:
        return states, batch.sources
    places = torch.arange(len(batch.sources), device=states.device)
    return states[batch.sources.clamp(min=0)], torch.where(batch.sources < 0, -1, places)


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def pack_experts_one_by_one(
    ops: Any, experts: Iterable[Expert], *, quantization: str | None = None
) -> Any:
    """`OpSet.pack_experts` where experts run one by one: pairs of packed linear layers."""
    return [
        (
            ops.pack_linear(expert.gate_up, expert.gate_up_bias, quantization=quantization),
            ops.pack_linear(expert.down, expert.down_bias, quantization=quantization),
        )
        for expert in experts
    ]


class ReferenceOps:
    """The reference as an `OpSet`, for tests and for a device that has nothing better."""

    name = "reference"

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    layer_norm = staticmethod(layer_norm)
    rotary = staticmethod(rotary)
    store_kv = staticmethod(store_kv)
    place_heads = place_heads
    extend_attention = staticmethod(extend_attention)
    decode_attention = staticmethod(extend_attention)
    mixed_attention = staticmethod(mixed_attention)
    causal_conv = staticmethod(causal_conv)
    gated_delta = staticmethod(gated_delta)
    silu_and_mul = staticmethod(silu_and_mul)
    gelu_and_mul = staticmethod(gelu_and_mul)
    clamped_silu_and_mul = staticmethod(clamped_silu_and_mul)
    route = staticmethod(route)
    sample = staticmethod(sample)

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, quantization: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if quantization is not None:
            raise ValueError(f"quantization {quantization!r}: the reference has none")
        return weight, bias

    def embed(self, ids: Tensor, embedding: Any) -> Tensor:
        return F.embedding(ids, embedding)

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        weight, bias = packed
        wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(x.dtype)

    pack_experts = pack_experts_one_by_one

    def run_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, packed: Any, activation: str
    ) -> Tensor:
        """Token by token, expert by expert."""
        out = torch.zeros(x.shape, device=x.device)
        for t in range(x.shape[0]):
            for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
                gate_up, down = packed[expert]
                inner = act_and_mul(self.linear(x[t : t + 1], gate_up), activation, self)
                out[t] += weight * self.linear(inner, down)[0].float()
        return out.to(x.dtype)

    def compile(self, model: DecoderModel) -> CompiledDecoder | None:
        return None
