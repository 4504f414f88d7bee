"""Tensors in pieces: which rectangle of which whole tensor each process holds, and which file has it.

Two processes write a [4, 6] tensor cut by columns; three read it cut by rows:

    written        read          the second reader's rows are the meeting of its rectangle
    +---+---+     +-------+      with each of the files' rectangles: half from one, half from
    | 0 | 1 |     |   0   |      the other. Every cut, even or not, comes down to this.
    |   |   |     +-------+
    |   |   |     |   1   |
    +---+---+     +-------+
                  |   2   |
                  +-------+
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from operator import add, sub
from operator import index as integer
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkpoint.container import Placed, Written


class Rectangle(NamedTuple):
    """Part of a whole tensor; that of a scalar has no axes and one element. (A tuple, as there may be a million.)"""

    start: tuple[int, ...]
    """Index of its first element in the whole tensor."""
    shape: tuple[int, ...]
    """Its extent along each axis."""

    @property
    def elements(self) -> int:
        """How many it holds."""
        return prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """Index after its last element, along each axis."""
        return tuple(map(add, self.start, self.shape))

    def meet(self, other: Rectangle) -> Rectangle | None:
        """What both hold, if anything."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(map(sub, map(min, self.stop, other.stop), start))
        return Rectangle(start, shape) if min(shape, default=1) > 0 else None

    def within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Where it lies in a tensor that holds `outer`."""
        return tuple(slice(s - o, s - o + n) for s, o, n in zip(self.start, outer.start, self.shape, strict=True))


def _all_of(shape: tuple[int, ...]) -> Rectangle:
    return Rectangle((0,) * len(shape), shape)


@dataclass(frozen=True)
class Piece:
    """What one process holds of a tensor."""

    local: Tensor
    """The elements held here, possibly none."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]
    """Index of local's first element in the whole tensor."""
    writes: bool = True
    """Whether a checkpoint takes them from here; of those that hold the same, one process does."""

    def __post_init__(self) -> None:
        """A place outside the whole tensor is a fault of the caller's arithmetic."""
        own, axes = self.rectangle, {self.local.dim(), len(self.shape), len(self.start)}
        if len(axes) > 1 or (own.elements and own.meet(_all_of(self.shape)) != own):
            raise ValueError(f"no piece: {tuple(self.local.shape)} at {self.start} of a tensor {self.shape}")

    @property
    def rectangle(self) -> Rectangle:
        """Where it lies in the whole tensor."""
        return Rectangle(tuple(self.start), tuple(self.local.shape))


def whole(tensor: Tensor) -> Piece:
    """A tensor that is not cut."""
    return Piece(tensor, tuple(tensor.shape), (0,) * tensor.dim())


class Stored(NamedTuple):
    """A rectangle and the file that has it, as a tensor of its own."""

    file: str
    rectangle: Rectangle
    place: Placed = Placed(0, ())
    """Where it lies there, with its hashes; not known before it is written."""


@dataclass(frozen=True)
class Entry:
    """One whole tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[Stored] = field(default_factory=list)


Index = dict[str, Entry]
"""Every tensor of a checkpoint, by its global name."""


class Header(NamedTuple):
    """A file of tensors: its bytes, and of what precedes the tensors in it bytes and hash."""

    size: int
    header_size: int
    hash: str


class Contents(NamedTuple):
    """All that is in the files of tensors."""

    files: dict[str, Header]
    tensors: Index


def listing(pieces: Mapping[str, Piece], file: str, written: Written | None) -> Contents:
    """What one process holds, and in it what it has written to `file`.

    A tensor that it does not write is listed too, so that one which nobody writes is found.
    """
    places = written.places if written else {}
    tensors = {
        name: Entry(
            piece.local.dtype, tuple(piece.shape),
            [Stored(file, piece.rectangle, places[name])] if name in places else [],
        )
        for name, piece in pieces.items()
    }  # fmt: skip
    return Contents({file: Header(written.size, written.header_size, written.header)} if written else {}, tensors)


def is_written(piece: Piece) -> bool:
    """Whether a checkpoint takes anything from here."""
    return piece.writes and piece.rectangle.elements > 0


def merge(listings: Iterable[Contents]) -> Contents:
    """What is in all processes' files.

    Raises:
        ValueError: two processes differ about a tensor, or its pieces do not cover it exactly once.
    """
    merged = Contents({}, {})
    for each in listings:
        merged.files.update(each.files)
        for name, entry in each.tensors.items():
            known = merged.tensors.setdefault(name, Entry(entry.dtype, entry.shape))
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise ValueError(
                    f"processes differ about {name}: {known.shape} {known.dtype}, {entry.shape} {entry.dtype}"
                )
            known.pieces.extend(entry.pieces)
    for name, entry in merged.tensors.items():
        check_cover(name, entry)
    return merged


def check_cover(name: str, entry: Entry) -> None:
    """Every element of the whole tensor is in one piece and no more.

    Where pieces meet, their corners fall on each other. If all corners, with those of the whole, cancel in pairs,
    then an odd number of pieces holds each element of the whole, and an even number anything outside; if they have
    as many elements as the whole besides, the numbers are one and none. No pair of pieces is compared.

    Raises:
        ValueError: some are in none, or in several.
    """
    rectangles = [stored.rectangle for stored in entry.pieces]
    found, needed = sum(r.elements for r in rectangles), prod(entry.shape)
    alone: set[tuple[int, ...]] = set()
    for each in [_all_of(entry.shape)] * (needed > 0) + rectangles:
        alone ^= set(product(*zip(each.start, each.stop, strict=True)))
    if alone or found != needed:
        shown = ", ".join(f"{s.file} {s.rectangle.shape} at {s.rectangle.start}" for s in entry.pieces[:8])
        raise ValueError(
            f"the pieces of {name} {entry.shape} do not cover it exactly once: {found} elements of {needed} in "
            f"{len(rectangles)} pieces ({shown or 'none'})"
        )


def to_json(contents: Contents) -> str:
    """One line a tensor."""
    files = json.dumps({name: header._asdict() for name, header in contents.files.items()})
    lines = (f"{json.dumps(name)}: {json.dumps(_plain(entry))}" for name, entry in contents.tensors.items())
    return f'{{"files": {files},\n"tensors": {{\n' + ",\n".join(lines) + "\n}}\n"


def _plain(entry: Entry) -> dict[str, object]:
    pieces = [
        {
            "file": s.file, "start": s.rectangle.start, "shape": s.rectangle.shape, "offset": s.place.offset,
            "hashes": s.place.hashes,
        }
        for s in entry.pieces
    ]  # fmt: skip
    return {"dtype": str(entry.dtype).removeprefix("torch."), "shape": entry.shape, "pieces": pieces}


def from_json(text: str) -> Contents:
    """What `to_json` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        raw = json.loads(text)
        files = {name: _header(each) for name, each in raw["files"].items()}
        return Contents(files, {name: _entry(each) for name, each in raw["tensors"].items()})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no list of pieces: {error!r}") from error


def _header(raw: dict[str, Any]) -> Header:
    return Header(integer(raw["size"]), integer(raw["header_size"]), str(raw["hash"]))


def _entry(raw: dict[str, Any]) -> Entry:
    dtype = getattr(torch, raw["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(raw["dtype"])
    return Entry(dtype, _integers(raw["shape"]), [_stored(each) for each in raw["pieces"]])


def _stored(raw: dict[str, Any]) -> Stored:
    place = Placed(integer(raw["offset"]), tuple(map(str, raw["hashes"])))
    return Stored(raw["file"], Rectangle(_integers(raw["start"]), _integers(raw["shape"])), place)


def _integers(raw: list[Any]) -> tuple[int, ...]:
    return tuple(map(integer, raw))
