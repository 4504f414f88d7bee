"""Looks at all of a corpus: every entry of its index, every token, and how its documents end."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator

import numpy as np

from data.corpus.indexed import IndexedCorpus
from errors import DataRefused

_ENTRIES = 1 << 20
_TOKENS = 1 << 23
_HASHED = 1 << 24


class FullCheck:
    """One part looked at from its beginning to its end; each of `steps` does some of it, to show how far it is.

    `faults`: what is wrong, in words with file and place, at most one of the index and one of the tokens. `ends`:
    how many documents end with each id. `common`: how many tokens are `end`, wherever they stand. `largest`: the
    largest id. All are whole when `steps` has come to its end.
    """

    def __init__(self, part: IndexedCorpus, vocab_size: int | None, end: int | None) -> None:
        """vocab_size: ids must be below it; None: any id from 0 on."""
        self.part = part
        self.faults: list[str] = []
        self.ends: Counter[int] = Counter()
        self.common, self.largest = 0, -1
        self._vocab_size, self._end = vocab_size, end

    def steps(self) -> Iterator[int]:
        """Do it all: bytes looked at by each step."""
        try:
            yield from self._index()
        except DataRefused as refusal:
            self.faults.append(str(refusal))
        whole = not self.faults
        for start in range(0, self.part.tokens, _TOKENS):
            stop = min(start + _TOKENS, self.part.tokens)
            self._tokens(start, stop)
            if whole:
                self._count_ends(start, stop)
            yield (stop - start) * self.part.dtype.itemsize

    def _index(self) -> Iterator[int]:
        part, size = self.part, self.part.dtype.itemsize
        sequences = part.lengths.size
        for first in range(0, sequences, _ENTRIES):
            stop = min(first + _ENTRIES, sequences)
            lengths, pointers = part.lengths[first:stop], part.pointers[first : stop + 1]
            if stop == sequences:
                pointers = np.append(pointers, part.tokens * size)
            wrong = (lengths < 0) | (pointers[:-1] + lengths.astype(np.int64) * size != pointers[1:])
            if wrong.any():
                self._refuse_sequence(first + int(wrong.argmax()))
            yield 12 * (stop - first)
        for first in range(0, part.documents, _ENTRIES):
            indices = part.document_indices[first : first + _ENTRIES + 1]
            wrong = (indices[1:] < indices[:-1]) | (indices[1:] > sequences)
            if wrong.any():
                at = first + int(wrong.argmax())
                begin, end = part.document_indices[at : at + 2].tolist()
                raise DataRefused(
                    f"{part.idx_path}: document {at} is sequences {begin} to {end}, but documents follow each other "
                    f"and there are {sequences}: the file is damaged; copy or prepare the corpus again"
                )
            yield 8 * (indices.size - 1)

    def _refuse_sequence(self, at: int) -> None:
        part = self.part
        following = part.pointers[at + 1] if at + 1 < part.pointers.size else part.tokens * part.dtype.itemsize
        raise DataRefused(
            f"{part.idx_path}: sequence {at} has {part.lengths[at]} tokens from byte {part.pointers[at]} on, but the "
            f"next one starts at byte {following}: the file is damaged; copy or prepare the corpus again"
        )

    def _tokens(self, start: int, stop: int) -> None:
        tokens = self.part.read(start, stop)
        least, most = int(tokens.min()), int(tokens.max())
        self.largest = max(self.largest, most)
        if self._end is not None:
            self.common += int(np.count_nonzero(tokens == self._end))
        limit = most + 1 if self._vocab_size is None else self._vocab_size
        known = any(fault.startswith(f"{self.part.bin_path}: ") for fault in self.faults)
        if (least < 0 or most >= limit) and not known:
            try:
                self.part.check_range(start, tokens, max(limit, 1))
            except DataRefused as refusal:
                self.faults.append(str(refusal))

    def _count_ends(self, start: int, stop: int) -> None:
        """Count the last tokens of documents among the tokens [start, stop)."""
        borders = self.part.borders(start, stop + 1) if stop < self.part.tokens else self.part.borders(start, stop)
        after = borders if stop < self.part.tokens else np.append(borders, self.part.tokens)
        ids, counts = np.unique(self.part.read(start, stop)[after - 1 - start], return_counts=True)
        self.ends.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))


def checksums(part: IndexedCorpus) -> Iterator[tuple[int, str | None]]:
    """SHA-256, in hex, of .bin and then of .idx: pairs of the bytes of a step and, with a file's last, its sum."""
    for data in (part.bin_bytes, part.idx_bytes):
        digest = hashlib.sha256()
        for start in range(0, data.size, _HASHED):
            block = data[start : start + _HASHED]
            digest.update(block.data)
            yield block.size, digest.hexdigest() if start + _HASHED >= data.size else None
