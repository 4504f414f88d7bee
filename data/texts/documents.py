"""What becomes of one text: a document, or the reason why it is skipped; and the first documents of an origin."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data.texts.origin import Document, Origin, Part, Skipped


def from_bytes(key: str, content: bytes) -> Document | Skipped:
    """The document of UTF-8 bytes, unchanged (a byte order mark stays)."""
    try:
        return from_text(key, content.decode())
    except UnicodeDecodeError:
        return Skipped(key, "encoding")


def from_text(key: str, text: str) -> Document | Skipped:
    """The document of `text`; one with nothing but whitespace is empty."""
    return Skipped(key, "empty") if not text or text.isspace() else Document(key, text)


def documents_of(origin: Origin) -> Iterator[Document]:
    """All documents of an origin, in its order. Raises DataRefused for a part that cannot be read."""
    for part in origin.parts():
        yield from (item for item in part.read() if isinstance(item, Document))


@dataclass(frozen=True)
class FirstDocuments:
    """The first documents of an origin, in one part: its parts' lengths are unknown until they are read."""

    origin: Origin
    """What they come from."""
    count: int
    """Documents to read, at most; skipped texts do not count."""

    def parts(self) -> Sequence[Part]:
        """One part."""
        return (FirstPart(tuple(self.origin.parts()), self.count),)

    def fingerprint(self) -> str:
        """The origin's, with the count."""
        return hashlib.sha256(f"first {self.count} {self.origin.fingerprint()}".encode()).hexdigest()


@dataclass(frozen=True)
class FirstPart:
    """Parts in their order, until enough documents are read."""

    inner: tuple[Part, ...]
    """The parts."""
    count: int
    """Documents to read, at most."""

    @property
    def name(self) -> str:
        """The first part's name and the count."""
        return f"the first {self.count:,} documents of {self.inner[0].name if self.inner else 'nothing'}"

    @property
    def size(self) -> int:
        """Unknown: 0."""
        return 0

    def read(self) -> Iterator[Document | Skipped]:
        """The documents, and what is skipped between them."""
        left = self.count
        for part in self.inner if left > 0 else ():
            for item in part.read():
                yield item
                left -= isinstance(item, Document)
                if left <= 0:
                    return
