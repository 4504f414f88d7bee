"""The corpus that is on every machine: the source files of Python's own standard library."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.texts.packaged import PackagedTexts
from errors import DataRefused

# Tests and frozen grammars are repetitive; the installed packages are not the library.
_EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)
_EXCLUDED_FILES = frozenset({"pydoc_data/topics.py"})


@dataclass(frozen=True)
class Document:
    """One text with the name that its place in the order depends on."""

    path: str
    """Path relative to the corpus's root, with forward slashes."""
    text: str
    """Its content, unchanged."""


def library(root: Path | None = None) -> PackagedTexts:
    """The library's source files, sorted by path.

    `root`: folder of the library; None: this interpreter's. Raises DataRefused when there are none.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = tuple(sorted(_source_files(folder)))
    if not files:
        raise DataRefused(_nothing(folder))
    return PackagedTexts(folder, files)


def collect(root: Path | None = None) -> list[Document]:
    """The library's documents, sorted by path; empty files and ones that are not UTF-8 are left out.

    `root`: folder of the library; None: this interpreter's. Raises DataRefused when there is nothing to read.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    documents = [document for path in sorted(_source_files(folder)) if (document := _read(folder, path))]
    if not documents:
        raise DataRefused(_nothing(folder))
    return documents


def split(documents: Sequence[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, in the given order.

    A document's side depends on itself alone, so that others may come and go. `held_out`: share of documents
    for validation; at least one is held out unless it is 0. Raises DataRefused outside [0, 1) or when no
    document would be left for training.
    """
    if not 0 <= held_out < 1:
        raise DataRefused(f"data.held_out is {held_out}, but must be at least 0 and below 1: set a share such as 0.02")
    if held_out == 0:
        return list(documents), []
    ranks = [_unit_hash("held out", document.path, document.text) for document in documents]
    limit = max(held_out, min(ranks))
    training = [document for document, rank in zip(documents, ranks, strict=True) if rank > limit]
    validation = [document for document, rank in zip(documents, ranks, strict=True) if rank <= limit]
    if not training:
        raise DataRefused(f"data.held_out={held_out} leaves none of {len(documents)} documents for training: lower it")
    return training, validation


def shuffled(documents: Sequence[Document], seed: int) -> list[Document]:
    """The documents in an order that depends on `seed` and their paths alone."""
    ranks = {document.path: _unit_hash(f"shuffle {seed}", document.path) for document in documents}
    return sorted(documents, key=lambda document: (ranks[document.path], document.path))


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


def _read(folder: Path, path: str) -> Document | None:
    try:
        text = (folder / path).read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise DataRefused(
            f"{folder / path} cannot be read ({error.strerror}): make it readable or use another Python"
        ) from error
    return Document(path, text) if text else None


def _unit_hash(*parts: str) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
