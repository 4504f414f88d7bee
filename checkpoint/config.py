"""Settings of saving and resuming."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved, what is kept, and where it goes on from."""

    dir: str | None = None
    """Folder of the checkpoints; null: `checkpoints` in the run's directory."""
    every: int = 100
    """Steps between saves; 0: only at the end."""
    keep: int = 2
    """Newest checkpoints kept; 0: all."""
    resume: str = "auto"
    """auto: the newest checkpoint of this run, if any; none: start anew; else a checkpoint's path."""
    allow: tuple[str, ...] = ()
    """Keys that may differ from the run being resumed, beyond those that always may."""
