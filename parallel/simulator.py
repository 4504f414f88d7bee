"""How long a pipeline schedule takes, where it idles and what it holds, from the order of its computations.

F0 runs on rank 0, its output moves, F1 runs on rank 1, ...; gradients come back the other way:

    rank 0  | F0 ..  ..  .. B0 B0      a result moves on when its computation ends; a rank runs its list in order
    rank 1  | .. F0  B0  B0 .. ..      and waits where the next one lacks what it needs
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.action_lists import Action

Lists = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Times:
    """How long the computations of one stage chunk on one micro-batch take, in any one unit."""

    forward: float = 1
    backward_input: float = 1
    """Gradient of the input alone; a whole backward takes this and backward_weight."""
    backward_weight: float = 1
    transfer: float = 0
    """From the end of a computation to its result on another rank; the links are never busy."""

    def __post_init__(self) -> None:
        values = (self.forward, self.backward_input, self.backward_weight, self.transfer)
        if not all(math.isfinite(value) and value >= 0 for value in values) or not any(values[:3]):
            raise ValueError(f"times must be numbers from 0 up, one computation above 0; these are {values}")

    def of(self, action: Action) -> float:
        """Of one computation."""
        whole = self.backward_input + self.backward_weight
        return {"F": self.forward, "B": whole, "I": self.backward_input, "W": self.backward_weight}[action.kind]


class Span(NamedTuple):
    """When one computation ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """One step of a pipeline; tuples have one element a rank."""

    spans: tuple[tuple[Span, ...], ...]
    """Computations in the order that each rank ran them."""
    busy: tuple[float, ...]
    """Time that each rank computes."""
    in_flight: tuple[int, ...]
    """Most chunks at once whose forward is done and whose input gradient (B or I) is not."""
    in_flight_weights: tuple[int, ...]
    """The same, held until the weight gradient (B or W): what a split backward keeps the inputs of products for."""

    @property
    def total(self) -> float:
        """From the first computation of any rank to the last."""
        return max((spans[-1].end for spans in self.spans if spans), default=0)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time of the total that each rank waits."""
        return tuple(self.total - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """What the total has above the busiest rank's own work, as a share of that work."""
        ideal = max(self.busy)
        return (self.total - ideal) / ideal if ideal else 0.0


class Deadlock(ValueError):
    """No rank can go on; the message names what each one waits at and for."""


def simulate(lists: Lists, stage_ranks: Sequence[int], times: Times) -> Simulation:
    """Run the lists: a computation starts when its rank is free and what it needs has arrived.

    F(stage, m) needs F(stage - 1, m). B and I (stage, m) need their own F and the B or I of stage + 1. W needs
    its own I. A send waits for no receiver.

    Raises:
        Deadlock: a computation waits for one that never comes.
        ValueError: a computation comes twice, or on a rank that does not have its stage.
    """
    board = _Board(_find_places(lists, stage_ranks), len(stage_ranks), times.transfer, [[] for _ in lists])
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            moved |= _advance(board, rank, actions, times)
    _refuse_deadlock(board, lists)
    return Simulation(
        spans=tuple(tuple(row) for row in board.spans),
        busy=tuple(sum(times.of(action) for action in actions) for actions in lists),
        in_flight=tuple(_peak(actions, "BI") for actions in lists),
        in_flight_weights=tuple(_peak(actions, "BW") for actions in lists),
    )


def chart(simulation: Simulation, unit: float = 1) -> str:
    """One row a rank, one character a unit of time; the unit is best a divisor of all times.

    A forward is the last digit of its micro-batch's number, B or I its letter (a, b, ... for 0, 1, ...), W its
    capital; a dot is idle.
    """
    columns = math.ceil(simulation.total / unit - 1e-9)
    wide = len(str(len(simulation.spans) - 1))
    rows = []
    for rank, spans in enumerate(simulation.spans):
        cells = ["."] * columns
        for span in spans:  # a cell shows what runs in its middle
            for cell in range(math.ceil(span.start / unit - 0.5), min(math.ceil(span.end / unit - 0.5), columns)):
                cells[cell] = _mark(span.action)
        rows.append(f"rank {rank:>{wide}} " + "".join(cells))
    return "\n".join(rows)


def _mark(action: Action) -> str:
    if action.kind == "F":
        return str(action.micro_batch % 10)
    return chr(ord("A" if action.kind == "W" else "a") + action.micro_batch % 26)


class _Place(NamedTuple):
    """Where a result is made."""

    rank: int
    at: int
    """Place of the computation in the rank's list."""
    sent: int
    """Place of the computation after which the result leaves the rank."""


@dataclass
class _Board:
    """How far every rank has come."""

    places: dict[Action, _Place]
    """Each result -> where it is made."""
    stages: int
    transfer: float
    spans: list[list[Span]]
    """What each rank has run so far."""

    def arrival(self, result: Action, rank: int) -> float | None:
        """When a result is there for a rank; None: it has not been made yet."""
        place = self.places.get(result)
        if place is None:
            return None
        elsewhere = place.rank != rank
        index = place.sent if elsewhere else place.at
        made = self.spans[place.rank]
        return made[index].end + (self.transfer if elsewhere else 0) if index < len(made) else None


def _results(action: Action) -> list[Action]:
    """What a computation makes, by the name of the partial computation that makes it alone."""
    if action.kind != "B":
        return [action]
    return [Action("I", action.stage, action.micro_batch), Action("W", action.stage, action.micro_batch)]


def _needs(action: Action, stages: int) -> list[Action]:
    """The results that a computation starts from."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return [Action("F", stage - 1, micro_batch)] if stage else []
    if action.kind == "W":
        return [Action("I", stage, micro_batch)]
    return [Action("F", stage, micro_batch)] + ([Action("I", stage + 1, micro_batch)] if stage + 1 < stages else [])


def _find_places(lists: Lists, stage_ranks: Sequence[int]) -> dict[Action, _Place]:
    """Each result -> where it is made."""
    places: dict[Action, _Place] = {}
    for rank, actions in enumerate(lists):
        for index, action in enumerate(actions):
            if not 0 <= action.stage < len(stage_ranks) or stage_ranks[action.stage] != rank:
                raise ValueError(f"rank {rank} does {action}, but does not have that stage")
            for result in _results(action):
                if result in places:
                    raise ValueError(f"rank {rank} does {action} again")
                places[result] = _Place(rank, index, min(index + action.sent_after, len(actions) - 1))
    return places


def _advance(board: _Board, rank: int, actions: Sequence[Action], times: Times) -> bool:
    """Run a rank's list as far as it goes; whether it went on at all."""
    spans = board.spans[rank]
    before = len(spans)
    for action in actions[before:]:
        arrivals = [board.arrival(need, rank) for need in _needs(action, board.stages)]
        there = [arrival for arrival in arrivals if arrival is not None]
        if len(there) < len(arrivals):
            break
        start = max([*there, spans[-1].end if spans else 0])
        spans.append(Span(action, start, start + times.of(action)))
    return len(spans) > before


def _refuse_deadlock(board: _Board, lists: Lists) -> None:
    """Raise Deadlock where a rank has not run its whole list."""
    stuck = []
    for rank, actions in enumerate(lists):
        for action in actions[len(board.spans[rank]) :][:1]:
            lacking = [str(need) for need in _needs(action, board.stages) if board.arrival(need, rank) is None]
            stuck.append(f"rank {rank} cannot run {action} for lack of {' and '.join(lacking)}")
    if stuck:
        raise Deadlock("the pipeline stands still: " + "; ".join(stuck))


def _peak(actions: Sequence[Action], release: str) -> int:
    """Most chunks at once between their forward and the computation that releases them."""
    now = most = 0
    for action in actions:
        now += (action.kind == "F") - (action.kind in release)
        most = max(most, now)
    return most
