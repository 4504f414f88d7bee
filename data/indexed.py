"""Reads Megatron's .bin/.idx: all documents' tokens as one stream on disk, and where documents start.

    .bin   | tokens of document 0 | tokens of document 1 | ...                            (one dtype)
    .idx   | header | int32 lengths[n] | int64 byte pointers[n] | int64 document_indices[documents + 1] |

Both files are memory-mapped. Nothing proportional to tokens or documents is ever built, so opening costs the
same for a thousand documents and for a billion.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.metadata import with_suffix
from errors import DataRefused

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, sequences, entries of document_indices."""
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}

_CHECKED_PLACES = 64
_TOKENS_A_PLACE = 64
_HASHED_BLOCKS = 128
_HASHED_WHOLE = 64 << 20
_HASHED_BLOCK_BYTES = 4096

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[Any]
Offsets = npt.NDArray[np.int64]


class IndexedCorpus:
    """A corpus opened for reading; safe to use from several threads.

    `prefix`: its path without .bin/.idx. `tokens`: length of the stream. `documents`: their number.
    `dtype`: numpy type of a token on disk. Opening raises DataRefused, naming the file, for anything that is
    missing, damaged or does not fit together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix).expanduser()
        self.bin_path = with_suffix(self.prefix, ".bin")
        self.idx_path = with_suffix(self.prefix, ".idx")
        index = _mapped(self.idx_path, self.prefix)
        code, sequences, entries = _header(self.idx_path, index)
        self.dtype = _token_dtype(self.idx_path, code)
        self.documents = entries - 1
        _check_index_size(self.idx_path, index.size, sequences, entries)

        pointers_at = HEADER.size + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        self._index = index
        self._lengths = index[HEADER.size : pointers_at].view("<i4")
        # Two views of each table: numpy gathers many entries at once; bisect on a memoryview reads one at a
        # time in place (np.searchsorted would copy the whole table, which is not aligned in the file).
        self._pointers = index[pointers_at:documents_at].view("<i8")
        self._document_indices = index[documents_at:].view("<i8")
        self._pointer_list = index.data[pointers_at:documents_at].cast("q")
        self._document_list = index.data[documents_at:].cast("q")
        self._check_index()

        stream = _mapped(self.bin_path, self.prefix)
        self._check_stream_size(stream.size)
        self._stream: Tokens = stream.view(self.dtype)
        self.tokens = self._stream.size

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the stream: a read-only view [stop - start] of `dtype`, not a copy."""
        return self._stream[start:stop]

    def borders(self, start: int, stop: int) -> Offsets:
        """Stream positions of document starts strictly inside (start, stop), ascending: [borders] int64."""
        size = self.dtype.itemsize
        first = bisect_right(self._pointer_list, start * size)
        last = bisect_left(self._pointer_list, stop * size, first)
        if first == last:
            return np.empty(0, np.int64)
        # A document may be several sequences: only those that document_indices names begin one.
        low = bisect_left(self._document_list, first)
        high = bisect_left(self._document_list, last, low)
        starts: Offsets = self._pointers[self._document_indices[low:high]] // size
        # Documents without tokens start where the next one does.
        return np.unique(starts) if starts.size > 1 else starts

    def check_ids(self, vocab_size: int) -> None:
        """Looks at a few thousand tokens at evenly spaced places, the first and the last among them.

        Raises DataRefused for an id outside [0, vocab_size). The loader checks every batch it makes.
        """
        for start in _spaced(self.tokens, _TOKENS_A_PLACE, _CHECKED_PLACES):
            self.check_range(start, self.read(start, start + _TOKENS_A_PLACE), vocab_size)

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
        places = _spaced(self.tokens, block, max(1, tokens // block))
        return np.concatenate([self.read(start, start + block) for start in places])

    def fingerprint(self) -> str:
        """Hex hash of the counts and of both files: whole up to 64 MB, of evenly spaced blocks beyond.

        Quick on terabytes; tells large corpora apart, but does not detect damage to a few of their tokens.
        """
        digest = hashlib.sha256(f"{self.dtype.str} {self.tokens} {self.documents}".encode())
        for data in (self._index, self._stream.view(np.uint8)):
            if data.size <= _HASHED_WHOLE:
                digest.update(data.data)
                continue
            for start in _spaced(data.size, _HASHED_BLOCK_BYTES, _HASHED_BLOCKS):
                digest.update(data[start : start + _HASHED_BLOCK_BYTES].tobytes())
        return digest.hexdigest()

    def _check_index(self) -> None:
        first, last, sequences = self._document_list[0], self._document_list[-1], len(self._pointer_list)
        if (first, last) != (0, sequences):
            raise DataRefused(
                f"{self.idx_path}: its documents span sequences {first} to {last}, but must "
                f"span 0 to {sequences}: the file is damaged; copy or prepare the corpus again"
            )
        if self._pointer_list[0] != 0:
            raise DataRefused(
                f"{self.idx_path}: the first sequence is at byte {self._pointer_list[0]}, but "
                "must be at byte 0: the file is damaged; copy or prepare the corpus again"
            )
        for place in _spaced(sequences - 1, 1, _CHECKED_PLACES) if sequences > 1 else ():
            end, following = self._end_of(place), self._pointer_list[place + 1]
            if end != following:
                raise DataRefused(
                    f"{self.idx_path}: sequence {place} ends at byte {end}, but sequence {place + 1} starts "
                    f"at byte {following}: sequences must follow each other without a gap; copy or prepare "
                    "the corpus again"
                )

    def _check_stream_size(self, size: int) -> None:
        end = self._end_of(len(self._pointer_list) - 1)
        if size != end:
            raise DataRefused(
                f"{self.bin_path} has {size} bytes, but {self.idx_path.name} describes {end}: "
                "the two do not belong together or one is cut short; copy or prepare the "
                "corpus again"
            )

    def _end_of(self, sequence: int) -> int:
        return int(self._pointer_list[sequence]) + int(self._lengths[sequence]) * self.dtype.itemsize


def _mapped(path: Path, prefix: Path) -> Bytes:
    try:
        if path.stat().st_size == 0:
            raise DataRefused(f"{path} is empty: copy or prepare the corpus again")
        # A plain array over the map: np.memmap's own slicing costs microseconds a call.
        return np.asarray(np.memmap(path, np.uint8, "r"))
    except FileNotFoundError as error:
        hint = "; the prefix must not end in .bin or .idx" if prefix.suffix in (".bin", ".idx") else ""
        raise DataRefused(
            f"{path} does not exist: a corpus is two files, PREFIX.bin and PREFIX.idx, and the "
            f"prefix given is {prefix}{hint}; correct it or prepare the corpus"
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataRefused(
            f"{path} cannot be read ({reason}): check that it is a file and that you may read it"
        ) from error


def _header(path: Path, index: Bytes) -> tuple[int, int, int]:
    if index.size < HEADER.size:
        raise DataRefused(
            f"{path} has {index.size} bytes, but its header alone needs {HEADER.size}: the "
            "file is cut short; copy or prepare the corpus again"
        )
    magic, version, code, sequences, entries = HEADER.unpack(index[: HEADER.size].tobytes())
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


def _spaced(size: int, block: int, places: int) -> Iterator[int]:
    """At most `places` starts of blocks in [0, size), evenly spaced, the first and last block among them."""
    room = max(0, size - block)
    wanted = min(places, -(-size // block))
    return (room * place // max(1, wanted - 1) for place in range(wanted))
