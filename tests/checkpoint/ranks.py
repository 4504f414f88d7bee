"""Several processes in one: a thread each, so that any layout can be tried in milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from checkpoint.pieces import Piece, Rectangle
from parallel.process import Everyone


class Killed(BaseException):
    """What a killed process does not catch."""


class Room:
    """Where the threads meet."""

    def __init__(self, world: int) -> None:
        self.texts = [""] * world
        self.barrier = threading.Barrier(world, timeout=20)


@dataclass(frozen=True)
class Threads(Everyone):
    """Everyone, as one thread sees it."""

    room: Room = field(default_factory=lambda: Room(1))
    killed_at: int = 0
    """Number of the exchange before which every process dies; 0: none."""
    exchanges: list[str] = field(default_factory=list)
    """What this process has said."""

    def gather(self, text: str) -> list[str]:
        """Every thread's text."""
        self.exchanges.append(text)
        if len(self.exchanges) == self.killed_at:
            raise Killed
        self.room.texts[self.rank] = text
        self.room.barrier.wait()
        texts = list(self.room.texts)
        self.room.barrier.wait()
        return texts


def on_ranks(world: int, act: Callable[[Everyone], Any], killed_at: int = 0) -> list[Any]:
    """What each of `world` processes returns or raises."""
    room = Room(world)

    def one(rank: int) -> Any:
        try:
            return act(Threads(rank, world, room=room, killed_at=killed_at))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def parts(extent: int, count: int) -> Iterator[tuple[int, int]]:
    """Start and length of each of `count` equal parts; the last ones may be short or empty."""
    step = -(-extent // count)
    for number in range(count):
        start = min(extent, number * step)
        yield start, min(extent, start + step) - start


def grid(shape: tuple[int, ...], tp: int, shard: int, tp_axis: int | None = 0) -> list[Rectangle]:
    """The rectangle of each of tp x shard ranks (tp fastest): cut by tp along its axis, what is left by rows."""
    if not shape:
        return [Rectangle((), ())] * (tp * shard)
    out: list[list[Rectangle]] = [[] for _ in range(shard)]
    for at, extent in parts(shape[tp_axis], tp) if tp_axis is not None else [(0, shape[0])] * tp:
        start, own = [0] * len(shape), list(shape)
        start[tp_axis or 0], own[tp_axis or 0] = at, extent
        for number, (row, rows) in enumerate(parts(own[0], shard)):
            place = Rectangle((start[0] + row, *start[1:]), (rows, *own[1:]))
            out[number].append(place)
    return [each for row in out for each in row]


def held(tensor: Tensor, rectangles: list[Rectangle], rank: int) -> Piece:
    """What a rank has of a tensor; of several ranks that have the same, the first writes."""
    own = rectangles[rank]
    return Piece(
        tensor[own.within(Rectangle((0,) * tensor.dim(), tuple(tensor.shape)))].clone(), tuple(tensor.shape), own.start,
        writes=own not in rectangles[:rank],
    )  # fmt: skip


def empty(piece: Piece) -> Piece:
    """The same place, to be filled."""
    filler = torch.full_like(piece.local, 77)
    return Piece(filler, piece.shape, piece.start, piece.writes)
