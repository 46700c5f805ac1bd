"""What this machine cannot go below: measured limits, and what a model's work takes at them.

Absolute times do not travel between machines; a ratio to a floor measured in the same run does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.examination import Machine


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a step costs in bytes and operations. The defaults are SmolLM2-135M's, in bfloat16.

    Args:
        weight_bytes: read by every decode step.
        token_flops: of one prefill token (its linear layers, without the head's).
        head_flops: of one sampled token's logits.
        attention_flops: of one (query, key) pair over all layers.
    """

    weight_bytes: float = 269.0e6
    token_flops: float = 212.3e6
    head_flops: float = 56.6e6
    attention_flops: float = 4.0 * 30 * 576

    def in_form(self, form: str) -> ModelSize:
        """With linear layers in a form of weights; the output layer is int8 where they are
        quantized. Operations are counted as the bfloat16 ones that they take the time of: int8
        instructions do twice as many, float32 ones, which float16 weights take, half."""
        if form == "bfloat16":
            return self
        body, head = self.token_flops / 2, self.head_flops / 2
        of_body, of_head, share = {
            "float32": (4.0, 4.0, 2.0),
            "float16": (2.0, 2.0, 2.0),
            "int8": (1.0625, 1.0625, 0.5),
            "int4": (0.625, 1.0625, 0.5),
        }[form]
        return replace(
            self,
            weight_bytes=of_body * body + of_head * head,
            token_flops=share * self.token_flops,
            head_flops=share * self.head_flops,
        )


@dataclass(frozen=True, slots=True)
class Floors:
    """Seconds below which this machine cannot go."""

    machine: Machine
    size: ModelSize

    def prefill(self, tokens: int, cached: int = 0) -> float:
        """`tokens` new prompt tokens after `cached` ones."""
        pairs = tokens * (cached + tokens / 2)
        flops = tokens * self.size.token_flops + pairs * self.size.attention_flops
        return flops / self.machine.bf16_flops

    def decode_step(self, rows: int) -> float:
        """One token for each of `rows` sequences: the weights' bytes or the rows' arithmetic."""
        flops = rows * (self.size.token_flops + self.size.head_flops)
        return max(self.size.weight_bytes / self.machine.bandwidth, flops / self.machine.bf16_flops)
