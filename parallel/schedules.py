"""The pipeline schedules by name, and how they place stages on ranks (no torch here).

stages of pp=2   looped: rank 0 has 0 2, rank 1 has 1 3      V: rank 0 has 0 3, rank 1 has 1 2
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel.config import ParallelConfig


@dataclass(frozen=True)
class ScheduleKind:
    """What one schedule is."""

    torch_name: str
    """Its class in torch.distributed.pipelining.schedules."""
    several: bool = False
    """Whether a rank has more than one stage."""
    v_shaped: bool = False
    """Whether the stages run back over the ranks, so that rank 0 has the first and the last."""
    splits: bool = False
    """Whether gradients of weights are made apart from gradients of inputs (zero bubble)."""


SCHEDULES = {
    "gpipe": ScheduleKind("ScheduleGPipe"),
    "1f1b": ScheduleKind("Schedule1F1B"),
    "interleaved": ScheduleKind("ScheduleInterleaved1F1B", several=True),
    "interleaved_zb": ScheduleKind("ScheduleInterleavedZeroBubble", several=True, splits=True),
    "zbv": ScheduleKind("ScheduleZBVZeroBubble", several=True, v_shaped=True, splits=True),
    "dualpipev": ScheduleKind("ScheduleDualPipeV", several=True, v_shaped=True, splits=True),
}


def schedule_name(config: ParallelConfig) -> str:
    """The schedule that is used: the one asked for, or by vpp."""
    if config.schedule != "auto":
        return config.schedule
    return "interleaved" if (config.vpp or 1) > 1 else "1f1b"


def stages_per_rank(config: ParallelConfig) -> int:
    """Pipeline stages a rank."""
    if config.pp == 1:
        return 1
    return config.vpp or (2 if SCHEDULES[schedule_name(config)].several else 1)


def stages_of(pp_rank: int, pp: int, per_rank: int, v_shaped: bool) -> list[int]:
    """Stage numbers that a pipeline rank holds, in ascending order."""
    if v_shaped:
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return [pp_rank + pp * round_ for round_ in range(per_rank)]


def split_layers(layers: int, stages: int, embedding_cost: float, head_cost: float) -> list[int]:
    """Layers of each stage so that the dearest stage is as cheap as can be; costs in layers.

    Every stage gets at least one layer. The limit is found by trial: the smallest one under which filling
    stages from the front places all layers; layers that may wait go to later stages.
    """
    ends = (0.0, embedding_cost, head_cost, embedding_cost + head_cost)
    limits = sorted({count + end for count in range(1, layers + 1) for end in ends})  # the dearest costs one of these
    for limit in limits:
        counts = _fill(layers, stages, embedding_cost, head_cost, limit)
        if counts is not None:
            return counts
    raise ValueError(f"{layers} layers cannot fill {stages} stages")


def _fill(layers: int, stages: int, embedding: float, head: float, limit: float) -> list[int] | None:
    """Layers of each stage under a limit of cost, as even as the limit allows; None where it is too low."""
    extra = [0.0] * stages
    extra[0] += embedding
    extra[-1] += head
    most = [int(limit - e + 1e-9) for e in extra]
    if min(most) < 1 or not stages <= layers <= sum(most):
        return None
    counts = [1] * stages
    for _ in range(layers - stages):  # the cheapest stage that has room takes the next layer
        stage = min((s for s in range(stages) if counts[s] < most[s]), key=lambda s: counts[s] + extra[s])
        counts[stage] += 1
    return counts
