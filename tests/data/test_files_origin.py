"""Files of text, jsonl and parquet: what is read, what is skipped, what is refused, and that cuts change nothing."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.texts.blocks import blocks
from data.texts.documents import FirstDocuments
from data.texts.files_origin import FilesOrigin
from data.texts.jsonl import lines, parser
from data.texts.origin import Document, Origin, Skipped
from data.texts.text_files import TextPart
from errors import DataRefused

Write = Callable[[Path, bytes], object]
COMPRESSED: dict[str, Write] = {
    "": lambda path, content: path.write_bytes(content),
    ".gz": lambda path, content: path.write_bytes(gzip.compress(content)),
    ".zst": lambda path, content: path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(content)),
}


def read(origin: Origin) -> list[Document | Skipped]:
    """Every item of every part, after a journey to another process."""
    return [item for part in pickle.loads(pickle.dumps(list(origin.parts()))) for item in part.read()]


def files(*inputs: object, **settings: Any) -> FilesOrigin:
    return FilesOrigin(tuple(map(str, inputs)), **settings)


def jsonl(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write(root: Path, **contents: str) -> None:
    for name, text in contents.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def keys(origin: Origin) -> list[str]:
    return [item.key for item in read(origin)]


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_text_file_is_one_document_unchanged(tmp_path: Path, ending: str) -> None:
    COMPRESSED[ending](tmp_path / f"a.txt{ending}", "\ufeffé\r\n\tx\n".encode())
    assert read(files(tmp_path)) == [Document(f"a.txt{ending}", "\ufeffé\r\n\tx\n")]


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_line_of_jsonl_is_one_document_whatever_the_compression(tmp_path: Path, ending: str) -> None:
    COMPRESSED[ending](tmp_path / f"a.jsonl{ending}", jsonl({"text": "one"}, {"text": "two\nlines", "id": 3}))
    name = f"a.jsonl{ending}"
    assert read(files(tmp_path)) == [Document(f"{name}:0", "one"), Document(f"{name}:16", "two\nlines")]


def test_a_row_of_parquet_is_one_document(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", None, "  ", "é"], "id": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    assert read(files(tmp_path)) == [
        Document("a.parquet:0", "one"),
        Skipped("a.parquet:1", "column"),
        Skipped("a.parquet:2", "empty"),
        Document("a.parquet:3", "é"),
    ]


@pytest.mark.parametrize(
    "kind",
    [pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_every_kind_of_text_column_is_read(tmp_path: Path, kind: Any) -> None:
    pq.write_table(pa.table({"body": pa.array(["one", "two"]).cast(kind)}), tmp_path / "a.parquet")
    assert read(files(tmp_path, column="body")) == [Document("a.parquet:0", "one"), Document("a.parquet:1", "two")]


def test_bytes_that_are_not_utf8_are_skipped_in_parquet_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([b"\xff", b"ok"], pa.binary())}), tmp_path / "a.parquet")
    assert read(files(tmp_path)) == [Skipped("a.parquet:0", "encoding"), Document("a.parquet:1", "ok")]


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"\xff", "encoding"), ("é".encode("utf-16"), "encoding"), (b"", "empty"), (b" \n\t ", "empty")],
)
def test_a_text_file_without_text_is_skipped(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert read(files(tmp_path)) == [Skipped("a.txt", why)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": "a', "record"),
        (b'{"text": "a"} x', "record"),
        (b'["text"]', "record"),
        (b'"text"', "record"),
        (b"\xef\xbb\xbf{}", "record"),
        (b"[" * 100_000, "record"),
        (b'{"id": 1}', "column"),
        (b'{"text": null}', "column"),
        (b'{"text": ["a"]}', "column"),
        (b'{"text": ""}', "empty"),
        (b'{"text": " \\n"}', "empty"),
        (b'{"text": "\xff"}', "encoding"),
        (b'{"text": "\\ud800 half"}', "encoding"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_line_without_a_text_is_skipped_and_the_next_one_is_read(tmp_path: Path, line: bytes, why: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl({"text": "first"}) + line + b"\n" + jsonl({"text": "last"}))
    first, skipped, last = read(files(tmp_path))
    assert skipped == Skipped("a.jsonl:18", why)  # type: ignore[arg-type]
    assert first == Document("a.jsonl:0", "first")
    assert last == Document(f"a.jsonl:{19 + len(line)}", "last")


def test_blank_lines_and_a_byte_order_mark_and_a_missing_last_newline_are_no_matter(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n  \n{"text": "two"}')
    assert read(files(tmp_path)) == [Document("a.jsonl:0", "one"), Document("a.jsonl:25", "two")]


def test_pairs_of_surrogates_are_whole_characters(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\\ud83d\\ude00"}')
    assert read(files(tmp_path)) == [Document("a.jsonl:0", "\U0001f600")]


texts = st.text(max_size=30)
junk = st.sampled_from([b"", b"{", b" ", b"\xff", b'{"text": 1}'])
content = st.lists(st.one_of(texts.map(lambda text: jsonl({"text": text})[:-1]), junk), max_size=20).map(b"\n".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content, st.integers(1, 70), st.sampled_from([b"", b"\n"]))
def test_a_jsonl_file_reads_the_same_however_it_is_cut(tmp_path: Path, lines: bytes, size: int, end: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl({"text": "x"}) + lines + end)
    cut = files(tmp_path, part_size=size)
    whole = read(files(tmp_path))
    assert read(cut) == whole
    assert len({item.key for item in whole}) == len(whole)
    assert sum(part.size for part in cut.parts()) == (tmp_path / "a.jsonl").stat().st_size


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=8), max_size=12), st.integers(0, 5))
def test_lines_do_not_depend_on_the_blocks(cut: list[bytes], start: int) -> None:
    whole = b"".join(cut).split(b"\n")
    found = list(lines(cut, start, Path("x")))
    expected = whole[:-1] if whole[-1] == b"" else whole
    assert [line for _, line in found] == expected
    assert all(b"".join(cut)[offset - start :].startswith(line) for offset, line in found)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        json_values.map(lambda value: json.dumps(value).encode()),
        st.text('{}[]":,\\u0dn19e.-+ \ttNa\x01').map(str.encode),
    )
)
def test_the_fast_parser_takes_what_json_takes_and_nothing_else(line: bytes) -> None:
    def outcome(parse: Callable[[bytes], Any]) -> object:
        try:
            return repr(parse(line))
        except (ValueError, RecursionError):
            return "refused"

    assert outcome(parser()) == outcome(lambda line: json.loads(line.decode()))


@pytest.mark.parametrize("part_size", [1, 100, 10**9])
def test_a_parquet_file_reads_the_same_however_it_is_cut(tmp_path: Path, part_size: int) -> None:
    table = pa.table({"text": [f"document {n}" for n in range(50)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    origin = files(tmp_path, part_size=part_size)
    assert len(origin.parts()) == {1: 8, 10**9: 1}.get(part_size, len(origin.parts()))
    assert read(origin) == [Document(f"a.parquet:{n}", f"document {n}") for n in range(50)]


def test_many_small_texts_share_a_part(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text("x" * 10)
    origin = files(tmp_path, part_size=50)
    assert [part.size for part in origin.parts()] == [50] * 4
    assert keys(origin) == [f"{number:02}.txt" for number in range(20)]
    assert origin.parts()[0].name == "00.txt and 4 more"


def test_a_pattern_goes_through_folders_and_keys_begin_below_its_fixed_part(tmp_path: Path) -> None:
    write(tmp_path, web__b__x_txt="1", web__a_txt="2", web__b__y_md="3", other_txt="4")
    assert keys(files(tmp_path / "web/**/*.txt")) == ["a.txt", "b/x.txt"]
    assert keys(files(tmp_path / "web/*/*")) == ["b/x.txt", "b/y.md"]
    assert keys(files(tmp_path / "web/b/x.txt")) == ["x.txt"]


def test_a_folder_means_the_files_that_can_be_read_unless_a_format_is_given(tmp_path: Path) -> None:
    write(tmp_path, a_txt="1", README_md="2", _git__x_txt="3", b__c_py="4")
    assert keys(files(tmp_path)) == ["a.txt"]
    assert keys(files(tmp_path, format="text")) == ["README.md", "a.txt", "b/c.py"]


def test_a_file_that_is_reached_twice_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, a_txt="1", b_txt="2")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    assert keys(files(tmp_path / "*.txt", tmp_path / "a.txt", tmp_path)) == ["a.txt", "b.txt"]


def test_files_of_one_name_get_longer_keys(tmp_path: Path) -> None:
    write(tmp_path, a__x_txt="1", b__x_txt="2")
    assert keys(files(tmp_path / "a/x.txt", tmp_path / "b/x.txt")) == ["a/x.txt", "b/x.txt"]


def test_a_moved_corpus_keeps_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, here__x_txt="1")
    (tmp_path / "here").rename(tmp_path / "the[re")
    monkeypatch.chdir(tmp_path / "the[re")
    assert keys(files("*.txt")) == ["x.txt"] == keys(files("x.txt")) == keys(files("."))


@pytest.mark.parametrize(
    "ending", ["jsonl", "ndjson", "json-lines", "jsonlines", "json", "JSONL", "json.gz", "jsonl.zst"]
)
def test_endings_of_json_lines_are_known(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    COMPRESSED.get(path.suffix, COMPRESSED[""])(path, jsonl({"text": "one"}))
    assert read(files(path)) == [Document(f"a.{ending}:0", "one")]


def test_several_gzip_members_or_zstd_frames_are_one_text(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one ") + gzip.compress(b"") + gzip.compress(b"two") + b"\0" * 9)
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    frames = [zstandard.compress(b"one "), skippable, zstandard.compress(b""), zstandard.compress(b"two")]
    (tmp_path / "a.zst").write_bytes(b"".join(frames))
    assert [b"".join(blocks(tmp_path / name)) for name in ("a.gz", "a.zst")] == [b"one two"] * 2


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_large_compressed_files_come_in_small_blocks(tmp_path: Path, ending: str) -> None:
    text = os.urandom(3_000_000).hex().encode()
    COMPRESSED[ending](tmp_path / f"a{ending}", text)
    parts = list(blocks(tmp_path / f"a{ending}"))
    assert b"".join(parts) == text and max(map(len, parts)) < 2_000_000


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "junk", "changed"])
def test_a_damaged_compressed_file_is_refused(tmp_path: Path, ending: str, damage: str) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    COMPRESSED[ending](path, jsonl(*({"text": f"document {n * n}"} for n in range(2000))))
    content = path.read_bytes()
    damaged = {"cut": content[:-5], "junk": content + b"junk", "changed": content[:300] + bytes(200) + content[500:]}
    path.write_bytes(damaged[damage])
    with pytest.raises(DataRefused, match=r"a\.jsonl.* is damaged or cut .*download it again"):
        read(files(path))


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "pages"])
def test_a_damaged_parquet_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"document {n * n}" for n in range(500)]}), path, use_dictionary=False)
    content = path.read_bytes()
    pages = b"PAR1" + b"\xff" * 400 + content[404:]
    path.write_bytes({"empty": b"", "cut": content[:-9], "text": b"hello, world" * 9, "pages": pages}[damage])
    with pytest.raises(DataRefused, match=r"a\.parquet is no whole parquet file"):
        read(files(path))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match=r"cannot be read \(.*directory.*make it readable"):
        list(TextPart((("x", tmp_path),), 0).read())
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataRefused, match=r"gone.txt cannot be read"):
        read(files(tmp_path))


def test_a_column_that_is_nowhere_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl({"body": "x", "id": 1}, {"title": "y", "text": None}, {"text": 3}))
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataRefused, match=r"no column content in its first 3 records: choose one of body, title"):
        read(files(tmp_path / "a.jsonl", column="content"))
    with pytest.raises(DataRefused, match=r"no text in column text \(it holds int\): choose one of body, title"):
        read(files(tmp_path / "a.jsonl"))
    with pytest.raises(DataRefused, match=r"has no column text: choose one of its columns with text \(body\)"):
        files(tmp_path / "a.parquet").parts()
    with pytest.raises(DataRefused, match=r"has column id with int64, not text: choose .*\(body\)"):
        files(tmp_path / "a.parquet", column="id").parts()


@pytest.mark.parametrize("part_size", [20, 10**6])
def test_one_record_with_the_column_is_enough_wherever_the_file_is_cut(tmp_path: Path, part_size: int) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(*[{"id": n} for n in range(30)], {"text": "x"}))
    whys = [getattr(item, "why", "read") for item in read(files(tmp_path, part_size=part_size))]
    assert whys == ["column"] * 30 + ["read"]


def test_what_is_not_json_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x"}], indent=1))
    with pytest.raises(DataRefused, match=r"not JSON lines: none of its first 5 lines .*jq -c"):
        read(files(tmp_path))


def test_an_endless_line_is_refused() -> None:
    with pytest.raises(DataRefused, match=r"big.json has a line of more than 10 bytes.*jq -c"):
        list(lines([b"a\n", b"123456", b"789012"], 0, Path("big.json"), longest=10))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("none/*.txt", {}, r"none/\*.txt matches no file .*check the path"),
        ("none.txt", {}, "none.txt matches no file"),
        ("s3://bucket/x", {}, "is not on this machine"),
        ("empty", {}, r"the folder .*empty holds no text \(.txt\), jsonl or parquet"),
        ("a.pdf", {}, "a.pdf ends in .pdf, so it is no text"),
        ("a.csv.gz", {}, "a.csv.gz ends in .csv"),
        ("a.parquet.gz", {}, "compressed as a whole"),
    ],
)
def test_inputs_that_cannot_be_are_refused(tmp_path: Path, name: str, settings: dict[str, Any], words: str) -> None:
    (tmp_path / "empty").mkdir()
    for file in ("a.pdf", "a.csv.gz", "a.parquet.gz"):
        (tmp_path / file).write_bytes(b"x")
    with pytest.raises(DataRefused, match=words):
        files(name if "://" in name else tmp_path / name, **settings).parts()
    with pytest.raises(DataRefused, match="there are no inputs"):
        files().parts()


def test_the_fingerprint_follows_the_files_and_not_their_cut(tmp_path: Path) -> None:
    write(tmp_path, a_txt="1", b_txt="2")
    before = files(tmp_path).fingerprint()
    assert files(tmp_path, part_size=1).fingerprint() == before == files(tmp_path / "*.txt").fingerprint()
    assert files(tmp_path, column="body").fingerprint() != before
    assert files(tmp_path / "a.txt").fingerprint() != before
    formats: list[Literal["text", "jsonl"]] = ["text", "jsonl"]
    assert len({files(tmp_path, format=format).fingerprint() for format in formats}) == 2
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert files(tmp_path).fingerprint() != before


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, ["0"]), (3, ["0", "1", "3"]), (9, ["0", "1", "3"])])
def test_the_first_documents_are_counted_without_what_is_skipped(
    tmp_path: Path, count: int, expected: list[str]
) -> None:
    for name, text in {"0": "x", "1": "y", "2": " ", "3": "z"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    first = FirstDocuments(files(tmp_path, part_size=1), count)
    assert [item.key[0] for item in read(first) if isinstance(item, Document)] == expected
    assert len(first.parts()) == 1
    assert first.fingerprint() != FirstDocuments(files(tmp_path), count + 1).fingerprint()


def test_zlib_alone_is_no_gzip(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(zlib.compress(b"x" * 100))
    with pytest.raises(DataRefused, match="is damaged or cut"):
        read(files(tmp_path))


def test_what_can_be_read_is_read_before_what_cannot_be_is_told(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(name.encode() * 50))
    broken = tmp_path / "b.txt.gz"
    broken.write_bytes(broken.read_bytes()[:-9])
    (part,) = files(tmp_path).parts()
    found = []
    with pytest.raises(DataRefused, match=r"b.txt.gz"):
        for item in part.read():
            found.append(item)
    assert [item.key for item in found] == ["a.txt.gz", "c.txt.gz"]


def test_a_damaged_parquet_file_is_a_part_that_says_so(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "good.parquet")
    (tmp_path / "bad.parquet").write_bytes((tmp_path / "good.parquet").read_bytes()[:-20])
    bad, good = files(tmp_path).parts()
    assert [item.key for item in good.read()] == ["good.parquet:0", "good.parquet:1"]
    with pytest.raises(DataRefused, match=r"bad.parquet is no whole parquet file"):
        list(bad.read())
