"""Hugging Face datasets as an origin, by the library `datasets`; nobody's code is ever run to read one."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.texts.blocks import reading
from data.texts.dataset_words import library, said, translated
from data.texts.documents import FirstPart
from data.texts.origin import Document, Part, Skipped
from data.texts.parquet import check_column, documents
from errors import DataRefused

_STREAMED_ROWS = 64  # at a time: a row can be a book


@dataclass(frozen=True)
class DatasetOrigin:
    """A dataset by its name on the hub, or a local folder (data files, or what `save_to_disk` wrote).

    Not streaming, the whole subset is downloaded to the library's cache (HF_HOME) and turned into its arrow files;
    streaming, it is read from where it is, by one process a shard. Text files are documents as a whole, not lines.
    """

    name: str
    """Name on the hub, such as allenai/c4, or a folder."""
    subset: str | None = None
    """Its configuration; None: its default."""
    split: str = "train"
    """One of its splits."""
    revision: str | None = None
    """Commit, tag or branch; None: the newest."""
    data_files: str | None = None
    """Files to read, a pattern inside the dataset; None: all of the split."""
    column: str = "text"
    """Column of the text."""
    streaming: bool = False
    """Whether it is read without a download of the whole."""
    max_documents: int | None = None
    """Documents to read, the first ones; None: all. Streaming, no more than these are downloaded."""
    workers: int = 1
    """Processes that download and convert."""
    part_rows: int = 16_384
    """Rows of a part, when not streaming; keys and order do not depend on it."""

    def parts(self) -> Sequence[Part]:
        """Ranges of rows of the arrow files (a key is split:row), or the shards (split/shard:row).

        Raises DataRefused for whatever keeps it from being read: no such dataset, subset, split or column, no access,
        no network, a full disk.
        """
        parts = self._shards() if self.streaming else self._rows()
        return parts if self.max_documents is None else (FirstPart(tuple(parts), self.max_documents),)

    def fingerprint(self) -> str:
        """Hash of the settings that choose the texts, and of what they come from.

        On the hub: the commit, which is that of the copy in the cache where the hub cannot be reached. In a folder:
        path, size and time of change of each file, as for `FilesOrigin`. Elsewhere (URLs): what the server tells, its
        ETag. No text is read.
        """
        texts = ("dataset 1", self.subset, self.split, self.data_files, self.column, self.streaming, self.max_documents)
        return hashlib.sha256(repr((*texts, self._content())).encode()).hexdigest()

    def _folder(self) -> Path | None:
        """The local folder that the name means, if it is one. Raises DataRefused for a path that is no folder."""
        path = Path(self.name).expanduser()
        if path.is_dir():
            return path.absolute()
        if self.name.startswith(("/", "./", "../", "~")) or (self.name.count("/") > 1 and "://" not in self.name):
            raise DataRefused(f"{self.name} is no folder: give the folder of a dataset, or its name on the hub")
        return None

    def _content(self) -> tuple[Any, ...]:
        folder = self._folder()
        if folder is not None and _is_saved(folder):
            return _described(map(str, sorted(folder.rglob("*"))))
        builder = self._builder
        files = (builder.config.data_files or {}).get(self.split, [])
        if folder is None and re.fullmatch("[0-9a-f]{40}", builder.hash or ""):
            return (self.name, builder.hash)
        local, remote = [file for file in files if "://" not in file], [file for file in files if "://" in file]
        return (*_described(sorted(local)), *remote, getattr(files, "origin_metadata", None) if remote else None)

    @functools.cached_property
    def _builder(self) -> Any:
        """The library's builder of this dataset; its files are resolved once, so that parts and fingerprint agree."""
        datasets = library(self.name)
        folder = self._folder()
        options: dict[str, Any] = {} if folder else {"revision": self.revision}
        load = functools.partial(
            datasets.load_dataset_builder, str(folder or self.name), self.subset, data_files=self.data_files, **options
        )
        with translated(self.name, self.subset):
            builder = load()
            if getattr(builder.config, "sample_by", None) == "line":
                builder = load(sample_by="document")
        self._check_revision(builder)
        return builder

    def _check_revision(self, builder: Any) -> None:
        """The library takes any cached copy when it cannot reach the hub, whatever the revision."""
        cached = any(kind.__module__ == "datasets.packaged_modules.cache.cache" for kind in type(builder).__mro__)
        if cached and self.revision is not None and not str(builder.hash).startswith(self.revision):
            raise DataRefused(
                f"the hub cannot be reached, and the cached copy of {self.name} is commit {builder.hash}, which may be "
                f"another than revision {self.revision}: connect, or set the revision to that commit"
            )

    def _shards(self) -> list[Part]:
        if (folder := self._folder()) is not None and _is_saved(folder):
            return self._rows()
        builder = self._builder
        with translated(self.name, self.subset):
            streams = builder.as_streaming_dataset()
        self._check_split(streams)
        stream = streams[self.split]
        if stream.features is not None:
            check_column(stream.features.arrow_schema, self.column, self.name)
        shards = [stream.shard(stream.num_shards, number) for number in range(stream.num_shards)]
        return [ShardPart(shard, self.name, f"{self.split}/{n}", self.column) for n, shard in enumerate(shards)]

    def _rows(self) -> list[Part]:
        dataset = self._prepared()
        check_column(dataset.features.arrow_schema, self.column, self.name)
        files = [Path(file["filename"]) for file in dataset.cache_files]
        counts = [_rows_in(file) for file in files]
        firsts = itertools.accumulate(counts, initial=0)
        return [
            RowsPart(path, self.split, self.column, begin, min(self.part_rows, count - begin), first + begin, share)
            for path, count, first in zip(files, counts, firsts, strict=False)
            for begin in range(0, count, self.part_rows)
            for share in (path.stat().st_size * min(self.part_rows, count - begin) // count,)
        ]

    def _prepared(self) -> Any:
        """The split as a dataset of memory-mapped arrow files."""
        datasets = library(self.name)
        folder = self._folder()
        with translated(self.name, self.subset):
            if folder is not None and _is_saved(folder):
                saved = datasets.load_from_disk(str(folder), keep_in_memory=False)
                if not isinstance(saved, datasets.DatasetDict):
                    return saved
                self._check_split(saved)
                return saved[self.split]
        builder = self._builder
        with translated(self.name, self.subset):
            builder.download_and_prepare(num_proc=self.workers if self.workers > 1 else None)
            self._check_split(builder.info.splits)
            return builder.as_dataset(split=self.split, in_memory=False)

    def _check_split(self, splits: Any) -> None:
        if self.split not in splits:
            names = ", ".join(map(str, splits))
            raise DataRefused(f"{self.name} has no split {self.split}: choose one of {names}")


@dataclass(frozen=True)
class RowsPart:
    """A range of rows of one of the arrow files that `datasets` keeps."""

    path: Path
    """The arrow file."""
    split: str
    """Split, in keys."""
    column: str
    """Column of the text."""
    begin: int
    """First row, in the file."""
    rows: int
    """Rows to read."""
    first_row: int
    """Number of the first row in the split."""
    size: int
    """Bytes on disk, about: its share of the file by rows."""

    @property
    def name(self) -> str:
        """The split and the first row."""
        return f"{self.split}:{self.first_row}"

    def read(self) -> Iterator[Document | Skipped]:
        """One document a row; the file is mapped into memory, not loaded."""
        return documents(self._columns(), self.split, self.first_row)

    def _columns(self) -> Iterator[Any]:
        skip, left = self.begin, self.rows
        for batch in _batches(self.path):
            taken = batch.slice(skip, left)
            skip = max(0, skip - batch.num_rows)
            if taken.num_rows:
                left -= taken.num_rows
                yield taken.column(self.column)
            if not left:
                return


@dataclass(frozen=True)
class ShardPart:
    """One shard of a dataset that is streamed."""

    stream: Any
    """The shard: a `datasets.IterableDataset`, which pickles as its files' names."""
    dataset: str
    """Name of the dataset, for errors."""
    shard: str
    """Split and number of the shard, in keys."""
    column: str
    """Column of the text."""

    @property
    def name(self) -> str:
        """The split and the shard's number."""
        return self.shard

    @property
    def size(self) -> int:
        """Unknown: 0."""
        return 0

    def read(self) -> Iterator[Document | Skipped]:
        """One document a row, a few hundred at a time."""
        return documents(self._columns(), self.shard, 0)

    def _columns(self) -> Iterator[Any]:
        tables = self.stream.with_format("arrow").iter(batch_size=_STREAMED_ROWS)
        while True:
            with translated(self.dataset, None):
                table = next(tables, None)
            if table is None:
                return
            check_column(table.schema, self.column, self.dataset)
            yield from table.column(self.column).chunks


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote it."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _described(files: Iterator[str] | Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    """Path, size and time of change of files."""
    found = []
    for file in files:
        with reading(Path(file)):
            status = Path(file).stat()
        found.append((file, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _rows_in(path: Path) -> int:
    return sum(batch.num_rows for batch in _batches(path))


def _batches(path: Path) -> Iterator[Any]:
    """The record batches of an arrow file. Raises DataRefused when it is damaged."""
    import pyarrow as pa  # type: ignore[import-untyped]

    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            yield from stream
    except (pa.ArrowException, OSError) as error:
        raise DataRefused(f"{path} is no whole arrow file ({said(error)}): delete it and prepare it again") from error
