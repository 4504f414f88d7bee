"""The pipeline schedules by name, and how they place stages on ranks (no torch here).

stages of pp=2   looped: rank 0 has 0 2, rank 1 has 1 3      V: rank 0 has 0 3, rank 1 has 1 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import add

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


def split_layers(costs: Sequence[float], stages: int, embedding_cost: float, head_cost: float) -> list[int]:
    """Layers of each stage so that the dearest stage is as cheap as can be, and the others as even as that allows.

    Args:
        costs: of each layer, in any unit.
        stages: each gets at least one layer, in order.
        embedding_cost: what the first stage has besides, in the same unit.
        head_cost: what the last stage has besides.
    """
    if len(costs) < stages:
        raise ValueError(f"{len(costs)} layers cannot fill {stages} stages")
    ends = list(accumulate(costs, initial=0.0))

    def cost(stage: int, first: int, end: int) -> float:
        return ends[end] - ends[first] + embedding_cost * (stage == 0) + head_cost * (stage == stages - 1)

    limit = _cheapest(len(costs), stages, cost, max)[0] * (1 + 1e-9)

    def unevenness(stage: int, first: int, end: int) -> float:
        dear = cost(stage, first, end)
        return dear * dear if dear <= limit else inf

    return _cheapest(len(costs), stages, unevenness, add)[1]


def _cheapest(
    layers: int, stages: int, cost: Callable[[int, int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least joint cost(stage, first, end) over all splits of the layers, and the layers of each stage under it."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by layers placed, on the stages so far
    for stage in range(stages):
        ends = range(stage + 1, layers - (stages - stage - 1) + 1) if stage < stages - 1 else (layers,)
        best = {
            end: min((join(so_far, cost(stage, first, end)), [*counts, end - first])
                     for first, (so_far, counts) in best.items() if first < end)
            for end in ends
        }  # fmt: skip
    return best[layers]
