"""Number formats of a run (no torch here: a configuration is checked before torch is imported)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PrecisionName = Literal["fp64", "fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8"]


@dataclass(frozen=True)
class LossScaleConfig:
    """fp16's dynamic loss scale (Micikevicius et al., 2018): gradients are made this much larger, then divided."""

    initial: float = 65536.0
    """At the first step; a power of two. One that is too large costs a step a halving, which train.max_skips does not
    count."""
    growth_interval: int = 1000
    """Good steps in a row after which it is doubled, up to 2^24."""
    least: float = 1.0
    """It is halved at each step whose gradients are not finite, but not below this; train.max_skips counts the steps
    that are skipped at this value."""


@dataclass(frozen=True)
class FP8Config:
    """What of the model is computed in FP8, and how scales are found (Micikevicius et al., 2022)."""

    backend: Literal["auto", "te", "emulate"] = "auto"
    """Who makes the products: Transformer Engine, or its arithmetic on any device; auto takes what the device has."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """fp8_delayed, fp8_current: hybrid has E5M2 for the gradients of outputs, e4m3 E4M3 for all."""
    margin: int = 0
    """fp8_delayed: scales leave 2^margin of room above the largest value seen."""
    history: int = 1024
    """fp8_delayed: micro-batches whose largest values are remembered."""
    amax: Literal["max", "most_recent"] = "max"
    """fp8_delayed: which of the remembered values makes the scale."""
    first_bf16: int = 0
    """Blocks from the first that stay in bf16."""
    last_bf16: int = 0
    """Blocks before the last, itself included, that stay in bf16."""
    attention: bool = True
    """Whether qkv and the output linear of attention are in FP8."""
    mlp: bool = True
    """Whether the linears of dense MLPs, and of experts that every token uses, are in FP8."""
    experts: bool = True
    """Whether the experts that tokens choose are in FP8 (routers never are)."""
    health_every: int = 10
    """Steps between records of how FP8 fares (largest values, scales, values lost, errors), each a few passes over
    every operand; only steps that metrics.every records have one; 0: none."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Formats of weights, activations and products."""

    name: PrecisionName = "fp32"
    """Format of weights and activations in the products; all below fp32 keep fp32 master weights. fp8 and mxfp8
    are bf16 with the products of blocks' linears in FP8."""
    matmul: Literal["auto", "highest", "high", "medium"] = "auto"
    """How fp32 products are made (torch.set_float32_matmul_precision); auto leaves highest only for a faster
    setting that measures as true fp32."""
    fp16: LossScaleConfig = field(default_factory=LossScaleConfig)
    """fp16's loss scale."""
    fp8: FP8Config = field(default_factory=FP8Config)
    """Of fp8_delayed, fp8_current, fp8_block and mxfp8."""

    @property
    def in_fp8(self) -> bool:
        """Whether some products are in FP8."""
        return "fp8" in self.name

    @property
    def compute(self) -> Literal["fp64", "fp32", "bf16", "fp16"]:
        """Format of activations, and of the products that are not in FP8."""
        if self.name in ("fp64", "fp32", "fp16"):
            return self.name
        return "bf16"
