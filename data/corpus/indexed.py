"""Reads Megatron's .bin/.idx: all documents' tokens as one stream on disk, and where documents start.

    .bin   | tokens of document 0 | tokens of document 1 | ...                            (one dtype)
    .idx   | header | int32 lengths[n] | int64 byte pointers[n] | int64 document_indices[documents + 1] |

Both files are memory-mapped. Nothing proportional to tokens or documents is ever built, so opening costs the
same for a thousand documents and for a billion.
"""

from __future__ import annotations

import errno
import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.corpus.mapped import Bytes, OpenFile
from data.corpus.metadata import with_suffix
from errors import DataRefused

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, sequences, entries of document_indices."""
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
CHECKED_PLACES = 64
"""Places of a file that are looked at when it is opened, and again for ids outside the vocabulary."""
HASHED_WHOLE = 64 << 20
"""Bytes up to which a fingerprint is of all of a file."""

_TOKENS_A_PLACE = 64
_CHECKED_AT_ONCE = 1 << 20
_NEAR = 64
_HASHED_BLOCKS = 128
_HASHED_BLOCK_BYTES = 4096
_READ_BYTES = 1 << 17

Tokens = npt.NDArray[Any]
Offsets = npt.NDArray[np.int64]


class IndexedCorpus:
    """A corpus opened for reading; safe to use from several threads, and holds no file descriptor.

    `prefix`: its path without .bin/.idx. `tokens`: length of the stream. `documents`: their number. `dtype`: numpy
    type of a token on disk. The index's tables, read-only views of the file: `lengths` [sequences] int32, in
    tokens; `pointers` [sequences] int64, in bytes; `document_indices` [documents + 1] int64, the first sequence of
    each document, and their number. Opening looks at `places` places of the index, and raises DataRefused, naming
    the file, for anything that is missing, damaged or does not fit together (data.corpus.verify looks at all of it).
    """

    def __init__(self, prefix: str | Path, places: int = CHECKED_PLACES) -> None:
        self.prefix = as_prefix(prefix)
        self.bin_path = with_suffix(self.prefix, ".bin")
        self.idx_path = with_suffix(self.prefix, ".idx")
        with _opened(self.idx_path, self.prefix) as file:
            code, sequences, entries = _header(self.idx_path, file)
            self.dtype = _token_dtype(self.idx_path, code)
            self.documents = entries - 1
            _check_index_size(self.idx_path, file.size, sequences, entries)
            end = self._check_index(file, sequences, places)
            self._index = index = file.mapped()
        with _opened(self.bin_path, self.prefix) as file:
            self._check_stream_size(file.size, end)
            self._stream: Tokens = file.mapped().view(self.dtype)
        self.tokens = self._stream.size
        self._ascends = False  # known of the whole table of documents

        pointers_at, documents_at = _tables(sequences)
        self.lengths: npt.NDArray[np.int32] = index[HEADER.size : pointers_at].view("<i4")
        # Two views of each table: numpy gathers many entries at once; bisect on a memoryview reads one at a
        # time in place (np.searchsorted would copy the whole table, which is not aligned in the file).
        self.pointers: Offsets = index[pointers_at:documents_at].view("<i8")
        self.document_indices: Offsets = index[documents_at:].view("<i8")
        self._pointer_list = index.data[pointers_at:documents_at].cast("q")
        self._document_list = index.data[documents_at:].cast("q")

    @property
    def bin_bytes(self) -> Bytes:
        """All of .bin: [bytes] uint8, read-only."""
        return self._stream.view(np.uint8)

    @property
    def idx_bytes(self) -> Bytes:
        """All of .idx: [bytes] uint8, read-only."""
        return self._index

    @property
    def parts(self) -> tuple[IndexedCorpus, ...]:
        """The corpora that this one is made of: itself."""
        return (self,)

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the stream: a read-only view [stop - start] of `dtype`, not a copy."""
        return self._stream[start:stop]

    def borders(self, start: int, stop: int) -> Offsets:
        """Stream positions of document starts strictly inside (start, stop), ascending: [borders] int64."""
        size = self.dtype.itemsize
        first = bisect_right(self._pointer_list, start * size)
        near = self.pointers[first : first + _NEAR]
        last = first + int(np.count_nonzero(near < stop * size))
        if last == first + _NEAR:
            last = bisect_left(self._pointer_list, stop * size, last)
        if first == last:
            return np.empty(0, np.int64)
        try:
            starts = self._beginnings(first, last) // size
        except IndexError:
            starts = np.array([start])  # no place inside
        if starts.size and not start < starts[0] <= starts[-1] < stop:
            raise DataRefused(
                f"{self.idx_path}: documents {first} to {last} do not begin where their sequences do: the file is "
                "damaged (`python -m data.inspect --verify` looks at all of it); copy or prepare the corpus again"
            )
        # Documents without tokens start where the next one does.
        return np.unique(starts) if starts.size > 1 and (starts[1:] == starts[:-1]).any() else starts

    def _beginnings(self, first: int, last: int) -> Offsets:
        """Pointers of those of the sequences [first, last) that begin a document; twice where one is empty."""
        # Most corpora have a document a sequence: then the table's entries here are their own numbers.
        if self.document_indices[first:last].tobytes() == np.arange(first, last).tobytes():
            return self.pointers[first:last]
        if self.documents == len(self.pointers) and not self._ascends:
            # As many documents as sequences, and not one to one: some are empty, or the table is damaged.
            self._check_documents()
        low = bisect_left(self._document_list, first)
        return self.pointers[self.document_indices[low : bisect_left(self._document_list, last, low)]]

    def _check_documents(self) -> None:
        """Raises DataRefused unless documents begin at sequences that are there, in their order."""
        for begin in range(0, self.documents, _CHECKED_AT_ONCE):
            entries = self.document_indices[begin : begin + _CHECKED_AT_ONCE + 1]
            wrong = (entries < 0) | (entries > self.documents)
            wrong[1:] |= entries[1:] < entries[:-1]
            if wrong.any():
                raise DataRefused(
                    f"{self.idx_path}: document {begin + int(wrong.argmax())} begins at sequence "
                    f"{entries[wrong.argmax()]}, which is none, or before the one before it: the file is damaged; copy "
                    "or prepare the corpus again"
                )
        self._ascends = True

    def document_starts(self, first: int, stop: int) -> Offsets:
        """Where documents [first, stop) start in the stream, `tokens` for document `documents`: [stop - first] int64.

        Documents without tokens start where the next one does. Raises DataRefused where the index is damaged.
        """
        indices = self.document_indices[first:stop]
        sequences = len(self.pointers)
        starts = np.full(indices.size, self.tokens, np.int64)
        inside = (indices >= 0) & (indices < sequences)
        starts[inside] = self.pointers[indices[inside]] // self.dtype.itemsize
        wrong = (indices < 0) | (indices > sequences) | (starts < 0) | (starts > self.tokens)
        if wrong.any():
            at = int(wrong.argmax())
            raise DataRefused(
                f"{self.idx_path}: document {first + at} begins with sequence {indices[at]} of {sequences} at token "
                f"{starts[at]} of {self.tokens}: the file is damaged; copy or prepare the corpus again"
            )
        return starts

    def check_ids(self, vocab_size: int, places: int = CHECKED_PLACES) -> None:
        """Looks at 64 tokens at each of some evenly spaced places, the first and the last among them.

        Raises DataRefused for an id outside [0, vocab_size). The loader checks every batch it makes.
        """
        size = self.dtype.itemsize
        with _opened(self.bin_path, self.prefix) as file:
            for start in spaced(self.tokens, _TOKENS_A_PLACE, places):
                tokens = np.frombuffer(file.read(start * size, _TOKENS_A_PLACE * size), self.dtype)
                self.check_range(start, tokens, vocab_size)

    def check_range(self, start: int, tokens: Tokens, vocab_size: int) -> None:
        """Raises DataRefused if one of `tokens` [n], read at stream position `start`, is no id."""
        outside = (tokens < 0) | (tokens >= vocab_size)
        if outside.any():
            at = int(outside.argmax())
            raise DataRefused(
                f"{self.bin_path}: the token at position {start + at} is {tokens[at]}, but ids must be from "
                f"0 to {vocab_size - 1} (vocabulary of {vocab_size}): give the tokenizer that made this "
                "corpus (data.tokenizer), or prepare the corpus again"
            )

    def sample(self, tokens: int) -> Tokens:
        """About `tokens` tokens from evenly spaced places (all, if there are fewer): [n] of `dtype`."""
        block = 4096
        places = spaced(self.tokens, block, max(1, tokens // block))
        return np.concatenate([self.read(start, start + block) for start in places])

    def fingerprint(self, whole: int = HASHED_WHOLE, blocks: int = _HASHED_BLOCKS) -> str:
        """Hex hash of the counts and of both files: all up to `whole` bytes, of evenly spaced blocks beyond.

        Quick on terabytes; tells large corpora apart, but does not detect damage to a few of their tokens.
        """
        digest = hashlib.sha256(f"{self.dtype.str} {self.tokens} {self.documents}".encode())
        for path in (self.idx_path, self.bin_path):
            with _opened(path, self.prefix) as file:
                part = _READ_BYTES if file.size <= whole else _HASHED_BLOCK_BYTES
                all_of_it = range(0, file.size, part)
                for start in all_of_it if file.size <= whole else spaced(file.size, part, blocks):
                    digest.update(file.read(start, part))
        return digest.hexdigest()

    def _check_index(self, file: OpenFile, sequences: int, places: int) -> int:
        """Looks at evenly spaced places; returns the byte at which the last sequence ends."""
        pointers_at, documents_at = _tables(sequences)
        first, last = (_int64(file, documents_at + 8 * place) for place in (0, self.documents))
        if (first, last) != (0, sequences):
            raise DataRefused(
                f"{self.idx_path}: its documents span sequences {first} to {last}, but must "
                f"span 0 to {sequences}: the file is damaged; copy or prepare the corpus again"
            )
        if (begin := _int64(file, pointers_at)) != 0:
            raise DataRefused(
                f"{self.idx_path}: the first sequence is at byte {begin}, but "
                "must be at byte 0: the file is damaged; copy or prepare the corpus again"
            )
        for place in spaced(sequences - 1, 1, places) if sequences > 1 else ():
            end, following = self._end_of(file, sequences, place), _int64(file, pointers_at + 8 * (place + 1))
            if end != following:
                raise DataRefused(
                    f"{self.idx_path}: sequence {place} ends at byte {end}, but sequence {place + 1} starts "
                    f"at byte {following}: sequences must follow each other without a gap; copy or prepare "
                    "the corpus again"
                )
        for place in spaced(self.documents, 1, places):
            begin, end = (_int64(file, documents_at + 8 * at) for at in (place, place + 1))
            if not 0 <= begin <= end <= sequences:
                raise DataRefused(
                    f"{self.idx_path}: document {place} is sequences {begin} to {end}, but documents follow each "
                    f"other and there are {sequences}: the file is damaged; copy or prepare the corpus again"
                )
        return self._end_of(file, sequences, sequences - 1)

    def _check_stream_size(self, size: int, end: int) -> None:
        if size != end:
            raise DataRefused(
                f"{self.bin_path} has {size} bytes, but {self.idx_path.name} describes {end}: "
                "the two do not belong together or one is cut short; copy or prepare the "
                "corpus again"
            )

    def _end_of(self, file: OpenFile, sequences: int, sequence: int) -> int:
        (length,) = struct.unpack("<i", file.read(HEADER.size + 4 * sequence, 4))
        return _int64(file, _tables(sequences)[0] + 8 * sequence) + int(length) * self.dtype.itemsize


def _tables(sequences: int) -> tuple[int, int]:
    """Bytes of .idx at which the pointers and the document indices begin."""
    pointers_at = HEADER.size + 4 * sequences
    return pointers_at, pointers_at + 8 * sequences


def _int64(file: OpenFile, at: int) -> int:
    return int.from_bytes(file.read(at, 8), "little", signed=True)


def as_prefix(text: str | Path) -> Path:
    """The path of a prefix, `~` expanded. Raises DataRefused for one that can name no file."""
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise DataRefused(f"the prefix {text} has no meaning here ({error}): write the whole path") from error
    if path.name in ("", "..") or "\0" in str(path):
        raise DataRefused(f"the prefix {str(text)!r} names no file: give the path of a corpus without .bin or .idx")
    return path


def spaced(size: int, block: int, places: int) -> Iterator[int]:
    """At most `places` starts of blocks in [0, size), evenly spaced, the first and last block among them."""
    room = max(0, size - block)
    wanted = min(places, -(-size // block))
    return (room * place // max(1, wanted - 1) for place in range(wanted))


@contextmanager
def _opened(path: Path, prefix: Path) -> Iterator[OpenFile]:
    """A file of the corpus that is not empty, and its errors in words."""
    try:
        with OpenFile(path) as file:
            if file.size == 0:
                raise DataRefused(f"{path} is empty: copy or prepare the corpus again")
            yield file
    except FileNotFoundError as error:
        raise DataRefused(
            f"{path} does not exist: a corpus is two files, PREFIX.bin and PREFIX.idx, and the "
            f"prefix given is {prefix}{_hint(prefix)}; correct it or prepare the corpus"
        ) from error
    except OSError as error:
        fix = "check that it is a file and that you may read it"
        if error.errno == errno.ENOMEM:
            fix = "a process may have sysctl vm.max_map_count maps, two a part: raise it, or join parts to fewer files"
        raise DataRefused(f"{path} cannot be read ({error.strerror}): {fix}") from error


def _hint(prefix: Path) -> str:
    if prefix.suffix in (".bin", ".idx"):
        return "; the prefix must not end in .bin or .idx"
    return f"; it is a folder, whose corpora {prefix / '*'} would name" if prefix.is_dir() else ""


def _header(path: Path, file: OpenFile) -> tuple[int, int, int]:
    if file.size < HEADER.size:
        raise DataRefused(
            f"{path} has {file.size} bytes, but its header alone needs {HEADER.size}: the "
            "file is cut short; copy or prepare the corpus again"
        )
    magic, version, code, sequences, entries = HEADER.unpack(file.read(0, HEADER.size))
    if magic != MAGIC:
        raise DataRefused(
            f"{path} starts with {magic!r}, but an index starts with {MAGIC!r}: it is not "
            "Megatron's .idx format; prepare the corpus again"
        )
    if version != VERSION:
        raise DataRefused(
            f"{path} is of version {version}, but only version {VERSION} is known: prepare the corpus again"
        )
    if sequences == 0 or entries < 2:
        raise DataRefused(
            f"{path} has {sequences} sequences and {max(entries - 1, 0)} documents, but a "
            "corpus needs at least one: check the input of its preparation"
        )
    return code, sequences, entries


def _token_dtype(path: Path, code: int) -> np.dtype[Any]:
    name = DTYPES.get(code)
    if name is None:
        raise DataRefused(
            f"{path}: the dtype code is {code}, but must be one of {DTYPES}: the file is "
            "damaged; copy or prepare the corpus again"
        )
    dtype: np.dtype[Any] = np.dtype(name).newbyteorder("<")
    if dtype.kind == "f":
        raise DataRefused(f"{path}: the dtype is {name}, but tokens are whole numbers: prepare the corpus again")
    return dtype


def _check_index_size(path: Path, size: int, sequences: int, entries: int) -> None:
    expected = HEADER.size + 12 * sequences + 8 * entries
    if size != expected:
        raise DataRefused(
            f"{path} has {size} bytes, but {sequences} sequences and {entries - 1} documents "
            f"need {expected}: the file is cut short or holds multimodal modes, which are not "
            "supported; copy or prepare the corpus again"
        )
