"""The .bin/.idx reader and writer."""

from __future__ import annotations

import json
import math
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpus.indexed import HEADER, MAGIC, IndexedCorpus
from data.corpus.metadata import read_metadata
from data.corpus.writer import CorpusWriter, token_dtype
from errors import DataRefused

ids = st.lists(st.integers(0, 30_000), min_size=1, max_size=12)
documents_of_ids = st.lists(ids, min_size=1, max_size=12)


def write(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> Path:
    with CorpusWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish(tokenizer="f00d", vocab_size=30_001, bytes_of_text=100)
    return prefix


def write_index(path: Path, lengths: np.ndarray, documents: np.ndarray, itemsize: int = 2) -> None:
    """An index written by hand, in blocks: `documents` holds the first sequence of each, and their number."""
    ends = np.cumsum(lengths.astype("<i8") * itemsize)
    pointers = np.concatenate([[0], ends[:-1]])
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, lengths.size, documents.size))
        for part, dtype in ((lengths, "<i4"), (pointers, "<i8"), (documents, "<i8")):
            file.write(part.astype(dtype).tobytes())


@settings(deadline=None)
@given(documents_of_ids, st.sampled_from(["uint16", "int16", "int32", "int64"]))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str
) -> None:
    corpus = IndexedCorpus(write(tmp_path_factory.mktemp("corpus") / "a.b", documents, dtype))
    assert corpus.read(0, corpus.tokens).tolist() == [token for document in documents for token in document]
    assert (corpus.tokens, corpus.documents) == (sum(map(len, documents)), len(documents))
    assert corpus.dtype == np.dtype(dtype)


@settings(deadline=None)
@given(documents_of_ids)
def test_borders_are_the_document_starts_strictly_inside(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    corpus = IndexedCorpus(write(tmp_path_factory.mktemp("corpus") / "a", documents))
    starts = np.cumsum([0, *map(len, documents)]).tolist()[:-1]
    for start in range(corpus.tokens):
        for stop in range(start + 1, corpus.tokens + 1):
            assert corpus.borders(start, stop).tolist() == [at for at in starts if start < at < stop]


def test_a_border_is_a_document_not_a_sequence_and_an_empty_document_counts_once(tmp_path: Path) -> None:
    np.arange(12, dtype="<u2").tofile(tmp_path / "a.bin")
    # Sequences of 3, 3, 0, 4, 2 tokens; documents begin at sequences 0, 2 (no tokens), 3 and 4.
    write_index(tmp_path / "a.idx", np.array([3, 3, 0, 4, 2]), np.array([0, 2, 3, 4, 5]))
    corpus = IndexedCorpus(tmp_path / "a")
    assert corpus.documents == 4
    assert corpus.borders(0, 12).tolist() == [6, 10]
    assert corpus.borders(0, 6).tolist() == []


def test_the_files_are_megatrons_format_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4]])
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 4)
    assert (tmp_path / "a.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 2, 3)
        + struct.pack("<2i", 3, 1)
        + struct.pack("<2q", 0, 6)
        + struct.pack("<3q", 0, 1, 2)
    )


def patch(path: Path, at: int, kind: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(kind, data, at, value)
    path.write_bytes(data)


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": ("bin", Path.unlink, "does not exist"),
    "missing index": ("idx", Path.unlink, "does not exist"),
    "empty": ("bin", lambda path: path.write_bytes(b""), "is empty"),
    "a folder": ("idx", into_folder, "cannot be read"),
    "cut": ("bin", lambda path: path.write_bytes(path.read_bytes()[:-2]), "has 6 bytes.*describes 8"),
    "longer": ("bin", lambda path: path.write_bytes(path.read_bytes() + b"x"), "has 9 bytes.*describes 8"),
    "cut index": ("idx", lambda path: path.write_bytes(path.read_bytes()[:-8]), "cut short"),
    "cut header": ("idx", lambda path: path.write_bytes(path.read_bytes()[:20]), "header"),
    "magic": ("idx", lambda path: patch(path, 0, "<B", 0), "not Megatron's"),
    "version": ("idx", lambda path: patch(path, 9, "<Q", 2), "version 2"),
    "dtype code": ("idx", lambda path: patch(path, 17, "<B", 77), "dtype code is 77"),
    "float dtype": ("idx", lambda path: patch(path, 17, "<B", 7), "float32.*whole numbers"),
    "no sequences": ("idx", lambda path: patch(path, 18, "<Q", 0), "0 sequences"),
    "no documents": ("idx", lambda path: patch(path, 26, "<Q", 1), "0 documents"),
    "more sequences": ("idx", lambda path: patch(path, 18, "<Q", 1 << 60), "need"),
    "first pointer": ("idx", lambda path: patch(path, 42, "<q", 2), "must be at byte 0"),
    "second pointer": ("idx", lambda path: patch(path, 50, "<q", 4), "without a gap"),
    "last length": ("idx", lambda path: patch(path, 38, "<i", 9), "describes 24"),
    "document table": ("idx", lambda path: patch(path, 74, "<q", 9), "span sequences 0 to 9"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    suffix, harm, message = DAMAGES[damage]
    path = write(tmp_path / "web", [[1, 2, 3], [4]]).with_suffix(f".{suffix}")
    harm(path)
    with pytest.raises(DataRefused, match=f"web.{suffix}.*{message}"):
        IndexedCorpus(tmp_path / "web")


def test_a_prefix_with_the_files_suffix_is_explained(tmp_path: Path) -> None:
    write(tmp_path / "web", [[1]])
    with pytest.raises(DataRefused, match=r"prefix must not end in .bin"):
        IndexedCorpus(tmp_path / "web.bin")


@pytest.mark.parametrize("place", [0, 1, 49_999])
def test_an_id_outside_the_vocabulary_is_found_at_the_ends(tmp_path: Path, place: int) -> None:
    ids = [5] * 50_000
    ids[place] = 700
    corpus = IndexedCorpus(write(tmp_path / "web", [ids]))
    with pytest.raises(DataRefused, match=f"web.bin: the token at position {place} is 700.*0 to 599"):
        corpus.check_ids(600)
    corpus.check_ids(701)
    corpus.check_ids(1 << 20)  # more than the type on disk holds


def test_a_negative_id_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "web", [[5, 6, 7]], "int32")
    patch(tmp_path / "web.bin", 4, "<i", -1)
    with pytest.raises(DataRefused, match="position 1 is -1"):
        IndexedCorpus(prefix).check_ids(600)


def test_the_id_check_reads_a_few_thousand_tokens_of_a_large_corpus(
    make_corpus: Callable[..., IndexedCorpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus([[1] * 200_000])
    seen: list[int] = []
    monkeypatch.setattr(corpus, "check_range", lambda start, tokens, _: seen.extend(range(start, start + 64)))
    corpus.check_ids(10)
    assert seen[0] == 0 and seen[-1] == 199_999 and 2000 < len(set(seen)) < 10_000


def test_opening_and_reading_a_million_documents_builds_nothing_of_their_size(tmp_path: Path) -> None:
    count, length = 1_000_000, 3
    write_index(tmp_path / "a.idx", np.full(count, length), np.arange(count + 1))
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(count * length * 2)

    def use():
        corpus = IndexedCorpus(tmp_path / "a")
        corpus.check_ids(10)
        corpus.fingerprint()
        return corpus.borders(1_500_001, 1_500_010)

    use()  # what the first use of a library loads is not counted
    tracemalloc.start()
    borders = use()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert borders.tolist() == [1_500_003, 1_500_006, 1_500_009]
    assert peak < 500_000


def test_twenty_million_documents_open_from_a_sparse_file(tmp_path: Path) -> None:
    count = 20_000_000
    with (tmp_path / "a.idx").open("wb") as file:  # all documents but the last are empty
        file.write(HEADER.pack(MAGIC, 1, 8, count, count + 1))
        file.seek(HEADER.size + 4 * (count - 1))
        file.write(struct.pack("<i", 4))
        file.seek(HEADER.size + 12 * count + 8 * count)
        file.write(struct.pack("<q", count))
    (tmp_path / "a.bin").write_bytes(struct.pack("<4H", 1, 2, 3, 4))
    tracemalloc.start()
    corpus = IndexedCorpus(tmp_path / "a")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (corpus.documents, corpus.tokens) == (count, 4)
    assert peak < 500_000


def test_a_fingerprint_tells_changed_tokens_and_changed_borders(tmp_path: Path) -> None:
    variants = [[[1, 2], [3]], [[1, 2], [4]], [[1], [2, 3]], [[1, 2, 3]]]
    prints = {IndexedCorpus(write(tmp_path / str(n), ids)).fingerprint() for n, ids in enumerate(variants)}
    assert len(prints) == 4
    assert IndexedCorpus(write(tmp_path / "again", variants[0])).fingerprint() in prints


@settings(deadline=None, max_examples=20)
@given(documents_of_ids)
def test_an_index_written_in_several_blocks_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    write(folder / "whole", documents)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("data.corpus.writer._BLOCK", 2)
        write(folder / "blocks", documents)
    assert (folder / "blocks.idx").read_bytes() == (folder / "whole.idx").read_bytes()


def test_the_json_counts_what_was_written(tmp_path: Path) -> None:
    metadata = read_metadata(write(tmp_path / "web", [[1, 1], [2, 2, 2, 2, 3, 3]]))
    assert metadata is not None
    assert (metadata.tokens, metadata.documents, metadata.dtype) == (8, 2, "uint16")
    assert (metadata.tokenizer, metadata.vocab_size, metadata.bytes_per_token) == ("f00d", 30_001, 12.5)
    assert metadata.unigram_entropy == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize("content", ["{", "[]", "{}", json.dumps({"tokenizer": 3})])
def test_a_damaged_json_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "web.json").write_text(content)
    with pytest.raises(DataRefused, match=r"web.json"):
        read_metadata(tmp_path / "web")


def test_an_unfinished_corpus_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyError), CorpusWriter(tmp_path / "web", "uint16") as writer:
        writer.add_document([1])
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_finished_corpus_leaves_its_three_files_and_no_others(tmp_path: Path) -> None:
    write(tmp_path / "web", [[1]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["web.bin", "web.idx", "web.json"]


def test_a_corpus_without_documents_is_refused(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "web", "uint16") as writer:
        writer.add_document([])
        with pytest.raises(DataRefused, match="no document with text"):
            writer.finish("f00d", 10, 0)


@pytest.mark.parametrize("token", [-1, 65_536])
def test_an_id_that_the_type_on_disk_cannot_hold_is_refused(tmp_path: Path, token: int) -> None:
    with (
        CorpusWriter(tmp_path / "web", "uint16") as writer,
        pytest.raises(DataRefused, match="holds ids from 0 to 65535"),
    ):
        writer.add_document([1, token])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, "uint16"), (65_536, "uint16"), (65_537, "int32")])
def test_the_smallest_type_that_holds_every_id_is_chosen(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == dtype
    assert np.iinfo(dtype).max >= vocab_size - 1


@pytest.mark.parametrize("value", [1 << 40, -1, 0])
def test_a_border_that_is_none_is_refused_where_it_is_read(tmp_path: Path, value: int) -> None:
    """Between the places that are looked at on opening."""
    write(tmp_path / "a", [[1, 2, 3]] * 400)
    patch(tmp_path / "a.idx", HEADER.size + 4 * 400 + 8 * 400 + 8 * 201, "<q", value)
    corpus = IndexedCorpus(tmp_path / "a")
    with pytest.raises(DataRefused, match=r"a.idx: document.* is damaged"):
        corpus.borders(600, 606)
