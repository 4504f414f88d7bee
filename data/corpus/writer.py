"""Writes Megatron's .bin/.idx, a document or many at a time, in constant memory."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from data.corpus.indexed import DTYPES, HEADER, MAGIC, VERSION
from data.corpus.metadata import CorpusMetadata, with_suffix, write_metadata
from errors import DataRefused
from files import sync

_BLOCK = 1 << 20


def token_dtype(vocab_size: int) -> str:
    """The smallest type on disk that holds every id: "uint16" up to 65,536 entries, else "int32"."""
    return "uint16" if vocab_size <= 1 << 16 else "int32"


class CorpusWriter(AbstractContextManager["CorpusWriter"]):
    """Streams documents into temporary files beside `prefix`; `finish` makes them the corpus.

    Used as a context manager it removes its temporary files when `finish` was not reached. `dtype`: numpy
    name of a token's type on disk, one of the integer types of the format.
    """

    def __init__(self, prefix: str | Path, dtype: str) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = {name: code for code, name in DTYPES.items()}[dtype]
        self._temporary = {
            part: with_suffix(self.prefix, f".{part}.{os.getpid()}.tmp") for part in ("bin", "idx", "lengths")
        }
        self._files = ExitStack()
        for path in self._temporary.values():
            self._files.callback(path.unlink, missing_ok=True)
        self._stream = self._open("bin")
        self._lengths = self._open("lengths")
        self._counts = np.zeros(1, np.int64)
        self.documents = 0
        self.tokens = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def add_document(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Appends one document, ids [n] (its end-of-document token included); an empty one adds nothing.

        Raises DataRefused for an id that the type on disk cannot hold.
        """
        tokens = np.asarray(ids)  # [n]
        if tokens.size:
            self.add_documents(tokens, np.array([tokens.size]))

    def add_documents(self, tokens: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]) -> None:
        """Appends documents: their ids one after the other, tokens [n], of which each has lengths [documents] >= 1.

        Raises DataRefused for an id that the type on disk cannot hold, or a document that is too long.
        """
        if tokens.size == 0:
            return
        least, most, longest = int(tokens.min()), int(tokens.max()), int(lengths.max())
        limits = np.iinfo(self.dtype)
        if least < 0 or most > limits.max or longest > np.iinfo(np.int32).max:
            raise DataRefused(
                f"documents from {self.documents} on: at most {longest} ids each, from {least} to {most}, but "
                f"{self.dtype.name} holds ids from 0 to {limits.max} and a document at most 2^31 - 1 of them: write "
                "int32 (vocabularies above 65,536), or split the document"
            )
        self._stream.write(tokens.astype(self.dtype, copy=False).data)
        self._lengths.write(lengths.astype("<i4").data)
        self._count(tokens)
        self.documents += lengths.size
        self.tokens += tokens.size

    def finish(self, tokenizer: str, vocab_size: int, bytes_of_text: int) -> CorpusMetadata:
        """Makes everything durable, moves .bin and .idx into place, and writes the .json last.

        `tokenizer`: SHA-256 of its model file. Raises DataRefused when no document was added.
        """
        if self.documents == 0:
            raise DataRefused(f"no document with text for {self.prefix}: check the input of the preparation")
        self._write_index()
        _sync_and_close(self._stream)
        # An older corpus of this name goes first: a .bin beside another's .idx would be neither.
        for part in ("json", "idx"):
            with_suffix(self.prefix, f".{part}").unlink(missing_ok=True)
        for part in ("bin", "idx"):
            sync(self.prefix.parent)
            self._temporary[part].replace(with_suffix(self.prefix, f".{part}"))
        metadata = CorpusMetadata(
            tokenizer, self.dtype.name, self.tokens, self.documents, bytes_of_text, entropy(self._counts), vocab_size
        )
        write_metadata(self.prefix, metadata)
        return metadata

    def _open(self, part: str) -> BinaryIO:
        return self._files.enter_context(self._temporary[part].open("wb"))

    def _count(self, tokens: npt.NDArray[np.integer]) -> None:
        counts = np.bincount(tokens, minlength=self._counts.size)
        counts[: self._counts.size] += self._counts
        self._counts = counts

    def _write_index(self) -> None:
        with self._temporary["idx"].open("wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, self._code, self.documents, self.documents + 1))
            index.writelines(lengths.tobytes() for lengths in self._length_blocks())
            end = 0
            for lengths in self._length_blocks():
                ends = end + np.cumsum(lengths.astype(np.int64) * self.dtype.itemsize)
                index.write(np.concatenate([[end], ends[:-1]]).astype("<i8").tobytes())
                end = int(ends[-1])
            index.writelines(
                np.arange(first, min(first + _BLOCK, self.documents + 1), dtype="<i8").tobytes()
                for first in range(0, self.documents + 1, _BLOCK)
            )
            _sync_and_close(index)

    def _length_blocks(self) -> Iterator[npt.NDArray[np.int32]]:
        self._lengths.flush()
        mapped = np.memmap(self._temporary["lengths"], "<i4", "r")
        return (mapped[first : first + _BLOCK] for first in range(0, mapped.size, _BLOCK))


def remove_leftovers(prefix: Path) -> None:
    """Removes what writers of `prefix` that were killed have left; none may be alive. Raises OSError."""
    name = re.escape(prefix.name)
    left = re.compile(rf"{name}\.(bin|idx|lengths)\.\d+\.tmp|\.{name}\.(report\.)?json\.\d+\.part")
    for path in prefix.parent.iterdir():
        if left.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def disk_refusals(place: Path) -> Iterator[None]:
    """Turns what the disk refuses at `place` into a DataRefused with the way out."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = "make room, then start the same command again: it goes on where it stopped"
        else:
            fix = "make it writable, or choose another folder for the output"
        raise DataRefused(f"{error.filename or place} cannot be written ({reason}): {fix}") from error


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy of the frequencies `counts` [ids], in nats."""
    seen = counts[counts > 0]
    shares = seen / seen.sum()
    return float(-(shares * np.log(shares)).sum())


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
