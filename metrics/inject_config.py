"""Faults that a run makes on purpose: for drills, and for tests of what comes back by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class InjectConfig:
    """One fault, at a step of one rank."""

    kind: Literal["kill", "hang", "slow", "nan", "corrupt", "disk_full"]
    """kill: the process gets SIGKILL; hang: it waits for ever; slow: it works longer; nan: a block gives NaN; corrupt:
    a byte of the checkpoint is flipped once it is written; disk_full: the checkpoint cannot be written."""
    step: int
    """The step in which it happens, from 1; for corrupt and disk_full the step that is saved."""
    rank: int = 0
    """Which process."""
    phase: Literal["data", "forward", "backward", "grad_sync", "optimizer", "checkpoint", "evaluation"] = "forward"
    """kill, hang, slow: the part of the step in which it happens, as in the record's time."""
    layer: int = 0
    """nan: number of the block, from 0."""
    micro_batch: int = 0
    """nan: number of the micro-batch on this rank, from 0."""
    last: int | None = None
    """slow: the last such step; null: all that follow."""
    factor: float = 3.0
    """slow: how many times the part's work takes as long."""
    attempt: int | None = 1
    """The start of the run in which it happens, so that the next one gets past it; null: in every start."""


@dataclass(frozen=True)
class DebugConfig:
    """For drills; nothing of it is on in a run that is to be kept."""

    inject: tuple[InjectConfig, ...] = ()
    """Faults to make: [{kind: kill, step: 20, rank: 1}]."""
