"""Several corpora read as one, against the same documents in one corpus."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import Packer
from data.corpus.indexed import IndexedCorpus
from data.corpus.joined import JoinedCorpus, open_corpus
from data.corpus.mapped import OpenFile
from data.corpus.writer import CorpusWriter
from errors import DataRefused

ROOT = Path(__file__).parents[2]
Documents = Sequence[Sequence[int]]

ids = st.lists(st.integers(0, 900), min_size=1, max_size=7)
parts_of_documents = st.lists(st.lists(ids, min_size=1, max_size=5), min_size=1, max_size=5)


def write(prefix: Path, documents: Documents, dtype: str = "uint16") -> Path:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with CorpusWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish(tokenizer="none", vocab_size=1000, bytes_of_text=0)
    return prefix


def write_parts(folder: Path, parts: Sequence[Documents]) -> Path:
    """Prefixes p0, p1, ... in `folder`, and the pattern of all."""
    for number, documents in enumerate(parts):
        write(folder / f"p{number}", documents)
    return folder / "p*"


def joined_and_whole(folder: Path, parts: Sequence[Documents]) -> tuple[JoinedCorpus, IndexedCorpus]:
    pattern = write_parts(folder, parts)
    corpora = [IndexedCorpus(folder / f"p{number}") for number in range(len(parts))]
    whole = write(folder / "whole", [document for documents in parts for document in documents])
    return JoinedCorpus(pattern, corpora), IndexedCorpus(whole)


@settings(deadline=None, max_examples=15)
@given(parts_of_documents)
def test_parts_read_as_one_corpus_would(tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[int]]]) -> None:
    joined, whole = joined_and_whole(tmp_path_factory.mktemp("parts"), parts)
    assert (joined.tokens, joined.documents, joined.dtype) == (whole.tokens, whole.documents, whole.dtype)
    for start in range(whole.tokens):
        for stop in range(start + 1, whole.tokens + 1):
            assert joined.read(start, stop).tolist() == whole.read(start, stop).tolist()
            assert joined.borders(start, stop).tolist() == whole.borders(start, stop).tolist()
    assert joined.sample(10_000).tolist() == whole.sample(10_000).tolist()


@settings(deadline=None, max_examples=15)
@given(parts_of_documents, st.data())
def test_batches_are_the_same_across_seams(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[int]]], data: st.DataObject
) -> None:
    parts[0][0] *= 2  # one sample at least
    joined, whole = joined_and_whole(tmp_path_factory.mktemp("parts"), parts)
    seq_len = data.draw(st.integers(1, whole.tokens - 1))
    starts = data.draw(st.lists(st.integers(0, whole.tokens - seq_len - 1), min_size=1, max_size=3))
    packer = Packer(seq_len, data.draw(st.booleans()), 1000)
    one, other = (packer.pack([(corpus, at) for at in starts], range(len(starts))) for corpus in (joined, whole))
    for field in ("tokens", "labels", "positions", "cu_seqlens"):
        assert getattr(one, field).tolist() == getattr(other, field).tolist()


def test_a_pattern_joins_its_matches_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, token in (("web_b", 2), ("web_a", 1), ("sub/web_c", 3), ("other", 4)):
        write(tmp_path / name, [[token]])
    corpus = open_corpus(str(tmp_path / "web_*"))
    assert corpus.read(0, 9).tolist() == [1, 2]
    assert [part.prefix.name for part in corpus.parts] == ["web_a", "web_b"]
    assert open_corpus(tmp_path / "**" / "web_*").read(0, 9).tolist() == [3, 1, 2]
    assert open_corpus(tmp_path / "web_[b]").read(0, 9).tolist() == [2]


def test_one_match_is_the_corpus_itself_and_a_path_with_brackets_is_a_path(tmp_path: Path) -> None:
    write(tmp_path / "web", [[1]])
    write(tmp_path / "web[1]", [[2]])
    assert open_corpus(tmp_path / "we?").fingerprint() == open_corpus(tmp_path / "web").fingerprint()
    assert open_corpus(tmp_path / "web[1]").read(0, 1).tolist() == [2]


def test_a_fingerprint_is_of_the_content_and_its_order_not_of_names(tmp_path: Path) -> None:
    one, two = [[1, 2], [3]], [[4, 5, 6]]
    found = {
        name: open_corpus(write_parts(tmp_path / name, parts)).fingerprint()
        for name, parts in {
            "a": [one, two],
            "again": [one, two],
            "turned": [two, one],
            "other": [one, [[4, 5, 7]]],
        }.items()
    }
    shutil.move(tmp_path / "a", tmp_path / "moved")
    assert open_corpus(tmp_path / "moved" / "p*").fingerprint() == found["a"] == found["again"]
    assert len({found["a"], found["turned"], found["other"]}) == 3


@pytest.mark.parametrize("place", [0, 5, 6, 9])
def test_an_id_outside_is_named_with_its_own_file_and_place(tmp_path: Path, place: int) -> None:
    stream = [7] * 10
    stream[place] = 800
    corpus = open_corpus(write_parts(tmp_path, [[stream[:6]], [stream[6:]]]))
    named = f"p{place // 6}.bin: the token at position {place % 6} is 800"
    with pytest.raises(DataRefused, match=named):
        corpus.check_ids(600)
    with pytest.raises(DataRefused, match=named):
        corpus.check_range(0, corpus.read(0, 10), 600)
    with pytest.raises(DataRefused, match=named):
        Packer(9, False, 600).pack([(corpus, 0)], range(1))
    corpus.check_ids(801)


def test_a_pattern_without_matches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match=r"no file matches .*web_\*.idx.*without .bin or .idx"):
        open_corpus(tmp_path / "web_*")


def test_parts_of_two_types_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "p0", [[1]])
    write(tmp_path / "p1", [[1]], "int32")
    with pytest.raises(DataRefused, match=r"p1.idx holds int32, but .*p0.idx uint16.*two sources"):
        open_corpus(tmp_path / "p*")


def test_a_damaged_part_is_refused_by_name(tmp_path: Path) -> None:
    pattern = write_parts(tmp_path, [[[1]], [[2]], [[3]]])
    (tmp_path / "p1.bin").unlink()
    with pytest.raises(DataRefused, match=r"p1.bin does not exist"):
        open_corpus(pattern)


@pytest.mark.parametrize("prefix", ["", "/", "..", "a/\0b", "~nobody-of-that-name/web"])
def test_a_prefix_that_can_name_no_file_is_refused(prefix: str) -> None:
    with pytest.raises(DataRefused, match=r"names no file|has no meaning here"):
        open_corpus(prefix)


def test_a_folder_is_refused_with_the_pattern_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    with pytest.raises(DataRefused, match=r"it is a folder, whose corpora .*shards/\* would name"):
        open_corpus(tmp_path / "shards")


MANY = """
import os, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
from data.corpus.joined import open_corpus
began = time.perf_counter()
corpus = open_corpus(sys.argv[1])
seconds = time.perf_counter() - began
corpus.check_ids(1000), corpus.fingerprint()
total = sum(int(corpus.read(at, at + 1)[0]) for at in range(0, corpus.tokens, 6))
print(len(corpus.parts), corpus.tokens, total, seconds)
"""


def test_a_thousand_parts_open_fast_and_keep_no_file_open(tmp_path: Path) -> None:
    count = 1000
    write(tmp_path / "p0000", [[3, 3, 3], [3, 3, 3]])
    for number in range(1, count):
        for ending in (".bin", ".idx"):
            os.link(tmp_path / f"p0000{ending}", tmp_path / f"p{number:04d}{ending}")
    done = subprocess.run(
        [sys.executable, "-c", MANY, tmp_path / "p*"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    parts, tokens, total, seconds = done.stdout.split()
    assert (int(parts), int(tokens), int(total)) == (count, 6 * count, 3 * count)
    assert float(seconds) < 2


def test_more_parts_than_the_system_maps_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = write_parts(tmp_path, [[[1]], [[2]]])

    def full(_: OpenFile) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(OpenFile, "mapped", full)
    with pytest.raises(DataRefused, match=r"p0.idx cannot be read .*vm.max_map_count"):
        open_corpus(pattern)


def test_what_is_read_is_not_to_be_written(tmp_path: Path) -> None:
    corpus = open_corpus(write(tmp_path / "web", [[1, 2]]))
    with pytest.raises(ValueError, match="read-only"):
        corpus.read(0, 2)[0] = 5
    assert np.fromfile(tmp_path / "web.bin", "<u2").tolist() == [1, 2]
