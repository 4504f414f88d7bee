"""How a run is cut over its processes (no torch here: a configuration is checked before torch is imported)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of each parallelism; what is left of the processes is data parallelism."""

    tp: int = 1
    """Tensor parallelism with sequence parallelism: ranks that share each block's matrices and its tokens."""
    cp: int = 1
    """Context parallelism: ranks that share the tokens of each sequence."""
    cp_exchange: Literal["ring", "all_gather"] = "ring"
    """How those ranks see each other's keys and values: ring passes them on while it computes, all_gather holds all."""
    ep: int = 1
    """Expert parallelism: ranks, among those of tp, cp and data parallelism, that share the experts."""
    pp: int = 1
    """Pipeline parallelism: ranks that share the layers."""
    vpp: int | None = None
    """Pipeline stages a rank; null: what the schedule needs (1, or 2 for a schedule of several stages a rank)."""
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"] = "auto"
    """Order of the micro-batches in a pipeline; auto: 1f1b, or interleaved where vpp is above 1."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each of the pp * vpp stages, in order; empty: split evenly by cost, embedding and head counted."""
    zero: int = 1
    """What data-parallel ranks share: 0 nothing, 1 optimizer state and master weights, 2 gradients too, 3 weights
    too."""
    replicate: int = 1
    """Groups of data-parallel ranks that hold the same shards (HSDP); zero=0 always replicates."""
    timeout: int = 600
    """Seconds after which a rank that waits for the others gives up."""
