"""JSON lines: one line is one record, and one of its columns is a document's text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.texts.blocks import COMPRESSED, blocks
from data.texts.documents import from_text
from data.texts.origin import Document, Skipped
from errors import DataRefused

_PROBED = 1000
_LONGEST_LINE = 1 << 30
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class JsonlPart:
    """The lines of a file that begin in a range of its bytes.

    A key is the file's name and the byte (of the decompressed file) where its line begins, so that it is the same
    however the file is cut. Lines without anything but whitespace are no records.
    """

    path: Path
    """The file."""
    file: str
    """Its name in keys."""
    column: str
    """Column of the text."""
    begin: int
    """First byte of the range."""
    end: int | None
    """First byte after it; None: to the file's end, as in compressed files always."""
    size: int
    """Bytes on disk."""

    @property
    def name(self) -> str:
        """The file's name and where the range begins."""
        return self.file if self.end is None and self.begin == 0 else f"{self.file}:{self.begin}"

    def read(self) -> Iterator[Document | Skipped]:
        """One document a line.

        Raises DataRefused also when none of the file's first 1,000 records has a text in the column: reading on would
        skip terabytes one by one. The file's first part finds that.
        """
        if self.begin == 0:
            _check_column(self.path, self.column)
        parse = parser()
        for offset, line in self._lines():
            if line and not line.isspace():
                yield _document(f"{self.file}:{offset}", line, self.column, parse)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        start = max(0, self.begin - 1)  # a line begins at `begin` if the byte before it ends one
        found = lines(blocks(self.path, start), start, self.path)
        for offset, line in itertools.islice(found, 1, None) if self.begin else found:
            if self.end is not None and offset >= self.end:
                return
            yield offset, line if offset else line.removeprefix(_BYTE_ORDER_MARK)


def jsonl_parts(path: Path, name: str, column: str, size: int, part_size: int) -> list[JsonlPart]:
    """Parts of about `part_size` bytes of a plain file; the whole of a compressed one."""
    if path.suffix.lower() in COMPRESSED:
        return [JsonlPart(path, name, column, 0, None, size)]
    begins = range(0, size, part_size)
    ends = [min(begin + part_size, size) for begin in begins]
    return [JsonlPart(path, name, column, begin, end, end - begin) for begin, end in zip(begins, ends, strict=True)]


def lines(source: Iterable[bytes], start: int, path: Path, longest: int = _LONGEST_LINE) -> Iterator[tuple[int, bytes]]:
    """The lines of blocks of bytes, without their ends, each with its offset; the first block's first byte is `start`.

    Raises DataRefused, naming `path`, for a line of more than `longest` bytes.
    """
    offset, held, length = start, list[bytes](), 0
    for block in source:
        first, *others = block.split(b"\n")
        held.append(first)
        length += len(first)
        if length > longest:
            raise DataRefused(
                f"{path} has a line of more than {longest:,} bytes, so it is hardly one JSON record a line: convert it "
                "to JSON lines (jq -c .[])"
            )
        if others:
            for line in (b"".join(held), *others[:-1]):
                yield offset, line
                offset += len(line) + 1
            held, length = [others[-1]], len(others[-1])
    if length:
        yield offset, b"".join(held)


def parser() -> Callable[[bytes], Any]:
    """What turns a line into its value, or raises ValueError or RecursionError where `json` does."""
    try:
        from pydantic_core import from_json  # comes with wandb; 3 times as fast as json
    except ImportError:
        return _parse

    def parse(line: bytes) -> Any:
        try:
            return from_json(line)
        except ValueError:  # it refuses more than json does (deep nesting, lone surrogates)
            return _parse(line)

    return parse


def _parse(line: bytes) -> Any:
    return json.loads(line.decode())  # of bytes, json would also take UTF-16 and broken UTF-8


def _document(key: str, line: bytes, column: str, parse: Callable[[bytes], Any]) -> Document | Skipped:
    try:
        record = parse(line)
    except UnicodeDecodeError:
        return Skipped(key, "encoding")
    except (ValueError, RecursionError):
        return Skipped(key, "record")
    if not isinstance(record, dict):
        return Skipped(key, "record")
    text = record.get(column)
    if not isinstance(text, str):
        return Skipped(key, "column")
    return Skipped(key, "encoding") if not text.isascii() and _is_broken(text) else from_text(key, text)


def _is_broken(text: str) -> bool:
    """Whether it holds half of a surrogate pair, which JSON can write but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _check_column(path: Path, column: str) -> None:
    records = 0
    columns: dict[str, str] = {}
    probe = JsonlPart(path, "", column, 0, None, 0)
    for _, line in itertools.islice(((at, text) for at, text in probe._lines() if text.strip()), _PROBED):
        records += 1
        record = _record(line)
        if isinstance(record.get(column), str):
            return
        columns.update({name: type(value).__name__ for name, value in record.items()})
    if records:
        raise DataRefused(_no_column(path, column, columns, records))


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = _parse(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _no_column(path: Path, column: str, columns: dict[str, str], records: int) -> str:
    if not columns:
        return (
            f"{path} is not JSON lines: none of its first {records:,} lines is a JSON object in UTF-8; convert it (a "
            "file that is one list: jq -c .[]), or give the format that it has"
        )
    if column in columns:
        return f"{path} has no text in column {column} (it holds {columns[column]}): choose one of {_listed(columns)}"
    return f"{path} has no column {column} in its first {records:,} records: choose one of {_listed(columns)}"


def _listed(columns: dict[str, str]) -> str:
    texts = sorted(name for name, kind in columns.items() if kind == "str")
    return ", ".join(texts or sorted(columns))
