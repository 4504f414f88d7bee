"""Folders that one process makes for all: built beside, renamed when whole."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from data.lock import exclusive
from data.progress import Say
from errors import DataRefused
from files import sync


def prepare_once(
    folder: Path, build: Callable[[Path, Say], None], is_whole: Callable[[Path], bool], say: Say
) -> None:  # fmt: skip
    """Makes sure that `folder` is there and whole, built by one process of all that ask for it.

    `build` fills a folder that it is given, and tells how far it is. One that is not whole any more is built again.
    Raises DataRefused where nothing can be written.
    """
    if is_whole(folder):
        return
    with disk_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder.with_name(f".{folder.name}.lock"), f"preparing {folder.name}", say) as note:
            if is_whole(folder):
                return
            if note:  # under the lock, a temporary folder that is there belongs to a process that died
                for left in folder.parent.glob(f".{folder.name}.*.tmp"):
                    shutil.rmtree(left, ignore_errors=True)
            if folder.exists():
                say(f"{folder} is damaged and is made again")
                folder.rename(folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp"))
            _build_beside(folder, build, note or say)
    say(f"prepared {folder}")


def _build_beside(folder: Path, build: Callable[[Path, Say], None], note: Say) -> None:
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.mkdir()
        build(temporary, note)
        sync(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            # Without locks another process may have been faster: its folder holds the same.
            if not folder.is_dir():
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def disk_errors(cache: Path) -> Iterator[None]:
    """Turns a full or read-only disk into words."""
    try:
        yield
    except OSError as error:
        raise DataRefused(
            f"the data cache {cache} cannot be written ({error.strerror or error}): make room "
            "or make it writable, or set data.cache to another folder"
        ) from error
