"""Number formats of a run (no torch here: a configuration is checked before torch is imported)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PrecisionConfig:
    """Formats of weights, activations and products."""

    name: Literal["fp64", "fp32", "bf16"] = "fp32"
    """Format of weights and activations in the products; bf16 keeps fp32 master weights."""
    matmul: Literal["auto", "highest", "high", "medium"] = "auto"
    """How fp32 products are made (torch.set_float32_matmul_precision); auto leaves highest only for a faster
    setting that measures as true fp32."""
