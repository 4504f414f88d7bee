"""Lots, the portions that a preparation is done in: how they are cut, and which of their texts are kept.

parts of the origin    | a | b | c |   d   | e | f |  ...
lots                   |     0     |   1   |   2   |  ...
batches                | | | | | | | | | | | | | | |  ...   (documents that are encoded together)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt

from data.preparing.shuffle import content_digest
from data.texts.origin import Document, Part, Skipped
from errors import DataRefused

_LOT_BYTES = 64 << 20
_LOTS = 32
_BATCH_CHARACTERS = 2 << 20
_BATCH_DOCUMENTS = 8192
_KEYS = 3
_MAX_TEXT_BYTES = (1 << 31) - 2


@dataclass(frozen=True)
class Settings:
    """What makes a document be kept, and where it goes."""

    seed: int
    """Of the document shuffle."""
    deduplicate: bool
    """Whether of equal texts the first stays alone."""
    min_bytes: int
    """Shortest text that is kept, in bytes of UTF-8."""
    max_bytes: int | None
    """Longest text that is kept, in bytes of UTF-8; None: any."""


@dataclass(frozen=True)
class Lot:
    """Consecutive parts of an origin, which one process reads."""

    number: int
    """Its place among the lots, which is the origin's order."""
    parts: tuple[Part, ...]
    """What is read."""
    limit: int | None
    """Documents read at most, the first ones; None: all."""

    @property
    def size(self) -> int:
        """Bytes on disk; 0 where that is unknown."""
        sizes = [part.size for part in self.parts]
        return sum(sizes) if all(sizes) else 0

    @property
    def cut(self) -> str:
        """Hex hash of its parts' names and sizes: the same where the origin was cut in the same way."""
        names = repr([(part.name, part.size) for part in self.parts])
        return content_digest(names.encode("utf-8", "surrogatepass")).hex()


@dataclass(frozen=True)
class Skips:
    """Texts left out for one reason."""

    count: int
    """How many."""
    keys: tuple[str, ...]
    """The first few, in the origin's order."""


@dataclass(frozen=True)
class Unreadable:
    """A part that could not be read to its end."""

    part: str
    """Its name."""
    why: str
    """What its reader said."""
    documents: int
    """Documents read before it failed, which are kept."""


def lots_of(parts: Sequence[Part], limit: int | None) -> list[Lot]:
    """Cuts an origin's parts into lots: small ones together, so that a million files are not a million lots."""
    wanted = max(1, min(_LOT_BYTES, sum(part.size for part in parts) // _LOTS))
    groups: list[list[Part]] = []
    held = wanted
    for part in parts:
        if held >= wanted or not part.size:
            groups.append([])
            held = 0
        groups[-1].append(part)
        held += part.size or wanted
    return [Lot(number, tuple(group), limit) for number, group in enumerate(groups)]


@dataclass(frozen=True)
class Batch:
    """Documents that are encoded together, n of them."""

    read: int
    """Bytes of text read, those left out included."""
    documents: list[Document]
    """[n]"""
    digests: list[bytes]
    """[n], of their texts."""
    sizes: npt.NDArray[np.int64]
    """[n], bytes of their texts."""


class Batches:
    """Reads a lot in batches, and counts what is left out."""

    def __init__(self, lot: Lot, settings: Settings) -> None:
        self._lot, self._settings = lot, settings
        self.documents = self.bytes = 0
        self.skipped: dict[str, tuple[int, list[str]]] = {}
        self.unreadable: list[Unreadable] = []

    def __iter__(self) -> Iterator[Batch]:
        return map(self._batch, self._documents())

    def _documents(self) -> Iterator[list[Document]]:
        held: list[Document] = []
        characters = 0
        for part in self._lot.parts:
            before = self.documents
            try:
                for item in part.read():
                    if isinstance(item, Skipped):
                        self._skip(item.why, item.key)
                        continue
                    held.append(item)
                    self.documents += 1
                    characters += len(item.text)
                    if characters >= _BATCH_CHARACTERS or len(held) >= _BATCH_DOCUMENTS:
                        yield held
                        held, characters = [], 0
                    if self.documents == self._lot.limit:
                        break
            except (DataRefused, OSError) as error:
                self.unreadable.append(Unreadable(part.name, str(error), self.documents - before))
            if self.documents == self._lot.limit:
                break
        yield held

    def _batch(self, documents: list[Document]) -> Batch:
        try:
            contents = [document.text.encode() for document in documents]
        except UnicodeEncodeError:
            documents = [document for document in documents if self._is_unicode(document)]
            contents = [document.text.encode() for document in documents]
        sizes = np.fromiter(map(len, contents), np.int64, len(contents))
        read = int(sizes.sum())
        self.bytes += read
        most = self._settings.max_bytes or _MAX_TEXT_BYTES
        fits = (sizes >= max(1, self._settings.min_bytes)) & (sizes <= most)
        if not fits.all():
            for document, size in zip(documents, sizes.tolist(), strict=True):
                if not size or not self._settings.min_bytes <= size <= most:
                    self._skip("empty" if not size else "too long" if size > most else "too short", document.key)
            documents, contents, sizes = list(compress(documents, fits)), list(compress(contents, fits)), sizes[fits]
        return Batch(read, documents, [content_digest(content) for content in contents], sizes)

    def _is_unicode(self, document: Document) -> bool:
        """False, and counted, for a text with half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
        try:
            document.text.encode()
        except UnicodeEncodeError:
            self._skip("encoding", document.key)
            return False
        return True

    def _skip(self, why: str, key: str) -> None:
        count, keys = self.skipped.setdefault(why, (0, []))
        if count < _KEYS:
            keys.append(key)
        self.skipped[why] = (count + 1, keys)
