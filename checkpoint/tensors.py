"""Writing a process's pieces to its file, and reading any rectangle out of all processes' files."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import container
from checkpoint.agreement import Damaged
from checkpoint.container import BLOCK, Corrupt
from checkpoint.pieces import (
    Contents,
    Entry,
    Header,
    Index,
    Piece,
    Stored,
    check_cover,
    from_json,
    is_written,
    listing,
    whole,
)
from errors import CheckpointRefused

PIECES = "pieces.json"
_READERS = 4  # threads; beyond, memory is what limits


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


def write(folder: Path, file: str, pieces: Mapping[str, Piece]) -> Contents:
    """Write what this process is to write, and force it to the disk; without anything to write there is no file."""
    own = {name: each.local.detach().cpu().contiguous() for name, each in pieces.items() if is_written(each)}
    return listing(pieces, file, container.write(folder / file, own) if own else None)


def read_contents(path: Path) -> Contents:
    """What is in the files of the checkpoint in folder `path`.

    Raises:
        Damaged: its list cannot be read.
    """
    file = path / PIECES
    try:
        return from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Damaged(path, file, str(error)) from error


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
        if words := difference(name, index[name], piece):
            raise CheckpointRefused(f"{words}; resume with the model and precision that wrote it")


def difference(name: str, entry: Entry, piece: Piece) -> str | None:
    """How a tensor of a checkpoint differs from the one it is to fill; None: only, if at all, in its values."""
    there, here = (entry.shape, entry.dtype), (tuple(piece.shape), piece.local.dtype)
    if there == here:
        return None
    return f"tensor {name} is {there[0]} {there[1]} in the checkpoint, {here[0]} {here[1]} here"


@torch.no_grad()
def fill(path: Path, contents: Contents, pieces: Mapping[str, Piece]) -> None:
    """Copy into each piece its elements, in its own dtype. Of each stored tensor only the blocks that are needed are
    read; all that is read is checked.

    Raises:
        Damaged: a file is missing, cut off, or not what was written.
    """
    reads: dict[str, list[_Read]] = defaultdict(list)
    for name, piece in pieces.items():
        try:
            check_cover(name, contents.tensors[name])
        except ValueError as error:
            raise Damaged(path, path / PIECES, str(error)) from error
        for read in _plan(name, contents.tensors[name], piece):
            reads[read.stored.file].append(read)
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as readers:
        for file, its in reads.items():
            _fill_from(path, file, contents, its, readers)


def _fill_from(
    path: Path, file: str, contents: Contents, reads: list[_Read], readers: ThreadPoolExecutor
) -> None:  # fmt: skip
    try:
        header = contents.files[file]
        with container.opened(path / file, header.size) as handle:
            container.check_header(handle, header.header_size, header.hash)
            for done in [readers.submit(_copy, handle, read) for read in reads]:
                done.result()
    except (OSError, Corrupt, KeyError) as error:
        raise Damaged(path, path / file, str(error)) from error


def _plan(name: str, entry: Entry, piece: Piece) -> list[_Read]:
    """The copies that fill one piece."""
    own, plan = piece.rectangle, []
    for stored in entry.pieces:
        common = own.meet(stored.rectangle)
        if common is not None:
            source, target = common.within(stored.rectangle), piece.local[common.within(own)]
            plan.append(_Read(name, stored, entry.dtype, source, target))
    return plan


@torch.no_grad()
def _copy(handle: int, read: _Read) -> None:
    """Read the blocks that hold a rectangle, straight into its place where that is all there is in them."""
    shape, target = read.stored.rectangle.shape, read.target
    size = read.dtype.itemsize * read.stored.rectangle.elements
    first, last = _span(shape, read.source)
    begin = first * read.dtype.itemsize // BLOCK * BLOCK
    end = min(size, -(-(last + 1) * read.dtype.itemsize // BLOCK) * BLOCK)
    straight = target.device.type == "cpu" and target.is_contiguous() and target.dtype == read.dtype
    if straight and end - begin == target.numel() * target.element_size():
        memory = container.as_bytes(target)
        container.read_checked(handle, read.stored.place, read.name, memory, begin // BLOCK)
        return
    scratch = torch.empty(end - begin, dtype=torch.uint8)
    container.read_checked(handle, read.stored.place, read.name, container.as_bytes(scratch), begin // BLOCK)
    # Elements that are not read lie outside the rectangle: strides alone say where the others are.
    flat, skipped = scratch.view(read.dtype), begin // read.dtype.itemsize
    strides = _strides(shape)
    extent = tuple(s.stop - s.start for s in read.source)
    target.copy_(flat.as_strided(extent, strides, first - skipped))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _span(shape: tuple[int, ...], part: tuple[slice, ...]) -> tuple[int, int]:
    """Numbers of the first and last element of a part of a contiguous tensor."""
    strides = _strides(shape)
    first = sum(s.start * step for s, step in zip(part, strides, strict=True))
    last = sum((s.stop - 1) * step for s, step in zip(part, strides, strict=True))
    return first, last


def check_files(path: Path, contents: Contents, files: Iterable[str]) -> dict[str, str]:
    """Read every byte of files of tensors; the hash of each.

    Raises:
        Damaged: naming the file.
    """
    stored: dict[str, list[tuple[Stored, str, int]]] = {file: [] for file in files}
    for name, entry in contents.tensors.items():
        for each in entry.pieces:
            if each.file in stored:
                stored[each.file].append((each, name, entry.dtype.itemsize * each.rectangle.elements))
    return {file: _check_file(path, file, contents.files[file], its) for file, its in stored.items()}


def _check_file(path: Path, file: str, header: Header, stored: list[tuple[Stored, str, int]]) -> str:
    """Read a file's tensors; its hash."""
    stored.sort(key=lambda item: item[0].place.offset)
    memory = memoryview(bytearray(BLOCK))
    try:
        with container.opened(path / file, header.size) as handle:
            container.check_header(handle, header.header_size, header.hash)
            for each, name, size in stored:
                for begin, end in container.blocks(size):
                    container.read_checked(handle, each.place, name, memory[: end - begin], begin // BLOCK)
    except (OSError, Corrupt) as error:
        raise Damaged(path, path / file, str(error)) from error
    return file_hash(header, [each for each, _, _ in stored])


def file_hash(header: Header, stored: Iterable[Stored]) -> str:
    """Of a file with these tensors, in the order of their places."""
    return container.combined([header.hash, *(hashed for each in stored for hashed in each.place.hashes)])


def file_hashes(contents: Contents) -> dict[str, str]:
    """Of all files of tensors, from what is known of their parts."""
    stored: dict[str, list[Stored]] = {file: [] for file in contents.files}
    for entry in contents.tensors.values():
        for each in entry.pieces:
            stored[each.file].append(each)
    return {
        file: file_hash(header, sorted(stored[file], key=lambda each: each.place.offset))
        for file, header in contents.files.items()
    }


def read_whole(path: Path, prefix: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Whole tensors whose names begin with `prefix`, on the CPU; converted if `dtype` is given."""
    files, tensors = read_contents(path)
    index = {name: entry for name, entry in tensors.items() if name.startswith(prefix)}
    found = {n: torch.empty(e.shape, dtype=dtype or e.dtype) for n, e in index.items()}
    fill(path, Contents(files, tensors), {name: whole(tensor) for name, tensor in found.items()})
    return found
