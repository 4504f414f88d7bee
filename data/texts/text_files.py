"""Text files: one file is one document."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.texts.blocks import blocks
from data.texts.documents import from_bytes
from data.texts.origin import Document, Skipped
from errors import DataRefused


@dataclass(frozen=True)
class TextPart:
    """Some text files, each read whole: memory holds one file at a time."""

    files: tuple[tuple[str, Path], ...]
    """Key and path of each."""
    size: int
    """Bytes on disk."""

    @property
    def name(self) -> str:
        """The first file's key, and how many follow."""
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return self.files[0][0] + more

    def read(self) -> Iterator[Document | Skipped]:
        """One document a file; all that can be read, before those that cannot be are told of."""
        refusals = []
        for key, path in self.files:
            try:
                content = b"".join(blocks(path))
            except DataRefused as refusal:
                refusals.append(str(refusal))
                continue
            yield from_bytes(key, content)
        if refusals:
            raise DataRefused("; ".join(refusals))


def text_parts(files: Sequence[tuple[str, Path, int]], part_size: int) -> list[TextPart]:
    """Files (key, path, bytes on disk), in their order, in groups of about `part_size` bytes."""
    ends = list(itertools.accumulate((size for _, _, size in files), initial=0))
    groups = itertools.groupby(zip(files, ends, strict=False), lambda pair: pair[1] // part_size)
    return [_part([file for file, _ in group]) for _, group in groups]


def _part(files: Sequence[tuple[str, Path, int]]) -> TextPart:
    return TextPart(tuple((key, path) for key, path, _ in files), sum(size for _, _, size in files))
