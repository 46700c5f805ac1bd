"""Rotary position embeddings: what a config says about them, and the table of cosines and sines.

All published forms are read: `rope_parameters` (transformers 5, flat or by layer type), the older
`rope_theta` with `rope_scaling`, and "type" as well as "rope_type". The formulas are those of

- linear: Chen et al. 2023, arXiv:2306.15595; dynamic: NTK-aware scaling as published by bloc97 and
  emozilla; yarn: Peng et al. 2023, arXiv:2309.00071; longrope: Ding et al. 2024, arXiv:2402.13753;
  llama3: the Llama 3.1 release.

Two of them depend on the length of the sequence: dynamic has its own base for every length beyond
the original context, longrope takes its long factors there. runtime/rope_layout.py says which
length counts for a token, and which row of the table it takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from runtime.errors import ModelError
from runtime.models import config_values as values
from runtime.models.config_values import MOST_POSITIONS
from runtime.models.sources import Source, WeightReader
from runtime.rope_layout import LongPrompts, RopeLayout

_LEAST_THETA = 1.001  # formulas divide by its logarithm
TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True)
class RopeSpec(Source):
    """One kind of rotary embedding of a model.

    Args:
        dim: leading dimensions of a head that turn.
        original_context: tokens of a sequence in pre-training, before any scaling.
        context: tokens of a sequence that the model is meant for, scaling included.
        parameters: the config's other numbers (factor, beta_fast, long_factor, ...).
    """

    type: str
    theta: float
    dim: int
    original_context: int
    context: int
    parameters: dict[str, Any] = field(default_factory=dict)
    kept: ClassVar[bool] = False

    def load(self, reader: WeightReader) -> Tensor:
        """The table of the served context; blocks of the same spec share one."""
        return reader.shared(self, lambda: self.table(reader.rope_layout))

    def table(self, layout: RopeLayout) -> Tensor:
        """[rows of the layout, dim] float32, see `rows`; those that steps write are 0."""
        at, long = torch.arange(layout.context), layout.long_prompts
        table = self.rows(at, at + 1)
        if long is None:
            return table
        if long.by_length:
            return torch.cat((table, torch.zeros(layout.step_tokens, self.dim)))
        return torch.cat((table, self.rows(at[: long.above], torch.tensor([long.above + 1]))))

    def rows(self, positions: Tensor, lengths: Tensor) -> Tensor:
        """[n, dim] float32: cosines in the first half of a row, sines in the second.

        Args:
            positions: [n] int64. lengths: [n] or [1] int64, tokens of the sequence that count.
        """
        angles = positions[:, None].float() * self._inverse_frequencies(lengths)
        factor = self._attention_factor()
        return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)

    def long_prompts(self, context: int) -> LongPrompts | None:
        """Which prompts have frequencies of their own in a context of so many tokens."""
        if self.type not in ("dynamic", "longrope") or context <= self.original_context:
            return None
        return LongPrompts(self.original_context, by_length=self.type == "dynamic")

    def number(self, key: str, default: float | None = None) -> float:
        """One of the parameters, above 0. Raises: ModelError: absent without a default, or none."""
        return values.number(self.parameters, key, default)

    def score_scale(self) -> float:
        """Factor on the scores of DeepSeek's attention, whose queries and keys turn in part."""
        if self.type == "default" or not self.parameters.get("mscale_all_dim"):
            return 1.0
        return _yarn_scale(self._yarn_factor(), self.number("mscale_all_dim")) ** 2

    def _inverse_frequencies(self, lengths: Tensor) -> Tensor:
        """[1 or n, dim / 2] float32."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32)[None] / self.dim
        plain = 1.0 / self.theta**exponents
        if self.type == "linear":
            return plain / self.number("factor")
        if self.type == "dynamic":
            return self._dynamic(lengths, exponents)
        if self.type == "yarn":
            return self._yarn(plain)
        if self.type == "llama3":
            return self._llama3(plain)
        if self.type == "longrope":
            long = (lengths > self.original_context)[:, None]
            return plain / torch.where(
                long, self._factors("long_factor"), self._factors("short_factor")
            )
        return plain

    def _dynamic(self, lengths: Tensor, exponents: Tensor) -> Tensor:
        factor = self.number("factor")
        beyond = lengths.double().clamp(min=self.original_context)
        growth = factor * beyond / self.original_context - (factor - 1)
        theta = self.theta * growth ** (self.dim / (self.dim - 2))
        return (1.0 / theta[:, None] ** exponents.double()).float()

    def _yarn(self, plain: Tensor) -> Tensor:
        def correction(rotations: float) -> float:
            turns = self.original_context / (rotations * 2 * math.pi)
            return self.dim * math.log(turns) / (2 * math.log(self.theta))

        low = correction(self.number("beta_fast", 32.0))
        high = correction(self.number("beta_slow", 1.0))
        if self.parameters.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = torch.arange(self.dim // 2, dtype=torch.float32)[None]
        interpolated = ((ramp - low) / (high - low)).clamp(0, 1)
        return plain / self._yarn_factor() * interpolated + plain * (1 - interpolated)

    def _yarn_factor(self) -> float:
        return self.number("factor", self.context / self.original_context)

    def _llama3(self, plain: Tensor) -> Tensor:
        factor = self.number("factor")
        low, high = self.number("low_freq_factor"), self.number("high_freq_factor")
        turns = self.original_context * plain / (2 * math.pi)  # within the original context
        if not low < high:
            raise ModelError(
                f"config.json: low_freq_factor {low:g} must be below high_freq_factor {high:g}"
            )
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * plain / factor + smooth * plain

    def _factors(self, key: str) -> Tensor:
        factors = self.parameters.get(key)
        if (
            not isinstance(factors, list)
            or len(factors) != self.dim // 2
            or not all(map(values.is_number, factors))
        ):
            raise ModelError(
                f"config.json: {key} must be a list of {self.dim // 2} numbers above 0"
            )
        return torch.tensor(factors, dtype=torch.float32)[None]

    def _attention_factor(self) -> float:
        """Factor on cosines and sines, so on the queries and keys."""
        if self.type not in ("yarn", "longrope"):
            return 1.0
        if self.parameters.get("attention_factor") is not None:
            return self.number("attention_factor")
        if self.type == "longrope":
            factor = self.number("factor", self.context / self.original_context)
            if factor <= 1:
                return 1.0
            return math.sqrt(1 + math.log(factor) / math.log(self.original_context))
        factor = self._yarn_factor()
        if self.parameters.get("mscale") and self.parameters.get("mscale_all_dim"):
            mscale, all_dim = self.number("mscale"), self.number("mscale_all_dim")
            return _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
        return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def parse_rope(
    config: dict[str, Any],
    head_dim: int,
    *,
    layer_type: str | None = None,
    default_theta: float = 10_000.0,
    partial_rotary_factor: float = 1.0,
    renamed: dict[str, str] | None = None,
) -> RopeSpec:
    """The rotary embedding of a model, or of its layers of one type.

    Args:
        layer_type: which entry to take where `rope_parameters` has one per type.
        renamed: types that this family calls differently ("su" is longrope everywhere).
    Raises:
        ModelError: the type is unknown, or one of its numbers is missing or no number.
    """
    given = values.section(config, "rope_scaling") or values.section(config, "rope_parameters")
    if layer_type is not None and layer_type in given:
        given = values.section(given, layer_type)
    kind = values.text(given, "rope_type", values.text(given, "type", "default"))
    kind = {"su": "longrope", **(renamed or {})}.get(kind, kind)
    if kind not in TYPES:
        raise ModelError(
            f"config.json: rope type {kind!r} is not supported; it must be one of"
            f" {', '.join(TYPES)}"
        )
    theta = _first(given, config, "rope_theta", default_theta, low=_LEAST_THETA)
    partial = _first(given, config, "partial_rotary_factor", partial_rotary_factor)
    context = values.integer(config, "max_position_embeddings", high=MOST_POSITIONS)
    original = context
    if kind in ("yarn", "llama3", "longrope"):
        key = "original_max_position_embeddings"
        original = values.integer(given, key, context, low=2, high=MOST_POSITIONS)
        original = values.integer(config, key, original, low=2, high=MOST_POSITIONS)
    dim = int(head_dim * partial)
    if dim % 2 or not 2 <= dim <= head_dim or (kind == "dynamic" and dim == 2):
        raise ModelError(
            f"config.json: rotary embeddings cannot turn {dim} dimensions of heads of {head_dim}"
        )
    # yarn, linear and dynamic multiply the original context; llama3 and longrope models state the
    # context that they reach.
    spec = RopeSpec(kind, theta, dim, original, context, dict(given))
    if kind in ("yarn", "linear", "dynamic"):
        reached = original * spec.number("factor", context / original)
        if not 1 <= reached <= MOST_POSITIONS:
            raise ModelError(f"config.json: rope factor {spec.number('factor'):g} is out of range")
        return replace(spec, context=round(reached))
    return spec


def sliding_rope(config: dict[str, Any], head_dim: int, theta: float) -> RopeSpec:
    """The rotary embedding of sliding layers, in families that scale the others alone.

    Args:
        theta: theirs, where the config has no entry for them (before transformers 5).
    """
    if isinstance(config.get("rope_parameters"), dict):
        return parse_rope(config, head_dim, layer_type="sliding_attention", default_theta=theta)
    return parse_rope({**config, "rope_scaling": None, "rope_theta": theta}, head_dim)


def _first(
    one: dict[str, Any],
    other: dict[str, Any],
    key: str,
    default: float,
    *,
    low: float = values.LEAST,
) -> float:
    """The number under a key of the one, else of the other, else the default."""
    return values.number(one, key, values.number(other, key, default, low=low), low=low)
