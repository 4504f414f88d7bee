"""Small corpora for the data room's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from data.corpus.indexed import IndexedCorpus
from data.corpus.writer import CorpusWriter

MakeCorpus = Callable[[Sequence[Sequence[int]]], IndexedCorpus]


@pytest.fixture(scope="session")
def make_corpus(tmp_path_factory: pytest.TempPathFactory) -> MakeCorpus:
    """Writes documents of ids as a corpus of its own (uint16) and opens it."""
    folder = tmp_path_factory.mktemp("corpora")
    names = iter(range(1_000_000))

    def make(documents: Sequence[Sequence[int]]) -> IndexedCorpus:
        prefix = folder / f"corpus.{next(names)}"
        with CorpusWriter(prefix, "uint16") as writer:
            for document in documents:
                writer.add_document(document)
            writer.finish(tokenizer="none", vocab_size=1 << 16, bytes_of_text=0)
        return IndexedCorpus(prefix)

    return make


@pytest.fixture
def fake_library(tmp_path: Path) -> Iterator[Path]:
    """A folder that looks like a standard library, with 20 small modules and things to leave out."""
    root = tmp_path / "library"
    for number in range(20):
        path = root / f"package{number % 3}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "\n".join(
                f"def function_{number}_{line}(value):\n\treturn value * {line} + {number}\n" for line in range(30)
            )
        )
    yield root
