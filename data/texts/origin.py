"""Where texts come from: an origin has parts, a part has documents, and all of it is the same at every reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Document:
    """One text."""

    key: str
    """Names the document for ever: its place in its origin, such as "web/part-3.jsonl:17"."""
    text: str
    """Its content, unchanged."""


@dataclass(frozen=True)
class Skipped:
    """A text that is not read."""

    key: str
    """As a document's."""
    why: Literal["encoding", "empty", "column", "record"]
    """Not UTF-8; without text; its column is missing or no text; no whole record (broken JSON, say)."""


class Part(Protocol):
    """A portion of an origin that one process reads from its beginning to its end; can be pickled."""

    @property
    def name(self) -> str:
        """Names the part in progress and errors."""

    @property
    def size(self) -> int:
        """Bytes on disk, for progress; 0 where that is unknown."""

    def read(self) -> Iterator[Document | Skipped]:
        """Its documents, always in one order.

        Raises:
            DataRefused: it cannot be read (unreadable, cut, damaged), in words that name the file.
        """


class Origin(Protocol):
    """A corpus as text."""

    def parts(self) -> Sequence[Part]:
        """All of it, always cut in the same way."""

    def fingerprint(self) -> str:
        """Hex hash of what is read: another one wherever the texts may have changed."""
