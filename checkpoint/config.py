"""Settings of saving and resuming."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run is saved, what is kept, and where it goes on from."""

    dir: str | None = None
    """Folder of the checkpoints; null: `checkpoints` in the run's directory."""
    local: str | None = None
    """A faster folder that all processes see: checkpoints are whole in LOCAL/RUN first, then copied; null: none."""
    every: int = 100
    """Steps between saves; 0: only at the end."""
    keep: int = 2
    """Newest checkpoints kept; 0: all."""
    keep_every: int = 0
    """Checkpoints of every so many steps are kept for ever; 0: of none."""
    background: bool = True
    """Whether training goes on while a copy of the state is written; it takes as much memory again."""
    on_failure: Literal["go_on", "stop"] = "go_on"
    """When a checkpoint cannot be written: go on and try at the next one, or stop (exit code 3). The last one must be
    written in any case."""
    resume: str = "auto"
    """auto: the newest checkpoint of this run, if any; none: start anew; else a checkpoint's path."""
    load: str | None = None
    """A checkpoint, or a run, whose weights a new run begins with; its optimizer and counters begin anew."""
    load_except: tuple[str, ...] = ()
    """load: patterns of names of weights that may be missing there, keeping their first values, or unknown here."""
    allow: tuple[str, ...] = ()
    """Keys that may differ from the run being resumed, beyond those that always may."""
