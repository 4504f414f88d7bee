"""What `python -m data.inspect` says of corpora, whole and damaged."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpus.indexed import HEADER, MAGIC, IndexedCorpus
from data.corpus.lengths import LengthCounts, bars
from data.corpus.verify import FullCheck
from data.corpus.writer import CorpusWriter
from data.inspect import main
from data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece
from errors import DataRefused

ROOT = Path(__file__).parents[2]
END = 1


def write(prefix: Path, documents: Sequence[Sequence[int]], tokenizer: str = "f00d" * 16, vocab: int = 900) -> Path:
    with CorpusWriter(prefix, "uint16") as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish(tokenizer, vocab, bytes_of_text=2 * sum(map(len, documents)))
    return prefix


@pytest.fixture
def web(tmp_path: Path) -> Path:
    """Prefix of 50 documents of 2 to 51 tokens that end with 1."""
    return write(tmp_path / "web", [[*range(2, 3 + length), END] for length in range(50)])


def patch(path: Path, at: int, kind: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(kind, data, at, value)
    path.write_bytes(data)


def found(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> Any:
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_counts_lengths_and_ends_are_told(web: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = found(capsys, web)
    lengths = report["lengths"]
    assert (report["tokens"], report["documents"], report["dtype"]) == (1325, 50, "uint16")
    assert (lengths["min"], lengths["median"], lengths["p99"], lengths["max"]) == (2, 26, 51, 51)
    assert lengths["mean"] == 26.5
    assert [(each["low"], each["high"], each["documents"]) for each in lengths["histogram"]] == [
        (2, 3, 2), (4, 7, 4), (8, 15, 8), (16, 31, 16), (32, 63, 20),
    ]  # fmt: skip
    assert report["ends"] == {"looked_at": 50, "documents": {"1": 50}, "elsewhere": None}
    assert report["fingerprint"] == IndexedCorpus(web).fingerprint()
    assert report["bytes"] == sum(web.with_suffix(ending).stat().st_size for ending in (".bin", ".idx"))
    assert (report["faults"], report["verified"], report["parts"][0]["sha256"]) == ([], False, None)


def test_the_text_says_the_same(web: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(web), "--samples", "2"]) == 0
    out = capsys.readouterr().out
    for line in (
        "tokens             1,325 (uint16)",
        "min 2, median 26, mean 26.5, p99 51, max 51",
        "ends               with id 1 in all of 50 documents looked at",
        ".json              tokenizer f00df00df00df00d..., 900 entries, 2.00 bytes of text a token",
        "  32-63             20  40.0%  ########################################",
        "document 1, 3 tokens\n  | 2 3 1",
    ):
        assert line in out
    assert "document 2," not in out


def test_everything_is_looked_at_on_request(web: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(web.with_name("web2"), [[5, END, 6, END], [899]])
    report = found(capsys, f"{web}*", "--verify")
    assert report["ends"] == {"looked_at": 52, "documents": {"1": 51, "899": 1}, "elsewhere": 1}
    assert (report["verified"], report["largest_id"], report["documents"]) == (True, 899, 52)
    for part in report["parts"]:
        for ending, digest in part["sha256"].items():
            assert digest == hashlib.sha256(Path(f"{part['prefix']}.{ending}").read_bytes()).hexdigest()
    assert [part["tokens"] for part in report["parts"]] == [1325, 5]
    assert main([f"{web}*", "--verify"]) == 0
    out = capsys.readouterr().out
    assert "51 with 1, 1 with 899" in out and f"{part['sha256']['bin']}  {part['prefix']}.bin" in out


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "id": ("bin", lambda path: patch(path, 700, "<H", 901), "web.bin: the token at position 350 is 901.*0 to 899"),
    "length": ("idx", lambda path: patch(path, 34 + 4 * 7, "<i", 10), "web.idx: sequence 7 has 10 tokens"),
    "pointer": ("idx", lambda path: patch(path, 34 + 4 * 50 + 8 * 20, "<q", 10), "web.idx: sequence 19 has 21 tokens"),
    "documents": ("idx", lambda path: patch(path, 34 + 12 * 50 + 8 * 20, "<q", 5), "web.idx: document 19 is seq"),
    "far": ("idx", lambda path: patch(path, 34 + 12 * 50 + 8 * 20, "<q", 1 << 40), "web.idx: document 19 is seq"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_in_the_middle_is_found_with_its_place(web: Path, damage: str) -> None:
    ending, harm, message = DAMAGES[damage]
    harm(web.with_suffix(f".{ending}"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("data.corpus.verify._ENTRIES", 8)
        patched.setattr("data.corpus.verify._TOKENS", 100)
        check = FullCheck(IndexedCorpus(web, places=2), 900, END)
        list(check.steps())
    assert len(check.faults) == 1
    with pytest.raises(DataRefused, match=message):
        raise DataRefused(check.faults[0])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_corpus_is_refused_by_the_command(web: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    ending, harm, _ = DAMAGES[damage]
    harm(web.with_suffix(f".{ending}"))
    assert main([str(web), "--verify"]) == 3
    assert f"web.{ending}" in capsys.readouterr().err


@settings(max_examples=60, deadline=None)
@given(st.integers(34, 34 + 12 * 12 + 8 * 13 - 1), st.integers(0, 255))
def test_no_byte_of_an_index_brings_a_traceback(tmp_path_factory: pytest.TempPathFactory, at: int, value: int) -> None:
    prefix = tmp_path_factory.getbasetemp() / "fuzzed"
    lengths = np.arange(3, 15)
    pointers = np.cumsum([0, *lengths[:-1] * 2])
    head = HEADER.pack(MAGIC, 1, 8, 12, 13) + lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes()
    index = bytearray(head + np.arange(13).astype("<i8").tobytes())
    changed, index[at] = index[at] != value, value
    prefix.with_suffix(".idx").write_bytes(index)
    np.arange(lengths.sum(), dtype="<u2").tofile(prefix.with_suffix(".bin"))
    code = main([str(prefix), "--verify", "--json"])
    tables = at < 34 + 12 * 12  # of lengths and pointers no byte may differ; documents may be cut in other ways
    assert code == (3 if changed and tables else code) and code in (0, 3)


def test_the_json_beside_is_held_against_the_files(web: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = web.with_suffix(".json")
    path.write_text(path.read_text().replace('"documents": 50', '"documents": 51'))
    assert main([str(web)]) == 3
    captured = capsys.readouterr()
    assert "web.json tells of (tokens, documents, dtype)" in captured.err and "51" in captured.err
    assert "a fault, named at the end" in captured.out
    path.write_text("{")
    assert "cannot be read as JSON" in found(capsys, web, code=3)["faults"][0]
    path.unlink()
    assert found(capsys, web)["parts"][0]["metadata"] is None


def test_parts_of_two_tokenizers_are_told(web: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(web.with_name("web2"), [[5]], tokenizer="beef" * 16)
    (fault,) = found(capsys, f"{web}*", code=3)["faults"]
    assert "2 tokenizers (beefbeefbeefbeef..., f00df00df00df00d...)" in fault


def test_bytes_are_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        tmp_path / "web",
        [list("naïve".encode())],
        load_tokenizer("bytes").fingerprint,
        load_tokenizer("bytes").vocab_size,
    )
    assert found(capsys, tmp_path / "web", "--tokenizer", "bytes")["samples"][0]["text"] == "naïve"


def test_ids_outside_a_given_vocabulary_are_told(web: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fault,) = found(capsys, web, "--vocab-size", "40", code=3)["faults"]
    assert "is 40, but ids must be from 0 to 39" in fault


def test_samples_are_text_where_the_tokenizer_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_sentencepiece([" ".join(f"abc{n} abd\n" for n in range(300))], 300, tmp_path / "t.model")
    ids = tokenizer.encode("abc\nabd \x1b[2J")
    write(tmp_path / "web", [[*ids, tokenizer.eod]], tokenizer.fingerprint, tokenizer.vocab_size)
    assert main([str(tmp_path / "web"), "--tokenizer", str(tmp_path / "t.model")]) == 0
    assert "  | abc\n  | abd \\x1b[2J" in capsys.readouterr().out
    write(tmp_path / "other", [[*ids, tokenizer.vocab_size]], "beef" * 16, tokenizer.vocab_size)
    report = found(capsys, tmp_path / "other", "--tokenizer", str(tmp_path / "t.model"), code=3)
    assert [fault.split(": ")[0].rpartition("/")[2] for fault in report["faults"]] == [
        f"other.json names the tokenizer beefbeefbeefbeef..., but the one given is {tokenizer.fingerprint[:16]}...",
        "other.bin",
    ]
    assert report["samples"][0]["text"] is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1 << 18), min_size=1, max_size=30), min_size=1, max_size=4))
def test_statistics_are_exact(blocks: list[list[int]]) -> None:
    counts = LengthCounts()
    for block in blocks:
        counts.add(np.array(block, np.int64))
    ordered, made = sorted(chain.from_iterable(blocks)), counts.statistics()
    assert (made.documents, made.min, made.max) == (len(ordered), ordered[0], ordered[-1])
    assert made.mean == pytest.approx(sum(ordered) / len(ordered))
    assert made.empty == ordered.count(0)
    for share, value in ((50, made.median), (99, made.p99)):
        assert value == ordered[-(-len(ordered) * share // 100) - 1]
    for each in made.histogram:
        assert each.documents == sum(each.low <= length <= each.high for length in ordered)
    assert sum(each.documents for each in made.histogram) == len(ordered)
    assert len(list(bars(made.histogram))) == len(made.histogram)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "-1"], "from 0 on"),
        (["--vocab-size", "0"], "from 1 on"),
        (["--nonsense"], "unrecognized"),
        ([], ""),
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["web", *arguments] if arguments else [])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_what_is_not_there_is_refused(tmp_path: Path, web: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([tmp_path / "none"], [tmp_path / "none*"], [web, "--tokenizer", tmp_path / "none.model"]):
        assert main(list(map(str, arguments))) == 3
        captured = capsys.readouterr()
        assert captured.out == "" and "none" in captured.err


def test_it_is_a_command_and_a_reader_may_stop_reading(web: Path) -> None:
    command = f"{sys.executable} -m data.inspect {web} --json | head -c 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")
