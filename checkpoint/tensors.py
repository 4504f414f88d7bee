"""Writing a process's pieces to its file, and reading any rectangle out of all processes' files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from checkpoint.pieces import Entry, Index, Piece, Stored, check_cover, from_json, listing, whole
from errors import CheckpointRefused
from files import sync

PIECES = "pieces.json"


@dataclass(frozen=True)
class _Read:
    """One copy from a file into a piece."""

    name: str
    stored: Stored
    dtype: torch.dtype
    source: tuple[slice, ...]
    """Of the file's tensor."""
    target: Tensor
    """View of the piece's elements."""


def file_name(rank: int, world: int) -> str:
    """File of one process's pieces."""
    return "tensors.safetensors" if world == 1 else f"tensors_{rank:05d}.safetensors"


def write(folder: Path, file: str, pieces: Mapping[str, Piece]) -> Index:
    """Write what this process is to write, and force it to the disk; without anything to write there is no file."""
    index = listing(pieces, file)
    own = {name: pieces[name].local.detach().cpu().contiguous() for name, entry in index.items() if entry.pieces}
    if own:
        save_file(own, folder / file)
        sync(folder / file)
    return index


def read_index(path: Path) -> Index:
    """The tensors of the checkpoint in folder `path`.

    Raises:
        CheckpointRefused: the index cannot be read.
    """
    file = path / PIECES
    try:
        return from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, file, str(error)) from error


def check_same(index: Index, held: set[str], pieces: Mapping[str, Piece]) -> None:
    """Refuse a checkpoint whose names, shapes or dtypes differ from the model's, naming them.

    Args:
        held: names of all processes' pieces.
        pieces: those of this one.
    """
    missing, extra = sorted(held - index.keys()), sorted(index.keys() - held)
    if missing or extra:
        raise CheckpointRefused(
            f"the checkpoint's tensors are not this model's: missing {missing[:5]} ({len(missing)}), "
            f"unexpected {extra[:5]} ({len(extra)}); resume with the model config that wrote it"
        )
    for name, piece in pieces.items():
        entry = index[name]
        if (entry.shape, entry.dtype) != (tuple(piece.shape), piece.local.dtype):
            raise CheckpointRefused(
                f"tensor {name} is {entry.shape} {entry.dtype} in the checkpoint, "
                f"{tuple(piece.shape)} {piece.local.dtype} here; resume with the model and precision that wrote it"
            )


@torch.no_grad()
def fill(path: Path, index: Index, pieces: Mapping[str, Piece]) -> None:
    """Copy into each piece its elements, in its own dtype; nothing else is read, and each file is opened once.

    Raises:
        CheckpointRefused: a file is missing, cut off, or not what the index says.
    """
    reads: dict[str, list[_Read]] = defaultdict(list)
    for name, piece in pieces.items():
        try:
            check_cover(name, index[name])
        except ValueError as error:
            raise _damaged(path, path / PIECES, str(error)) from error
        for read in _plan(name, index[name], piece):
            reads[read.stored.file].append(read)
    for file, its in reads.items():
        try:
            _copy(path / file, its)
        except (OSError, SafetensorError, ValueError) as error:
            raise _damaged(path, path / file, str(error)) from error


def _plan(name: str, entry: Entry, piece: Piece) -> list[_Read]:
    """The copies that fill one piece."""
    own, plan = piece.rectangle, []
    for stored in entry.pieces:
        common = own.meet(stored.rectangle)
        if common is not None:
            source, target = common.within(stored.rectangle), piece.local[common.within(own)]
            plan.append(_Read(name, stored, entry.dtype, source, target))
    return plan


def _copy(file: Path, reads: list[_Read]) -> None:
    """Make the copies from one file; its pages are mapped, so only those touched are read."""
    with safe_open(file, framework="pt", device="cpu") as tensors:
        for read in reads:
            there = tensors.get_slice(read.name)
            shape, expected = tuple(there.get_shape()), read.stored.rectangle.shape
            part = there[read.source] if shape == expected else torch.empty(0)
            if shape != expected or part.dtype != read.dtype:
                raise ValueError(f"its {read.name} is not the {expected} {read.dtype} of {PIECES}")
            read.target.copy_(part)


def _damaged(path: Path, file: Path, reason: str) -> CheckpointRefused:
    return CheckpointRefused(
        f"cannot read {file}: {reason}; remove the folder {path} to go on from the checkpoint before it"
    )


def read_whole(path: Path, prefix: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Whole tensors whose names begin with `prefix`, on the CPU; converted if `dtype` is given."""
    index = {name: entry for name, entry in read_index(path).items() if name.startswith(prefix)}
    tensors = {n: torch.empty(e.shape, dtype=dtype or e.dtype) for n, e in index.items()}
    fill(path, index, {name: whole(tensor) for name, tensor in tensors.items()})
    return tensors
