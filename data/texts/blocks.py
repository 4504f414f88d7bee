"""The content of a file in blocks of bytes, plain or decompressed, in constant memory."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from errors import DataRefused

COMPRESSED = frozenset({".gz", ".zst"})
"""Endings of the files that are decompressed as they are read."""

_BLOCK = 1 << 20
_COMPRESSED_BLOCK = 1 << 17  # gives some 1 MB of text
_ZSTD_WINDOW = 1 << 31  # of files made with --long=31


class _Damaged(Exception):
    """The content contradicts its format."""


class _Decompressor(Protocol):
    """What decompresses one gzip member or one zstd frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def blocks(path: Path, begin: int = 0) -> Iterator[bytes]:
    """Blocks of the (decompressed) bytes of `path`, none of them empty; several gzip members or zstd frames are joined.

    `begin`: first byte that is read, of a plain file only. Raises DataRefused when it is unreadable, damaged or cut.
    """
    ending = path.suffix.lower()
    with reading(path):
        if ending not in COMPRESSED:
            yield from _raw_blocks(path, _BLOCK, begin)
        else:
            yield from _decompressed(path, _gzip() if ending == ".gz" else _zstd(path))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what can go wrong while `path` is read into DataRefused."""
    try:
        yield
    except _Damaged as error:
        raise DataRefused(f"{path} is damaged or cut ({error}): copy or download it again") from error
    except OSError as error:
        raise DataRefused(
            f"{path} cannot be read ({error.strerror or error}): make it readable, or leave it out"
        ) from error


def _raw_blocks(path: Path, size: int, begin: int = 0) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while block := file.read(size):
            yield block


def _decompressed(path: Path, kind: tuple[Callable[[], _Decompressor], type[Exception]]) -> Iterator[bytes]:
    begin, failure = kind
    member: _Decompressor | None = None
    for compressed in _raw_blocks(path, _COMPRESSED_BLOCK):
        if member is None:  # gzip pads with zeros
            compressed = compressed.lstrip(b"\0")
        while compressed:
            member = member or begin()
            try:
                block = member.decompress(compressed)
            except failure as error:
                raise _Damaged(str(error)) from error
            if block:
                yield block
            compressed, member = (member.unused_data.lstrip(b"\0"), None) if member.eof else (b"", member)
    if member is not None:
        raise _Damaged("its end is missing")


def _gzip() -> tuple[Callable[[], _Decompressor], type[Exception]]:
    return functools.partial(zlib.decompressobj, zlib.MAX_WBITS | 16), zlib.error


def _zstd(path: Path) -> tuple[Callable[[], _Decompressor], type[Exception]]:
    try:
        import zstandard
    except ImportError as error:
        raise DataRefused(f"{path} is compressed with zstd, whose package is missing: pip install zstandard") from error
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj, zstandard.ZstdError
