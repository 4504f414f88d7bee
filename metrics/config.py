"""Settings of what a run reports and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MetricsConfig:
    """What is printed and recorded."""

    every: int = 1
    """Steps between printed lines and records."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Weights & Biases: offline keeps everything in the run's directory, online also sends it."""
    wandb_project: str = "tatara"
    """W&B project."""
    wandb_entity: str | None = None
    """W&B user or team; null: the account's default."""
    wandb_group: str | None = None
    """W&B group of runs; null: none."""
    wandb_tags: tuple[str, ...] = ()
    """W&B tags."""
    peak_tflops: float | None = None
    """Dense peak of one device in TFLOP/s, for MFU; null: published figure, or measured on a CPU."""
    replica_check: int = 500
    """Steps between comparisons of the weights that several ranks hold, which must be the same bits; 0: none."""
