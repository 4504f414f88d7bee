"""Which files the standard library's corpus is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.texts.stdlib import Document, collect, shuffled, split
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

documents = st.lists(st.text("abcxyz/", min_size=1), min_size=2, max_size=30, unique=True).map(
    lambda paths: [Document(path, f"text of {path}") for path in paths]
)


def fill(root: Path, paths: list[str]) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("x = 1\n")


def test_only_the_librarys_own_modules_are_taken_sorted_by_path(tmp_path: Path) -> None:
    fill(tmp_path, [*LEFT_OUT, *reversed(KEPT)])
    assert [document.path for document in collect(tmp_path)] == sorted(KEPT)


def test_empty_files_and_other_encodings_are_left_out(tmp_path: Path) -> None:
    fill(tmp_path, ["a.py"])
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "latin.py").write_bytes("é".encode("latin-1"))
    assert [document.path for document in collect(tmp_path)] == ["a.py"]


def test_a_text_is_taken_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("\ufeffé\r\n\tx".encode())
    assert collect(tmp_path)[0].text == "\ufeffé\r\n\tx"


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match=r"holds no Python source.*data.sources"):
        collect(tmp_path)


def test_this_interpreters_library_is_found() -> None:
    paths = {document.path for document in collect()}
    assert {"os.py", "json/decoder.py"} <= paths


@given(documents, st.floats(0, 0.6))
def test_a_split_keeps_every_document_once_and_in_order(all_documents: list[Document], held_out: float) -> None:
    try:
        training, validation = split(all_documents, held_out)
    except DataRefused:
        assert held_out > 0
        return
    assert sorted([*training, *validation], key=all_documents.index) == all_documents
    assert training == [document for document in all_documents if document in training]
    assert bool(validation) == (held_out > 0)


def test_a_documents_side_does_not_depend_on_the_others() -> None:
    many = [Document(f"{n}.py", "text") for n in range(1000)]
    held = set(split(many, 0.1)[1])
    assert set(split(many[::-1], 0.1)[1]) == held
    assert set(split(many[:500], 0.1)[1]) == held & set(many[:500])
    assert 70 < len(held) < 130


def test_a_larger_share_keeps_what_a_smaller_one_held_out() -> None:
    many = [Document(f"{n}.py", "text") for n in range(300)]
    assert set(split(many, 0.1)[1]) < set(split(many, 0.2)[1])


@pytest.mark.parametrize("held_out", [-0.1, 1.0, float("nan")])
def test_a_share_outside_is_refused(held_out: float) -> None:
    with pytest.raises(DataRefused, match=f"data.held_out is {held_out}"):
        split([Document("a", "x"), Document("b", "x")], held_out)


def test_a_split_that_leaves_nothing_for_training_is_refused() -> None:
    with pytest.raises(DataRefused, match="leaves none of 1 documents"):
        split([Document("a", "x")], 0.01)


@given(documents, st.integers(0, 10))
def test_shuffling_keeps_every_document_and_forgets_the_order_before(all_documents: list[Document], seed: int) -> None:
    order = shuffled(all_documents, seed)
    assert sorted(order, key=all_documents.index) == all_documents
    assert shuffled(all_documents[::-1], seed) == order


def test_the_seed_chooses_the_order() -> None:
    many = [Document(f"{n}.py", "text") for n in range(50)]
    assert len({tuple(shuffled(many, seed)) for seed in range(10)}) == 10
