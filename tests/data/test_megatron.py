"""Corpora are interchangeable with Megatron's: bytes written out by hand, and megatron-core itself where installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.corpus.indexed import IndexedCorpus
from data.corpus.joined import open_corpus
from data.corpus.lengths import document_lengths
from data.corpus.verify import FullCheck
from data.corpus.writer import CorpusWriter
from tests.data.with_megatron import DOCUMENTS, DTYPES

ROOT = Path(__file__).parents[2]
CODES = {"uint8": "01", "int8": "02", "int16": "03", "int32": "04", "int64": "05", "uint16": "08"}
WIDTHS = {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2}
OURS = [[1, 2, 3], [4, 5], [6]]

# Sequences (1 2 3) (4) () (5 6) (7) (); documents begin at sequences 0, 2, 4, 4, 5: DOCUMENTS as Megatron writes it.
MAGIC = "4d4d494449445800 00"
VERSION = "01000000 00000000"
SEQUENCES_AND_ENTRIES = "06000000 00000000 06000000 00000000"
LENGTHS = "03000000 01000000 00000000 02000000 01000000 00000000"
FIRST_TOKEN_OF_SEQUENCE = (0, 3, 4, 4, 6, 7)
DOCUMENT_INDICES = (
    "00000000 00000000 02000000 00000000 04000000 00000000 04000000 00000000 05000000 00000000 06000000 00000000"
)


def by_hand(prefix: Path, dtype: str) -> Path:
    """DOCUMENTS, byte by byte, from the format's description."""
    width = WIDTHS[dtype]
    pointers = b"".join((token * width).to_bytes(8, "little") for token in FIRST_TOKEN_OF_SEQUENCE)
    head = bytes.fromhex(MAGIC + VERSION + CODES[dtype] + SEQUENCES_AND_ENTRIES + LENGTHS)
    prefix.with_suffix(".idx").write_bytes(head + pointers + bytes.fromhex(DOCUMENT_INDICES))
    prefix.with_suffix(".bin").write_bytes(b"".join(token.to_bytes(width, "little") for token in range(1, 8)))
    return prefix


def check_documents(corpus: IndexedCorpus, dtype: str) -> None:
    """That a corpus holds DOCUMENTS."""
    assert (corpus.tokens, corpus.documents, corpus.dtype.name) == (7, 5, dtype)
    assert corpus.read(0, 7).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert corpus.borders(0, 7).tolist() == [4, 6]  # documents without tokens have no place of their own
    assert corpus.document_starts(0, 6).tolist() == [0, 4, 6, 6, 7, 7]
    assert [lengths.tolist() for lengths in document_lengths(corpus)] == [[4, 2, 0, 1, 0]]
    check = FullCheck(corpus, 8, 7)
    assert sum(check.steps()) == 7 * corpus.dtype.itemsize + corpus.idx_bytes.size - 34 - 8
    assert (check.faults, check.largest, check.ends) == ([], 7, {4: 1, 6: 1, 7: 1})


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_of_the_format_is_read(tmp_path: Path, dtype: str) -> None:
    check_documents(IndexedCorpus(by_hand(tmp_path / "theirs", dtype)), dtype)


def test_many_of_them_are_read_as_one_without_a_json(tmp_path: Path) -> None:
    for name in "ab":
        by_hand(tmp_path / name, "int32")
    joined = open_corpus(tmp_path / "[ab]")
    assert joined.borders(0, 14).tolist() == [4, 6, 7, 11, 13]
    assert joined.read(5, 9).tolist() == [6, 7, 1, 2]


def write_ours(prefix: Path, dtype: str) -> Path:
    with CorpusWriter(prefix, dtype) as writer:
        for document in OURS:
            writer.add_document(document)
        writer.finish(tokenizer="none", vocab_size=10, bytes_of_text=0)
    return prefix


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with what megatron-core wrote, and what it read of ours."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    folder = tmp_path_factory.mktemp("exchanged")
    for dtype in DTYPES:
        write_ours(folder / f"ours_{dtype}", dtype)
    command = [sys.executable, "-m", "tests.data.with_megatron", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_megatron_core_writes_is_read(exchanged: tuple[Path, dict[str, Any]], tmp_path: Path, dtype: str) -> None:
    theirs = exchanged[0] / f"theirs_{dtype}"
    check_documents(IndexedCorpus(theirs), dtype)
    by_hand(tmp_path / "hand", dtype)
    for ending in (".bin", ".idx"):
        assert theirs.with_suffix(ending).read_bytes() == (tmp_path / "hand").with_suffix(ending).read_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_here_is_read_by_megatron_core(exchanged: tuple[Path, dict[str, Any]], dtype: str) -> None:
    assert exchanged[1][dtype] == {"sequences": OURS, "documents": [0, 1, 2, 3], "dtype": dtype}


def test_the_bytes_written_out_by_hand_are_of_these_documents() -> None:
    assert [token for document in DOCUMENTS for sequence in document for token in sequence] == list(range(1, 8))
    assert LENGTHS.split() == [
        f"{len(sequence):02x}000000" for document in DOCUMENTS for sequence in document
    ]  # fmt: skip
