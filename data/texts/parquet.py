"""Parquet files: one row is one record, and one of its columns is a document's text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.texts.documents import from_bytes
from data.texts.origin import Document, Skipped
from errors import DataRefused

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

_ROWS = 64  # at a time: a row can be a book
_BUFFER = 1 << 20


@dataclass(frozen=True)
class ParquetPart:
    """Some row groups of a file; a key is the file's name and the number of the row in the file."""

    path: Path
    """The file."""
    file: str
    """Its name in keys."""
    column: str
    """Column of the text."""
    groups: range
    """Row groups to read."""
    first_row: int
    """Number in the file of their first row."""
    size: int
    """Bytes on disk."""

    @property
    def name(self) -> str:
        """The file's name and its first row."""
        return f"{self.file}:{self.first_row}"

    def read(self) -> Iterator[Document | Skipped]:
        """One document a row, in constant memory."""
        with _opened(self.path) as file:
            check_column(file.schema_arrow, self.column, str(self.path))
            batches = file.iter_batches(_ROWS, list(self.groups), [self.column], use_threads=False)
            yield from documents((batch.column(0) for batch in batches), self.file, self.first_row)


def parquet_parts(path: Path, name: str, column: str, part_size: int) -> list[ParquetPart]:
    """Parts of whole row groups with about `part_size` bytes on disk each.

    A damaged file is a part whose reader says so. Raises DataRefused when the column is missing or holds no text.
    """
    try:
        with _opened(path) as file:
            schema = file.schema_arrow
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    except DataRefused:
        return [ParquetPart(path, name, column, range(0), 0, path.stat().st_size)]
    check_column(schema, column, str(path))
    sizes = [sum(group.column(n).total_compressed_size for n in range(group.num_columns)) for group in groups]
    begins = list(itertools.accumulate(sizes, initial=0))
    rows = list(itertools.accumulate((group.num_rows for group in groups), initial=0))
    cut = [list(same) for _, same in itertools.groupby(range(len(groups)), lambda n: begins[n] // part_size)]
    return [
        ParquetPart(path, name, column, range(ns[0], ns[-1] + 1), rows[ns[0]], begins[ns[-1] + 1] - begins[ns[0]])
        for ns in cut
    ]


def check_column(schema: pyarrow.Schema, column: str, where: str) -> None:
    """Raises DataRefused, naming the columns there are, unless `column` holds text (or bytes)."""
    found = [field for field in schema if field.name == column]
    if len(found) == 1 and _is_text(found[0].type):
        return
    texts = ", ".join(field.name for field in schema if _is_text(field.type)) or "none holds text"
    problem = f"column {column} with {found[0].type}, not text" if found else f"no column {column}"
    raise DataRefused(f"{where} has {problem}: choose one of its columns with text ({texts})")


def documents(columns: Iterator[pyarrow.Array], prefix: str, first_row: int) -> Iterator[Document | Skipped]:
    """The rows of a column of text that comes in pieces; keys are `prefix:row`, counted from `first_row`."""
    rows = itertools.count(first_row)
    for column in columns:
        for begin in range(0, len(column), _ROWS):
            for value in _as_bytes(column.slice(begin, _ROWS)).to_pylist():
                key = f"{prefix}:{next(rows)}"
                yield Skipped(key, "column") if value is None else from_bytes(key, value)


def _as_bytes(column: pyarrow.Array) -> pyarrow.Array:
    """Text as its bytes, without copies: nothing guarantees that they are UTF-8."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.large_binary())


def _is_text(kind: pyarrow.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())


@contextmanager
def _opened(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    """The open file; what goes wrong while it is read becomes DataRefused."""
    pa, parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file:
            yield file
    except PermissionError as error:
        raise DataRefused(f"{path} cannot be read ({error.strerror}): make it readable, or leave it out") from error
    except (pa.ArrowException, OSError, EOFError) as error:
        raise DataRefused(f"{path} is no whole parquet file ({error}): copy or download it again") from error


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataRefused(f"{path} is parquet, whose package is missing: pip install pyarrow") from error
    return pyarrow, pyarrow.parquet
