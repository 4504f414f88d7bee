"""How long the documents of a corpus are: exact counts, in memory that does not grow with their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data.corpus.indexed import IndexedCorpus, Offsets
from errors import DataRefused

_SHORT = 1 << 16
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Bin:
    """Documents of about one length."""

    low: int
    """Least length, in tokens."""
    high: int
    """Greatest length, in tokens, itself included."""
    documents: int
    """Their number."""


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths of documents, in tokens."""

    documents: int
    """Documents, those without tokens among them."""
    empty: int
    """Documents without tokens."""
    min: int
    """Of the shortest."""
    median: int
    """At most this long is half of the documents, rounded up."""
    mean: float
    """Tokens over documents."""
    p99: int
    """At most this long are 99 of 100 documents."""
    max: int
    """Of the longest."""
    histogram: tuple[Bin, ...]
    """By powers of two, from the first bin with a document to the last: 0, 1, 2 to 3, 4 to 7, ..."""


class LengthCounts:
    """How many documents there are of each length.

    Short lengths are counted in a table, others by their value. Of n tokens there are at most sqrt(2 n) lengths, so
    that both stay small on terabytes.
    """

    def __init__(self) -> None:
        self._short = np.zeros(_SHORT, np.int64)
        self._long: Counter[int] = Counter()

    def add(self, lengths: Offsets) -> None:
        """Counts documents of `lengths` [documents] tokens."""
        self._short += np.bincount(lengths[lengths < _SHORT], minlength=_SHORT)
        values, counts = np.unique(lengths[lengths >= _SHORT], return_counts=True)
        self._long.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def statistics(self) -> LengthStatistics:
        """What there is so far, of at least one document."""
        short = np.flatnonzero(self._short)
        longer = sorted(self._long)
        lengths = np.concatenate([short, np.array(longer, np.int64)])
        counts = np.concatenate([self._short[short], np.array([self._long[each] for each in longer], np.int64)])
        upto = np.cumsum(counts)
        documents = int(upto[-1])
        median, p99 = (int(lengths[np.searchsorted(upto, -(-documents * share // 100))]) for share in (50, 99))
        return LengthStatistics(
            documents=documents, empty=int(self._short[0]), min=int(lengths[0]), median=median,
            mean=float((lengths * counts).sum()) / documents, p99=p99, max=int(lengths[-1]),
            histogram=_histogram(lengths, counts),
        )  # fmt: skip


def _histogram(lengths: Offsets, counts: Offsets) -> tuple[Bin, ...]:
    exponents = [int(length).bit_length() for length in lengths]
    sums = np.bincount(exponents, counts).astype(np.int64)
    return tuple(
        Bin((1 << exponent) >> 1, (1 << exponent) - 1, int(sums[exponent]))
        for exponent in range(exponents[0], exponents[-1] + 1)
    )


def document_lengths(part: IndexedCorpus) -> Iterator[npt.NDArray[np.int64]]:
    """Tokens of each document, a block of documents at a time, [up to 2^20] int64.

    Raises DataRefused for an index whose documents do not follow each other.
    """
    for first in range(0, part.documents, _BLOCK):
        lengths = np.diff(part.document_starts(first, min(first + _BLOCK, part.documents) + 1))
        if lengths.size and lengths.min() < 0:
            raise DataRefused(
                f"{part.idx_path}: document {first + int(lengths.argmin())} ends before it begins: the file is "
                "damaged; copy or prepare the corpus again"
            )
        yield lengths


def bars(histogram: tuple[Bin, ...], width: int = 40) -> Iterator[str]:
    """A line a bin: its lengths, its documents, and a bar whose longest has `width` characters."""
    most, total = max(each.documents for each in histogram), sum(each.documents for each in histogram)
    names = [f"{each.low:,}" if each.low == each.high else f"{each.low:,}-{each.high:,}" for each in histogram]
    room = max(map(len, names))
    for name, each in zip(names, histogram, strict=True):
        bar = "#" * round(width * each.documents / most) or ("." if each.documents else "")
        yield f"{name:>{room}}  {each.documents:>13,} {each.documents / total:>6.1%}  {bar}".rstrip()
