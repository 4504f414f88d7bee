"""Which files the standard library's corpus is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.texts.documents import documents_of
from data.texts.stdlib import library
from errors import DataRefused

LEFT_OUT = [
    "test/a.py",
    "pkg/tests/a.py",
    "idlelib/a.py",
    "lib2to3/a.py",
    "site-packages/pkg/a.py",
    "dist-packages/a.py",
    "pkg/__pycache__/a.py",
    "_sysconfigdata__linux.py",
    "pydoc_data/topics.py",
    "pkg/idle_test/a.py",
    "pkg/notes.txt",
]
KEPT = ["a.py", "pkg/a.py", "pkg/topics.py", "testing.py"]


def fill(root: Path, paths: list[str]) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("x = 1\n")


def test_only_the_librarys_own_modules_are_taken_sorted_by_path(tmp_path: Path) -> None:
    fill(tmp_path, [*LEFT_OUT, *reversed(KEPT)])
    assert [document.key for document in documents_of(library(tmp_path))] == sorted(KEPT)


def test_a_text_is_taken_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("\ufeffé\r\n\tx".encode())
    assert [document.text for document in documents_of(library(tmp_path))] == ["\ufeffé\r\n\tx"]


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match=r"holds no Python source.*data.sources"):
        library(tmp_path)
