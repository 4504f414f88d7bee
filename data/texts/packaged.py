"""Text files that come with Python or with a package: few and small enough to be hashed whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.texts.blocks import reading
from data.texts.origin import Part
from data.texts.text_files import text_parts

_PART = 1_000_000


@dataclass(frozen=True)
class PackagedTexts:
    """Files below a folder; a key is a file's path from there, so that it is the same on every machine."""

    folder: Path
    """Where they lie."""
    files: tuple[str, ...]
    """Their paths from there, with forward slashes, in their order."""

    def parts(self) -> Sequence[Part]:
        """Parts of about a megabyte. Raises DataRefused when a file is missing or unreadable."""
        paths = [self.folder / file for file in self.files]
        sizes = []
        for path in paths:
            with reading(path):
                sizes.append(path.stat().st_size)
        return text_parts(list(zip(self.files, paths, sizes, strict=True)), _PART)

    def fingerprint(self) -> str:
        """Hash of the paths and contents: the same wherever the same files are installed."""
        digest = hashlib.sha256()
        for file in self.files:
            with reading(self.folder / file):
                content = (self.folder / file).read_bytes()
            digest.update(hashlib.sha256(file.encode()).digest() + hashlib.sha256(content).digest())
        return digest.hexdigest()
