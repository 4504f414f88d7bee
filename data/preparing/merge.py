"""From sorted pieces to a corpus: range after range of ranks, each from all pieces at once.

piece 0    | .. | ...... | ... |          every piece is sorted by rank, so a range of ranks is
piece 1    | ..... | .. | ...  |          one stretch of each; a range's stretches fit in memory
piece 2    | . | ....... | ... |
           range 0   1      2      ->     sorted, duplicates dropped, appended: range 0, range 1, range 2
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.corpus.writer import CorpusWriter
from data.preparing.pieces import (
    ROW,
    Offsets,
    Piece,
    Rows,
    Tokens,
    gathered,
    is_first,
    read_rows,
    read_tokens,
    sorted_order,
    starts_of,
)
from errors import DataRefused

Tell = Callable[[int], None]

_RANGE_BYTES = (256 << 20, 4 << 30)
_OF_MEMORY = 8  # a range takes so many times less than what is free


@dataclass
class Side:
    """A corpus that is being written."""

    writer: CorpusWriter
    """Where its documents go."""
    bytes_of_text: int = 0
    """UTF-8 bytes of them, so far."""


@dataclass(frozen=True)
class Sides:
    """The corpora that the documents are split into."""

    training: Side
    """All documents that are not held out."""
    validation: Side | None
    """The held-out ones; None: there are none."""
    limit: int
    """The highest side (as in a row) that is held out."""


def merge(
    folder: Path, pieces: Sequence[Piece], dtype: np.dtype[Any], sides: Sides, deduplicate: bool, tell: Tell
) -> int:  # fmt: skip
    """Appends the pieces' documents, in the order of their ranks, to the corpora; returns the duplicates dropped.

    `dtype`: of a token on disk. `tell`: is told how many further bytes of text are done. Pieces are given in the
    origin's order. Raises OSError, and DataRefused for a piece that is not as it was written.
    """
    total = sum(piece.size for piece in pieces)
    ranges = max(1, -(-total // _range_bytes()))
    borders = _Borders.of(folder, pieces, ranges)
    duplicates = 0
    for number in range(ranges):
        rows, tokens = _stretches(folder, pieces, borders, number, dtype)
        order = sorted_order(rows)
        if deduplicate:
            kept = order[is_first(rows[order])]
            duplicates += order.size - kept.size
            order = kept
        _append(rows, tokens, order, sides)
        tell(int(rows["bytes"].sum(dtype=np.int64)))
    return duplicates


def _range_bytes() -> int:
    """Bytes of a range: large ones mean fewer visits to each piece. The corpus is the same whatever it is."""
    least, most = _RANGE_BYTES
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:  # not on every system
        return least
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(least, min(most, free // _OF_MEMORY))


@dataclass(frozen=True)
class _Borders:
    """Where the ranges begin and end in each piece."""

    rows: npt.NDArray[np.int64]
    """[pieces, ranges + 1]: rows before each border."""
    tokens: npt.NDArray[np.int64]
    """[pieces, ranges + 1]: tokens before each border."""

    @classmethod
    def of(cls, folder: Path, pieces: Sequence[Piece], ranges: int) -> _Borders:
        """The borders of `ranges` equal ranges of ranks."""
        firsts = np.array([(number << 64) // ranges for number in range(ranges)], np.uint64)
        borders = cls(*(np.zeros((len(pieces), ranges + 1), np.int64) for _ in range(2)))
        for at, piece in enumerate(pieces):
            rows = read_rows(folder, piece, 0, piece.documents)
            if rows.size != piece.documents or int(rows["tokens"].sum(dtype=np.int64)) != piece.tokens:
                raise DataRefused(f"{folder / piece.file} is not as it was written: remove {folder} and start again")
            before = np.append(starts_of(rows["tokens"]), piece.tokens)
            borders.rows[at] = np.append(np.searchsorted(rows["rank"], firsts), rows.size)
            borders.tokens[at] = before[borders.rows[at]]
        return borders


def _stretches(
    folder: Path, pieces: Sequence[Piece], borders: _Borders, number: int, dtype: np.dtype[Any]
) -> tuple[Rows, Tokens]:  # fmt: skip
    """Rows [n] and tokens of one range, piece after piece."""
    counts = np.diff(borders.tokens[:, number : number + 2])[:, 0]
    tokens = np.empty(int(counts.sum()), dtype)
    rows, filled = [np.empty(0, ROW)], 0
    for piece, (first, last), start, count in zip(
        pieces, borders.rows[:, number : number + 2].tolist(), borders.tokens[:, number].tolist(), counts.tolist(),
        strict=True,
    ):  # fmt: skip
        if first == last:
            continue
        rows.append(read_rows(folder, piece, first, last))
        with (folder / piece.file).open("rb") as file:
            read_tokens(file, piece, start, tokens[filled : filled + count])
        filled += count
    return np.concatenate(rows), tokens


def _append(rows: Rows, tokens: Tokens, order: Offsets, sides: Sides) -> None:
    """The rows' documents in `order`, each to its corpus."""
    starts, held_out = starts_of(rows["tokens"])[order], np.zeros(order.size, np.bool_)
    chosen = rows[order]
    if sides.validation is not None:
        held_out = chosen["side"] <= np.uint64(sides.limit)
    for side, mask in ((sides.training, ~held_out), (sides.validation, held_out)):
        if side is None or not mask.any():
            continue
        for block, lengths in gathered(tokens, starts[mask], chosen["tokens"][mask]):
            side.writer.add_documents(block, lengths)
        side.bytes_of_text += int(chosen["bytes"][mask].sum(dtype=np.int64))
