"""The operations a model's step is made of: their signatures, shapes and contracts.

`OpSet` is the one interface between the model code and a device. `ops.reference` implements it
in plain fp32 torch and is the truth that every other implementation is tested against;
`ops.cpu` and `ops.gpu` implement it for speed.

Conventions, for every operation:

- Shapes are written `[T, H, D]`; T is tokens of the step, B rows (requests) of the step, HQ and
  HK query and KV heads, D the head dimension, S KV slots, V the vocabulary.
- The last dimension is contiguous. Any other stride is allowed where a docstring says "strided".
- A KV **slot** is the place of one token's K and V. Slot = page * page_size + offset. Page 0 is
  reserved: padding reads and writes it, no request ever owns it. A negative slot is skipped.
- Sums and softmax are float32 whatever the storage type. Addresses are 64-bit.
- In-place operations say so in their first line; the others return new tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ops.coded_weight import CODE_SHAPES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention does, apart from its data.

    Args:
        scale: factor on q.k, usually head_dim ** -0.5.
        window: keys attended are max(0, p - window + 1) .. p; 0 means all keys up to p.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap) after scaling; 0 means off.
        sinks: [HQ] float32, one extra logit per head that takes part in the softmax's sum and
            has no value; None means none. A weight, see `ops.blocks.block.Weight`.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Any = None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which keys each row of a step attends to; the same for all layers of the step.

    The new tokens' K and V are already in the pool when attention runs (`store_kv` comes first),
    so all keys are read by slot and the causal mask follows from the positions.

    Args:
        block_table: [R, max_pages] int32, page of (request row, position // page_size).
        rows: [B] int32, the request row of each batch row.
        qo_indptr: [B + 1] int32, where each row's new tokens begin in the step's T tokens.
        kv_lens: [B] int32, keys of each row, the new tokens included. The i-th of a row's n new
            tokens stands at position kv_len - n + i.
        page_size: tokens of a page.
        max_q_len: an upper bound of the number of new tokens of a row (host-known).
        max_kv_len: an upper bound of kv_lens (host-known).
        decode: None, or rows of one new token each that `mixed_attention` attends to apart; see
            there where their tokens stand.
    """

    block_table: Tensor
    rows: Tensor
    qo_indptr: Tensor
    kv_lens: Tensor
    page_size: int
    max_q_len: int
    max_kv_len: int
    decode: AttentionBatch | None = None


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """Which states each row of a step goes on from, and where they are left; the same for all
    layers of the step. Rows stand in the order of their tokens.

    Args:
        sources: [B] int64, the state slot that a row goes on from; negative: it begins with zeros.
        starts: [B + 1] int64, where each row's tokens begin in the step's T tokens.
        stops: [B + 1] int64, where each row's begin among all stops.
        stop_tokens, stop_slots: [N] int64, after how many of its tokens a row's state is left, and
            in which slot; negative: it is not. A row's stops ascend, the last is behind its last
            token.
        crossing: on the host; a slot is left that a row goes on from, other than its own: sources
            are then read before anything is left.
    """

    sources: Tensor
    starts: Tensor
    stops: Tensor
    stop_tokens: Tensor
    stop_slots: Tensor
    crossing: bool = False


class KvScales(NamedTuple):
    """What a pool of codes is read with (`ops.kv_codes`): k, v [S, HK] float32."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts follow from the router's logits.

    Args:
        top_k: experts of a token: those with the largest scores, the lower id among equals.
        renormalise: their weights are divided by their sum; else the scores are taken.
        score: "softmax" over all experts, or "sigmoid" of each.
        scale: factor on the weights.
        groups, top_groups: experts are chosen from the best `top_groups` of so many groups of
            neighbours (DeepSeek-V2, arXiv:2405.04434).
        group_score: of a group: its "max" score, or the sum of its "top2".
    """

    top_k: int
    renormalise: bool
    score: str = "softmax"
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"


class Expert(NamedTuple):
    """One expert's weights: gate_up [2F, H], down [H, F], and biases [2F], [H] or None.

    gate_up and down are what `OpSet.pack_linear` takes.
    """

    gate_up: Any
    down: Any
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class HeadNorm(NamedTuple):
    """The norm of each head before attention: weight [D], see `OpSet.rms_norm`."""

    weight: Tensor
    eps: float


@dataclass(slots=True)
class Penalties:
    """Penalty state kept on the device, so that it never lags behind the newest token.

    Args:
        state_rows: [B] int32, row of the two state tables for each sampled row; -1: no penalty.
        repetition, presence, frequency: [B] float32 (1, 0, 0 mean off).
        prompt_mask: [N, V] bool, token is in the prompt.
        output_counts: [N, V] int32, how often the token was sampled; `sample` counts its choice.
    """

    state_rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    prompt_mask: Tensor
    output_counts: Tensor


@dataclass(slots=True)
class SamplingTensors:
    """What `sample` needs beside the logits. The optional parts are None when no row needs them.

    Args:
        temperature: [B] float32, 0 means greedy.
        top_k: [B] int32, 0 means off. top_p: [B] float32, 1 means off. min_p: [B] float32, 0: off.
        seed: [B] int64. position: [B] int64, the number of tokens before the one sampled; with
            the token id they are the whole state of the random generator.
        all_greedy: no row has a temperature (host-known; the filters may then be skipped).
        any_filter: some row has top_k, top_p or min_p on (host-known).
        bias: (row [N] int64, token [N] int64, value [N] float32), added to the logits.
        penalties: see `Penalties`.
        banned: (row [N] int64, token [N] int64), set to -inf (min_tokens).
        mask_rows, mask_bits: [M] int64 and [M, ceil(V / 32)] int32; bit t % 32 of word t // 32 is
            1 where the grammar allows token t.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    all_greedy: bool
    any_filter: bool
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    penalties: Penalties | None = None
    banned: tuple[Tensor, Tensor] | None = None
    mask_rows: Tensor | None = None
    mask_bits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [N, K] of codes in groups of neighbouring K, on the device: what
    `ops.coded_weight.GroupedMatrix` reads.

    Args:
        kind: a key of `ops.coded_weight.GROUP_KINDS`. codes: [N, K] uint8, of "fp8" none is NaN.
        scales: [N, groups] float32. zeros: of integers, alike, uint8; None: all are 2^(bits - 1).
            Where there are zeros, the last 8 bits of a scale are 0, as those of all 16-bit floats
            are.
        table: [16] float32, what codes of "nf4" stand for; else None.
        order: [K] int64, the inputs that its K take; None: they take them as they come.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    table: Tensor | None = None
    order: Tensor | None = None

    def rows(self, at: slice | Tensor) -> GroupedWeight:
        zeros = None if self.zeros is None else self.zeros[at]
        return replace(self, codes=self.codes[at], scales=self.scales[at], zeros=zeros)

    def first_rows(self, count: int) -> GroupedWeight:
        return self.rows(slice(count))


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """An embedding that is kept as a linear layer's packed weight.

    Args:
        linear: [rows, H], of a kind whose rows the op set can unpack.
        dtype: torch's name of the type of the rows.
    """

    linear: Any
    dtype: str

    def check(self, library: Any) -> None:
        """For one whose linear layer, checked itself, comes from a file.

        Raises: ValueError: its rows cannot be unpacked.
        """
        kind = getattr(self.linear, "kind", None)
        unpacks = kind == "float16" or kind in CODE_SHAPES
        if not unpacks or self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"embedding: rows of {kind!r} as {self.dtype!r}")


class OpSet(Protocol):
    """The operations of one backend. See the module docstring for the conventions."""

    name: str

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, *, quantization: str | None = None
    ) -> Any:
        """A weight [N, K] (+ bias [N]) in the backend's own layout.

        The caller drops its reference to `weight` afterwards; a backend keeps it only if it has
        no other layout. quantization: None, "int8" or "int4" where the backend has it. A backend
        may take an `ops.coded_weight.CodedWeight` or a `GroupedWeight` too, and keeps it as it is.
        """
        ...

    def embed(self, ids: Tensor, embedding: Any) -> Tensor:
        """Rows ids [T] int64 of an embedding: [T, H] of a tensor [rows, H], or of what the backend
        packed (`PackedEmbedding`)."""
        ...

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """x [T, K] @ weight.T + bias -> [T, N], in x's type."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x [..., D] strided,
        weight [D] in x's type or float32. The normalised value is rounded to the weight's type
        before the product, as the published code does: Llama's weights have x's type, Gemma's are
        float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """In place residual += x (both [T, D]); returns rms_norm(residual)."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(x - mean(x)) / sqrt(var(x) + eps) * weight over the last dimension; x [..., D] strided,
        weight [D]. Computed in float32, rounded once to x's type."""
        ...

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, rope: Tensor, *, interleaved: bool
    ) -> None:
        """In place rotation of q [T, HQ, D] and k [T, HK, D] (strided) by rope[positions].

        rope is [max_positions, R] float32 (cos | sin); the first R dimensions of a head turn:
        pairs (i, i + R/2) (neox), or (2i, 2i + 1) when interleaved. Computed in float32.
        """
        ...

    def store_kv(
        self, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor,
        scales: KvScales | None = None,
    ) -> None:  # fmt: skip
        """Writes k, v [T, HK, D] (strided) to the pools [S, HK, D] at slots [T] int64; to pools of
        codes, which have `scales`, as codes with their scales. A negative slot is skipped."""
        ...

    def place_heads(
        self,
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
        """What stands between the qkv layer and attention: `rms_norm` of each head of q
        [T, HQ, D] and of k [T, HK, D], `rotary` of both, `store_kv` of k and v. All are strided.
        A norm or rope that is None is left out. Returns q as attention takes it; q and k may be
        overwritten."""
        ...

    def extend_attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, spec: AttentionSpec,
        scales: KvScales | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of new tokens over cached and new keys. q [T, HQ, D] strided; the pools
        [S, HK, D], of codes where there are `scales`; returns [T, HQ, D]. Any row length
        from 1, any prefix from 0. Nothing of a page that the row does not own, or past kv_len, or
        outside the window, influences the result (even a NaN there)."""
        ...

    def decode_attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, spec: AttentionSpec,
        scales: KvScales | None = None,
    ) -> Tensor:  # fmt: skip
        """`extend_attention` for a step in which every row has exactly one new token (T = B)."""
        ...

    def mixed_attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, spec: AttentionSpec,
        scales: KvScales | None = None,
    ) -> Tensor:  # fmt: skip
        """Both for one step: `decode_attention` of batch.decode's rows, whose tokens are the first
        of the step, and `extend_attention` of the other rows, whose tokens are those from
        qo_indptr[0] to qo_indptr[-1].

        A decode row gets what `decode_attention` alone would give it, to the bit. The two may
        overlap: a token of the other rows is theirs, so that the number of decode rows can be
        fixed when a step is captured, and padded. Tokens behind qo_indptr[-1], which are padding
        too, get something finite.
        """
        ...

    def causal_conv(
        self, x: Tensor, weight: Tensor, states: Tensor, batch: RecurrentBatch
    ) -> Tensor:
        """Convolution of each channel along a row's tokens: y[p] = sum over j of
        weight[j] * x[p - K + 1 + j] -> [T, C] float32, for x [T, C] strided, weight [K, C] float32.
        What stands before a row's new tokens is its state; states [N, K - 1, C] float32 are then
        its last K - 1 inputs. A token's result is the same to the bit whatever else is computed in
        the step, and wherever the step begins."""
        ...

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        rate: Tensor,
        states: Tensor,
        batch: RecurrentBatch,
    ) -> Tensor:
        """The gated delta rule (arXiv:2412.06464), token by token, [T, HV, E] float32:

            S = exp(decay) * S;  S = S + k (rate * (v - k S));  out = q S

        with q and k of length 1 (their squares' sum has 1e-6 added), and q / sqrt(D).
        q, k [T, HK, D] (strided), of which each serves HV / HK neighbouring heads of v [T, HV, E];
        decay, rate [T, HV] float32; the rows' S are in states [N, HV, D, E] float32. A token's
        result is the same to the bit whatever else is computed in the step, and wherever the step
        begins."""
        ...

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(x[:, :F]) * x[:, F:] -> [T, F] for x [T, 2F]."""
        ...

    def gelu_and_mul(self, x: Tensor, *, tanh: bool) -> Tensor:
        """gelu(x[:, :F]) * x[:, F:] -> [T, F], with the tanh form or the exact one."""
        ...

    def clamped_silu_and_mul(self, x: Tensor) -> Tensor:
        """g * sigmoid(1.702 * g) * (u + 1) -> [T, F] for x [T, 2F], where g = min(x[:, :F], 7) and
        u = x[:, F:] held within -7 .. 7 (gpt-oss)."""
        ...

    def route(
        self, logits: Tensor, routing: Routing, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The experts of each token for router logits [T, E]: ids [T, k] int64, the largest first,
        and weights [T, k] float32. correction: [E] float32, added to the scores for the choice
        alone (arXiv:2408.15664)."""
        ...

    def pack_experts(self, experts: Iterable[Expert], *, quantization: str | None = None) -> Any:
        """The experts' weights in the backend's own layout; see `pack_linear`."""
        ...

    def run_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, packed: Any, activation: str
    ) -> Tensor:
        """The sum over a token's experts of weight * down(activation(gate) * up), [T, H] in x's
        type, for x [T, H] and ids, weights [T, k] as `route` gives them; the activation as
        `ops.blocks.dense_mlp.act_and_mul` has it.

        The sum is float32 and in an order that does not depend on the other tokens. Beyond it a
        token's result depends on them as far as `linear` does.
        """
        ...

    def sample(self, logits: Tensor, s: SamplingTensors) -> Tensor:
        """Token ids [B] int64 for logits [B, V]; those in float32 may be overwritten. Everything
        is computed in float32.

        The order of operations is fixed in `ops.reference.sample`. A row that holds a NaN or in
        which no token is left gives -1. Counts the choice in s.penalties.output_counts.
        """
        ...
