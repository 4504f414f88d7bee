"""What each pipeline rank computes, in order: written down from torch's own schedules, without processes.

torch's schedule runs on stages that compute nothing and only note what they were told, so that the lists are
what a run does, whatever the schedule's own tables say. Only this file knows how torch's schedules are built.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from torch.distributed.pipelining import schedules

from parallel.schedules import SCHEDULES, ScheduleKind, stages_of

Kind = Literal["F", "B", "I", "W"]
_KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Action:
    """One computation of one stage chunk on one micro-batch."""

    kind: Kind
    """F forward, B whole backward, I gradient of the input alone, W gradient of the weights alone."""
    stage: int
    micro_batch: int
    sent_after: int = field(default=0, compare=False)
    """Further computations that the rank makes before the result leaves it: torch sends after a whole overlapped
    pair of a forward and a backward."""

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro_batch})"


def action_lists(schedule: str, pp: int, per_rank: int, micro_batches: int) -> list[list[Action]]:
    """What each of pp ranks computes, in order, with `per_rank` stages a rank.

    Raises:
        ValueError: the schedule cannot take these numbers, or torch's list does not cover every micro-batch.
    """
    kind = SCHEDULES[schedule]
    numbers = f"{schedule} with pp={pp}, vpp={per_rank} and {micro_batches} micro-batches"
    wrong = _wrong_numbers(kind, pp, per_rank, micro_batches)
    if wrong:
        raise ValueError(f"{numbers}: {wrong}")
    try:
        lists = (_run_several if kind.several else _run_single)(kind, pp, per_rank, micro_batches)
    except (ValueError, AssertionError, RuntimeError) as error:  # torch refuses with any of these
        reason = " ".join(str(error).partition("\n\n")[0].split())  # what follows is its table of the whole schedule
        raise ValueError(f"{numbers}: {reason}") from error
    missing = _missing(lists, pp * per_rank, micro_batches)
    if missing:
        raise ValueError(f"{numbers}: torch's list is not complete: {missing}")
    return lists


def stage_ranks(schedule: str, pp: int, per_rank: int) -> list[int]:
    """Pipeline rank of each stage."""
    places = {
        stage: rank for rank in range(pp) for stage in stages_of(rank, pp, per_rank, SCHEDULES[schedule].v_shaped)
    }
    return [places[stage] for stage in range(pp * per_rank)]


def _wrong_numbers(kind: ScheduleKind, pp: int, per_rank: int, micro_batches: int) -> str:
    """Why no schedule object can be built: torch does not check these, or not before it fails."""
    if min(pp, per_rank, micro_batches) < 1:
        return "each must be at least 1"
    if not kind.several and per_rank != 1:
        return "this schedule has one stage a rank"
    if kind.v_shaped and per_rank != 2:
        return "this schedule has two stages a rank"
    return ""


def _run_single(kind: ScheduleKind, pp: int, per_rank: int, micro_batches: int) -> list[list[Action]]:
    """One schedule object a rank: its loop is a program, and its table of the order is not what it runs."""
    lists: list[list[Action]] = []
    for rank in range(pp):
        lists.append([])
        schedule = getattr(schedules, kind.torch_name)(_NotingStage(rank, rank, pp, pp, lists[-1]), micro_batches)
        schedule._stage_forward_initialized = True  # no shapes to agree on, nobody to meet
        schedule._step_microbatches(return_outputs=False)
    return lists


def _run_several(kind: ScheduleKind, pp: int, per_rank: int, micro_batches: int) -> list[list[Action]]:
    """One schedule object for all ranks, moved from rank to rank: it holds the order of each."""
    lists: list[list[Action]] = [[] for _ in range(pp)]
    stages = [
        [_NotingStage(s, rank, pp, pp * per_rank, lists[rank]) for s in stages_of(rank, pp, per_rank, kind.v_shaped)]
        for rank in range(pp)
    ]
    schedule = getattr(schedules, kind.torch_name)(stages[0], micro_batches)
    schedule._stages_forward_initialized = True
    for rank in range(pp):
        schedule.rank, schedule._stages = rank, stages[rank]
        schedule._step_microbatches(return_outputs=False)
    return lists


class _NotingStage:
    """A stage as far as a schedule looks at it: it computes and sends nothing, and notes what it was told."""

    submod = None

    def __init__(self, stage: int, rank: int, pp: int, stages: int, notes: list[Action]) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = stage, rank, pp, stages
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.stage_index_to_group_rank: dict[int, int] = {}  # filled by the schedule
        self._notes = notes

    def forward_one_chunk(self, micro_batch: int, *args: Any, **options: Any) -> None:
        self._notes.append(Action("F", self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch: int, *args: Any, full_backward: bool = True, **options: Any) -> None:
        self._notes.append(Action("B" if full_backward else "I", self.stage_index, micro_batch))

    def backward_weight_one_chunk(self, micro_batch: int, **options: Any) -> None:
        self._notes.append(Action("W", self.stage_index, micro_batch))

    def perform_reduce_grad(self, scale: int) -> None:
        """Gradients of data-parallel ranks are no part of the order."""

    def get_fwd_send_ops(self, micro_batch: int) -> list[Any]:
        return self._send("F", micro_batch)

    def get_bwd_send_ops(self, micro_batch: int) -> list[Any]:
        return self._send("BI", micro_batch)

    def _send(self, kinds: str, micro_batch: int) -> list[Any]:
        """Note how many computations came between the one that made a result and its leaving."""
        made = [Action(kind, self.stage_index, micro_batch) for kind in _KINDS if kind in kinds]
        waited = next(back for back, action in enumerate(reversed(self._notes)) if action in made)
        self._notes[-1 - waited] = replace(self._notes[-1 - waited], sent_after=waited)
        return []

    def _nothing(self, micro_batch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_bwd_recv_ops = get_local_bwd_output = _nothing

    def _take(self, value: Any, micro_batch: int) -> None:
        """From a neighbouring stage on the same rank."""

    set_local_fwd_input = set_local_bwd_input = _take


def _missing(lists: list[list[Action]], stages: int, micro_batches: int) -> str:
    """What keeps the lists from doing each stage's forward and backward once a micro-batch; empty: nothing."""
    actions = [action for actions in lists for action in actions]
    known = set(actions)
    if len(known) < len(actions):
        return f"{len(actions) - len(known)} computations come twice"
    for stage in range(stages):
        for micro_batch in range(micro_batches):
            has = "".join(kind for kind in _KINDS if Action(kind, stage, micro_batch) in known)
            if has not in ("FB", "FIW"):
                return f"stage {stage} makes {has or 'nothing'} of micro-batch {micro_batch}, not FB or FIW"
    return ""
