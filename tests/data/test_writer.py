"""Many documents at once are written as one after the other; what is left of killed writers is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.corpus.writer import CorpusWriter, disk_refusals, remove_leftovers
from errors import DataRefused


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_many_documents_at_once_are_the_same_files_as_one_by_one(tmp_path: Path, dtype: str) -> None:
    documents = [list(range(number, 3 * number + 1)) for number in range(1, 30)]
    for name in ("one", "many"):
        with CorpusWriter(tmp_path / name, dtype) as writer:
            if name == "one":
                for document in documents:
                    writer.add_document(document)
            else:
                for some in (documents[:7], documents[7:]):
                    writer.add_documents(np.concatenate(some), np.array([len(document) for document in some]))
            assert (writer.documents, writer.tokens) == (29, sum(map(len, documents)))
            writer.finish("t", 100, 5)
    for ending in (".bin", ".idx", ".json"):
        assert (tmp_path / f"one{ending}").read_bytes() == (tmp_path / f"many{ending}").read_bytes()


def test_an_id_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "corpus", "uint16") as writer, pytest.raises(DataRefused, match="from 3 to 65536"):
        writer.add_documents(np.array([3, 65536]), np.array([1, 1]))


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    left = ["a.b.bin.12.tmp", "a.b.idx.3.tmp", "a.b.lengths.4.tmp", ".a.b.json.5.part", ".a.b.report.json.6.part"]
    kept = ["a.b.bin", "a.bin.12.tmp", "aXb.bin.12.tmp", "a.b.bin.x.tmp", ".a.b.json", "a.b.c.bin.12.tmp"]
    for name in left + kept:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path / "a.b")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_what_a_disk_refuses_is_told_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match=r"/x cannot be written \(No such file.*\): make it writable"), \
            disk_refusals(tmp_path):  # fmt: skip
        (tmp_path / "no folder" / "x").write_text("")
