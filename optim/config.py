"""Settings of the optimizer and of the learning rate over a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2) with decay on matrices only."""

    name: Literal["adamw"] = "adamw"
    """Which optimizer."""
    lr: float | None = None
    """Peak learning rate; null: 0.75 / model.hidden, which is near the published ones from 125m to 405b."""
    beta1: float = 0.9
    """Decay of the first moment, a step."""
    beta2: float = 0.95
    """Decay of the second moment, a step."""
    eps: float = 1.0e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay, times the learning rate, a step."""
    decay_embeddings: bool = True
    """Whether the embedding and head decay as the other matrices do; norms and biases never do."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, then one of four shapes down to min_ratio * lr at the last step."""

    name: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Shape after the warm-up; wsd is flat, then decays over the last decay_share of the run."""
    warmup: int | None = None
    """Steps of linear warm-up (the first step already moves); null: a tenth of the run, at most 2000."""
    min_ratio: float = 0.1
    """Final learning rate as a share of the peak."""
    decay_share: float = 0.2
    """wsd: share of the run's steps spent decaying."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "sqrt"
    """wsd: how it decays, with r from 0 to 1: 1-r, (1+cos(pi r))/2, 1-sqrt(r)."""
