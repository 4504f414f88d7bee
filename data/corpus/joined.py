"""Many corpora as one: their streams one after the other.

part 0          part 1     part 2
| t t t t t t | t t t t | t t t t t t t |      a sample may begin in one part and end in the next,
0             6         10             17      and a document begins right at each seam
"""

from __future__ import annotations

import glob
import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data.corpus.indexed import CHECKED_PLACES, HASHED_WHOLE, IndexedCorpus, Offsets, Tokens, as_prefix, spaced
from data.corpus.metadata import with_suffix
from errors import DataRefused

_CHECKED_TOGETHER = 1024
_HASHED_BLOCKS = 1024


class Corpus(Protocol):
    """A stream of tokens cut into documents, opened for reading by any number of threads."""

    @property
    def prefix(self) -> Path:
        """Path without .bin/.idx, or the pattern that names the parts."""

    @property
    def tokens(self) -> int:
        """Length of the stream."""

    @property
    def documents(self) -> int:
        """Their number."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a token on disk."""

    @property
    def parts(self) -> Sequence[IndexedCorpus]:
        """The corpora on disk, in order; a .json may lie beside each."""

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the stream, not to be written to: [stop - start] of `dtype`."""

    def borders(self, start: int, stop: int) -> Offsets:
        """Stream positions of document starts strictly inside (start, stop), ascending: [borders] int64."""

    def check_ids(self, vocab_size: int) -> None:
        """Look at tokens of evenly spaced places; raise DataRefused for an id outside [0, vocab_size)."""

    def check_range(self, start: int, tokens: Tokens, vocab_size: int) -> None:
        """Raise DataRefused if one of `tokens` [n], read at stream position `start`, is no id."""

    def sample(self, tokens: int) -> Tokens:
        """About `tokens` tokens from evenly spaced places (all, if there are fewer): [n] of `dtype`."""

    def fingerprint(self) -> str:
        """Hex hash of the content, whatever its path; quick on terabytes."""


class JoinedCorpus:
    """Corpora of one dtype, the streams one after the other; finding a place costs log(parts)."""

    def __init__(self, prefix: Path, parts: Sequence[IndexedCorpus]) -> None:
        """prefix: what names them together. Raises DataRefused where dtypes differ."""
        self.prefix, self.parts = prefix, tuple(parts)
        self.dtype = parts[0].dtype
        for part in parts:
            if part.dtype != self.dtype:
                raise DataRefused(
                    f"{part.idx_path} holds {part.dtype.name}, but {parts[0].idx_path} {self.dtype.name}: the parts of "
                    "one source are made with one tokenizer and have one dtype; give them as two sources, or prepare "
                    "them again"
                )
        self._starts = [0, *accumulate(part.tokens for part in parts)]
        self.tokens = self._starts.pop()
        self.documents = sum(part.documents for part in parts)

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the stream: [stop - start] of `dtype`; a view where they lie in one part."""
        number = bisect_right(self._starts, start) - 1
        part, begin = self.parts[number], self._starts[number]
        if stop - begin <= part.tokens:
            return part.read(start - begin, stop - begin)
        return np.concatenate([part.read(low, high) for part, _, low, high in self._overlaps(start, stop)])

    def borders(self, start: int, stop: int) -> Offsets:
        """Stream positions of document starts strictly inside (start, stop), ascending: [borders] int64."""
        number = bisect_right(self._starts, start) - 1
        part, begin = self.parts[number], self._starts[number]
        if stop - begin <= part.tokens:
            return part.borders(start - begin, stop - begin) + begin
        found = []
        for part, begin, low, high in self._overlaps(start, stop):
            seam = [begin] if begin > start else []
            found += [np.array(seam, np.int64), part.borders(low, high) + begin]
        return np.concatenate(found)

    def check_ids(self, vocab_size: int) -> None:
        """Looks at 64 tokens at two or more places of every part, the first and the last among them.

        Raises DataRefused for an id outside [0, vocab_size), with its file and its position there.
        """
        for part in self.parts:
            part.check_ids(vocab_size, _share(_CHECKED_TOGETHER, CHECKED_PLACES, len(self.parts)))

    def check_range(self, start: int, tokens: Tokens, vocab_size: int) -> None:
        """Raises DataRefused if one of `tokens` [n], read at stream position `start`, is no id."""
        for part, begin, low, high in self._overlaps(start, start + len(tokens)):
            at = begin + low - start
            part.check_range(low, tokens[at : at + high - low], vocab_size)

    def sample(self, tokens: int) -> Tokens:
        """About `tokens` tokens from evenly spaced places (all, if there are fewer): [n] of `dtype`."""
        block = 4096
        places = spaced(self.tokens, block, max(1, tokens // block))
        return np.concatenate([self.read(start, start + block) for start in places])

    def fingerprint(self) -> str:
        """Hex hash of the parts' fingerprints, in order: of their content, and of less of each the more there are."""
        whole, blocks = HASHED_WHOLE // len(self.parts), _share(_HASHED_BLOCKS, 128, len(self.parts))
        prints = (part.fingerprint(whole, blocks) for part in self.parts)
        return hashlib.sha256(" ".join(prints).encode()).hexdigest()

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[IndexedCorpus, int, int, int]]:
        """Each part that [start, stop) touches, where it begins in the stream, and the range [low, high) of its own."""
        number = bisect_right(self._starts, start) - 1
        while number < len(self.parts) and self._starts[number] < stop:
            part, begin = self.parts[number], self._starts[number]
            yield part, begin, max(0, start - begin), min(part.tokens, stop - begin)
            number += 1


def open_corpus(prefix: str | Path) -> Corpus:
    """The corpus at a prefix, or all that a pattern matches, in the order of their names, as one.

    prefix: a path without .bin/.idx; one that does not exist and has *, ? or [ in it is a pattern, where ** is any
    number of folders.

    Raises:
        DataRefused: nothing is there, a part is missing or damaged (with its name), or dtypes differ.
    """
    path = as_prefix(prefix)
    if not glob.has_magic(str(path)) or with_suffix(path, ".idx").exists():
        return IndexedCorpus(path)
    found = sorted(glob.glob(f"{path}.idx", recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
    if not found:
        raise DataRefused(
            f"no file matches {path}.idx: a corpus is two files, PREFIX.bin and PREFIX.idx, and the pattern names "
            "prefixes, without .bin or .idx; correct it or prepare the corpus"
        )
    places = _share(_CHECKED_TOGETHER, CHECKED_PLACES, len(found))
    parts = [IndexedCorpus(name.removesuffix(".idx"), places) for name in found]
    return parts[0] if len(parts) == 1 else JoinedCorpus(path, parts)


def _share(together: int, most: int, parts: int) -> int:
    """Places to look at in each of many parts: two at least, its first and its last."""
    return min(most, max(2, together // parts))
