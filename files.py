"""Files that are either whole or absent: written beside, fsynced, renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def sync(path: Path) -> None:
    """Force a file's or folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Replace a text file in one step; a reader sees the old content or the new, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        sync(beside)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def lines_backwards(path: Path, block: int = 1 << 20) -> Iterator[bytes]:
    """Lines of a file from its end, without their ends; the first is what follows the last line's end, mostly empty."""
    with path.open("rb") as file:
        position, rest = file.seek(0, os.SEEK_END), b""
        while position:
            size = min(block, position)
            position = file.seek(position - size)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            yield from reversed(lines)
        yield rest
