"""Files of text, jsonl or parquet as an origin."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from data.texts.found import FoundFile, find_files
from data.texts.jsonl import jsonl_parts
from data.texts.origin import Part
from data.texts.parquet import parquet_parts
from data.texts.text_files import text_parts


@dataclass(frozen=True)
class FilesOrigin:
    """Files that are named, matched by patterns or lie in folders; see `find_files`.

    text: a file is a document. jsonl: a line is. parquet: a row is. Text and jsonl may be compressed (.gz, .zst).
    Many processes can share one large jsonl or parquet file; a compressed jsonl file is read by one.
    """

    inputs: tuple[str, ...]
    """Paths, folders and patterns."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """What the files hold; auto: by their endings."""
    column: str = "text"
    """Column of the text in jsonl and parquet."""
    part_size: int = 64_000_000
    """Size of a part, in bytes on disk, about; keys and order do not depend on it."""

    def parts(self) -> Sequence[Part]:
        """Parts of all the files, in the order of their paths.

        Opens parquet files alone (their row groups are needed). Raises DataRefused when an input matches nothing,
        and for a parquet file that lacks the column.
        """
        parts: list[Part] = []
        texts: list[FoundFile] = []
        for file in find_files(self.inputs, self.format):
            if file.format == "text":
                texts.append(file)
            elif file.format == "jsonl":
                parts += jsonl_parts(file.path, file.name, self.column, file.size, self.part_size)
            else:
                parts += parquet_parts(file.path, file.name, self.column, self.part_size)
        return [*text_parts([(file.name, file.path, file.size) for file in texts], self.part_size), *parts]

    def fingerprint(self) -> str:
        """Hash of every file's name, path, size and time of change, and of the column.

        Nothing is read, so that it is cheap on terabytes: a file that is changed in place with its size and its time
        kept goes unseen, and one that is moved or copied counts as another.
        """
        digest = hashlib.sha256(repr(("files 1", self.column)).encode())
        for file in find_files(self.inputs, self.format):
            digest.update(repr((file.name, str(file.path), file.size, file.modified, file.format)).encode())
        return digest.hexdigest()
