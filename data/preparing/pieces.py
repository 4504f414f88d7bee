"""Pieces: documents on their way from texts to a corpus, sorted by rank, some tens of megabytes a file.

piece file   | row of document 0 | row of document 1 | ... | tokens of document 0 | tokens of document 1 | ...

Every piece is sorted, so that any range of ranks is one range of rows and one range of tokens in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from files import sync

ROW = np.dtype([("rank", "<u8"), ("tie", "<u8"), ("side", "<u8"), ("tokens", "<u4"), ("bytes", "<u4")])
"""A document: its place in the shuffled order (ties by a second word), its side of the split, tokens, bytes of text."""

Rows = npt.NDArray[Any]
"""[documents] of ROW."""
Tokens = npt.NDArray[Any]
Offsets = npt.NDArray[np.int64]

_PIECE_BYTES = 64 << 20
_BLOCK_TOKENS = 1 << 20
_TOKENS_WORTH_A_SLICE = 128
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Piece:
    """A piece file as it must be."""

    file: str
    """Name in the work folder."""
    documents: int
    """Rows in it."""
    tokens: int
    """Tokens in it, end-of-document tokens included."""
    size: int
    """Bytes on disk."""
    crc: int
    """CRC-32 of the file."""


class PieceWriter:
    """Collects a lot's documents and writes them as pieces `<name>.<number>.piece` in `folder`.

    `dtype`: of a token on disk. `deduplicate`: whether of the documents with one rank and tie the first stays
    alone (within a piece; the merge does the rest).
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], deduplicate: bool) -> None:
        self._folder, self._name, self._dtype, self._deduplicate = folder, name, dtype, deduplicate
        self._rows: list[Rows] = []
        self._tokens: list[Tokens] = []
        self._held = 0
        self._written: list[Piece] = []
        self.duplicates = 0

    def add(self, rows: Rows, tokens: Tokens) -> None:
        """Appends documents, rows [n] and their tokens one after the other; writes a piece when there are enough."""
        self._rows.append(rows)
        self._tokens.append(tokens)
        self._held += rows.nbytes + tokens.nbytes
        if self._held >= _PIECE_BYTES:
            self._flush()

    def finish(self) -> tuple[Piece, ...]:
        """All pieces of the lot, whole and on disk."""
        if self._held:
            self._flush()
        return tuple(self._written)

    def _flush(self) -> None:
        rows, tokens = np.concatenate(self._rows), np.concatenate(self._tokens)
        self._rows, self._tokens, self._held = [], [], 0
        order = sorted_order(rows)
        if self._deduplicate:
            kept = order[is_first(rows[order])]
            self.duplicates += order.size - kept.size
            order = kept
        self._written.append(self._write(rows, tokens, order))

    def _write(self, rows: Rows, tokens: Tokens, order: Offsets) -> Piece:
        name = f"{self._name}.{len(self._written):04d}.piece"
        path, beside = self._folder / name, self._folder / f"{name}.tmp"
        sorted_rows, size, crc = rows[order], 0, 0
        with beside.open("wb") as file:
            documents = gathered(tokens, starts_of(rows["tokens"])[order], sorted_rows["tokens"])
            for block in chain([sorted_rows], (block for block, _ in documents)):
                content = block.view(np.uint8).data
                crc, size = zlib.crc32(content, crc), size + file.write(content)
        sync(beside)
        beside.replace(path)
        return Piece(name, order.size, int(sorted_rows["tokens"].sum(dtype=np.int64)), size, crc)


def is_whole(folder: Path, piece: Piece) -> bool:
    """Whether the piece's file has the size and the content that it was written with."""
    try:
        path = folder / piece.file
        if path.stat().st_size != piece.size:
            return False
        crc = 0
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                crc = zlib.crc32(block, crc)
    except OSError:
        return False
    return crc == piece.crc


def read_rows(folder: Path, piece: Piece, start: int, stop: int) -> Rows:
    """Rows [start, stop) of a piece."""
    return np.fromfile(folder / piece.file, ROW, stop - start, offset=start * ROW.itemsize)


def read_tokens(file: BinaryIO, piece: Piece, start: int, into: Tokens) -> None:
    """Fills `into` [n] with the piece's tokens from `start` on. Raises OSError when there are not so many."""
    file.seek(piece.documents * ROW.itemsize + start * into.itemsize)
    if file.readinto(into.data.cast("B")) != into.nbytes:  # type: ignore[attr-defined]
        raise OSError(f"{piece.file} is cut short")


def sorted_order(rows: Rows) -> Offsets:
    """Indices [n] that sort rows by rank, then tie, then as they are."""
    return np.lexsort((rows["tie"], rows["rank"]))


def is_first(rows: Rows) -> npt.NDArray[np.bool_]:
    """Of sorted rows [n]: whether each is the first with its rank and tie, [n] bool."""
    first = np.ones(rows.size, np.bool_)
    first[1:] = (rows["rank"][1:] != rows["rank"][:-1]) | (rows["tie"][1:] != rows["tie"][:-1])
    return first


def starts_of(lengths: npt.NDArray[Any]) -> Offsets:
    """Where each of documents that follow each other starts: [n] int64."""
    ends: Offsets = np.cumsum(lengths, dtype=np.int64)
    starts: Offsets = ends - lengths
    return starts


def gathered(tokens: Tokens, starts: Offsets, lengths: npt.NDArray[Any]) -> Iterator[tuple[Tokens, Offsets]]:
    """Documents tokens[start : start + length] one after the other, in blocks of about a million tokens, each with
    its documents' lengths."""
    lengths = lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    first = 0
    while first < lengths.size:
        reached = ends[first] - lengths[first]
        last = max(first + 1, int(np.searchsorted(ends, reached + _BLOCK_TOKENS, "right")))
        yield _joined(tokens, starts[first:last], lengths[first:last]), lengths[first:last]
        first = last


def _joined(tokens: Tokens, starts: Offsets, lengths: Offsets) -> Tokens:
    """Two ways to the same: slices cost some 300 ns a document, indices some 7 ns a token."""
    ends = np.cumsum(lengths)
    if ends[-1] >= _TOKENS_WORTH_A_SLICE * lengths.size:
        whole, size = tokens.data.cast("B"), tokens.itemsize
        bounds = zip((starts * size).tolist(), ((starts + lengths) * size).tolist(), strict=True)
        return np.frombuffer(b"".join([whole[start:stop] for start, stop in bounds]), tokens.dtype)
    places = np.repeat(starts - (ends - lengths), lengths)
    places += np.arange(places.size)
    return tokens.take(places)
