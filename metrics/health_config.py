"""Settings of what watches over a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class LimitsConfig:
    """How long a rank may stay in one part of a step before the run is ended as hung; seconds, 0: for ever."""

    start: float = 1800.0
    """Until the end of the first step of a start, which compiles and connects."""
    data: float = 600.0
    """Waiting for the next batch."""
    compute: float = 300.0
    """A forward or backward pass, the sum of gradients, the optimizer, and anything else in a step."""
    evaluation: float = 1800.0
    """A validation."""
    checkpoint: float = 1800.0
    """What a save holds the training up for."""


@dataclass(frozen=True)
class HealthConfig:
    """What is looked for in a run, and what is done about it."""

    spike: Literal["log", "skip", "rollback", "stop"] = "log"
    """When loss or gradient norm jumps: tell; or change nothing in that step; or go back to the checkpoint before and
    pass over the data of the spike; or stop (exit code 4)."""
    window: int = 128
    """Steps that a new one is compared with; until there are as many, none is a spike."""
    sigma: float = 6.0
    """Standard deviations above the window's mean from which on loss or norm is a spike."""
    pass_over: int = 1
    """rollback: steps whose data is passed over, the spike's the last of them."""
    max_rollbacks: int = 3
    """rollback: how often a start goes back; then it stops (exit code 4)."""
    locate: int = 1
    """Steps of a start whose gradients are not finite that are made again to find where it begins, and kept for
    launch.replay; 0: none."""
    straggler: float = 1.06
    """A rank whose work takes so many times as long as its peers' is named; 0: none is."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """When a run that does not move is ended."""
