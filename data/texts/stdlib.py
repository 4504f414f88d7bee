"""The corpus that is on every machine: the source files of Python's own standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from data.texts.packaged import PackagedTexts
from errors import DataRefused

# Tests and frozen grammars are repetitive; the installed packages are not the library.
_EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)
_EXCLUDED_FILES = frozenset({"pydoc_data/topics.py"})


def library(root: Path | None = None) -> PackagedTexts:
    """The library's source files, sorted by path.

    `root`: folder of the library; None: this interpreter's. Raises DataRefused when there are none.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = tuple(sorted(_source_files(folder)))
    if not files:
        raise DataRefused(_nothing(folder))
    return PackagedTexts(folder, files)


def _nothing(folder: Path) -> str:
    return (
        f"{folder} holds no Python source with text, so the standard library cannot be the "
        "corpus (a Python without its sources?): use another Python or set data.sources"
    )


def _source_files(folder: Path) -> Iterator[str]:
    """Relative paths, with forward slashes. Excluded folders are not entered: site-packages can be huge."""
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS]
        for name in files:
            path = (Path(where) / name).relative_to(folder).as_posix()
            if name.endswith(".py") and not name.startswith("_sysconfigdata") and path not in _EXCLUDED_FILES:
                yield path
