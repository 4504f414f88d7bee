"""Hugging Face datasets in local folders and in the library's cache; the hub is never reached."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from data.texts.dataset_origin import DatasetOrigin
from data.texts.dataset_words import translated
from data.texts.origin import Document, Skipped
from errors import DataRefused

COMMIT = "c0ffee" + "0" * 34


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The library without a hub, with a cache of the test's own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


def write_jsonl(path: Path, texts: list[Any]) -> None:
    path.write_text("".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(texts)))


def write_parquet(path: Path, texts: list[Any]) -> None:
    pq.write_table(pa.table({"text": texts, "id": list(range(len(texts)))}), path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset of JSON lines with two splits."""
    root = tmp_path / "corpus"
    root.mkdir()
    write_jsonl(root / "train.jsonl", [f"document {n}" for n in range(10)])
    write_jsonl(root / "test.jsonl", ["held out"])
    return root


def read(origin: DatasetOrigin) -> list[Document | Skipped]:
    """Every item of every part, after a journey to another process."""
    return [item for part in pickle.loads(pickle.dumps(list(origin.parts()))) for item in part.read()]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_folder_of_data_files_is_read(tmp_path: Path, write: Callable[..., None], streaming: bool) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    write(root / f"train.{write.__name__[6:]}", ["one", None, " ", "two"])
    prefix = "train/0" if streaming else "train"
    assert read(DatasetOrigin(str(root), streaming=streaming)) == [
        Document(f"{prefix}:0", "one"),
        Skipped(f"{prefix}:1", "column"),
        Skipped(f"{prefix}:2", "empty"),
        Document(f"{prefix}:3", "two"),
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_file_is_one_document_and_not_one_a_line(tmp_path: Path, streaming: bool) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    (root / "a.txt").write_text("one\n\ntwo\n")
    (root / "b.txt").write_text("three")
    texts = [item.text for item in read(DatasetOrigin(str(root), streaming=streaming)) if isinstance(item, Document)]
    assert texts == ["one\n\ntwo\n", "three"]


@pytest.mark.parametrize("part_rows", [1, 3, 10, 100])
def test_rows_are_the_same_however_they_are_cut(folder: Path, part_rows: int) -> None:
    origin = DatasetOrigin(str(folder), part_rows=part_rows)
    assert read(origin) == [Document(f"train:{n}", f"document {n}") for n in range(10)]
    assert len(origin.parts()) == -(-10 // part_rows)
    assert all(part.size > 0 for part in origin.parts())


@pytest.mark.parametrize("split", ["train", "test"])
def test_what_save_to_disk_wrote_is_read_in_all_its_files(offline: Any, tmp_path: Path, split: str) -> None:
    texts = {"train": [f"document {n}" for n in range(10)], "test": ["held out"]}
    saved = offline.DatasetDict({name: offline.Dataset.from_dict({"text": t}) for name, t in texts.items()})
    saved.save_to_disk(str(tmp_path / "saved"), num_shards={"train": 3, "test": 1})
    origin = DatasetOrigin(str(tmp_path / "saved"), split=split, part_rows=2)
    assert read(origin) == [Document(f"{split}:{n}", text) for n, text in enumerate(texts[split])]
    assert len(origin.fingerprint()) == 64
    saved["train"].save_to_disk(str(tmp_path / "one"))
    assert len(read(DatasetOrigin(str(tmp_path / "one"), streaming=True))) == 10
    with pytest.raises(DataRefused, match="no split dev: choose one of train, test"):
        DatasetOrigin(str(tmp_path / "saved"), split="dev").parts()


def test_a_stream_has_a_part_a_shard(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(3):
        write_parquet(root / f"train-{number}.parquet", [f"{number} {row}" for row in range(600)])
    origin = DatasetOrigin(str(root), streaming=True)
    assert [part.name for part in origin.parts()] == ["train/0", "train/1", "train/2"]
    assert read(origin) == [
        Document(f"train/{number}:{row}", f"{number} {row}") for number in range(3) for row in range(600)
    ]


def test_data_files_choose_the_files(folder: Path) -> None:
    assert read(DatasetOrigin(str(folder), data_files="te*.jsonl")) == [Document("train:0", "held out")]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_first_documents_are_read_alone(folder: Path, streaming: bool) -> None:
    origin = DatasetOrigin(str(folder), streaming=streaming, max_documents=3, part_rows=2)
    assert [item.text for item in read(origin) if isinstance(item, Document)] == [f"document {n}" for n in range(3)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "split": ({"split": "dev"}, "has no split dev: choose one of train, test"),
    "slice": ({"split": "train[:10%]"}, "has no split train.*choose one of"),
    "subset": ({"subset": "en"}, r"has no subset en .*\['default'\].*set subset"),
    "column": ({"column": "body"}, r"has no column body: choose one of its columns with text \(text\)"),
    "type": ({"column": "id"}, "has column id with int64, not text"),
    "files": ({"data_files": "no*"}, "has no files to read"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_there_is_refused_with_what_is(folder: Path, case: str, streaming: bool) -> None:
    settings, words = REFUSED[case]
    with pytest.raises(DataRefused, match=words):
        read(DatasetOrigin(str(folder), streaming=streaming, **settings))


def test_folders_without_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match="nowhere is no folder"):
        DatasetOrigin(str(tmp_path / "nowhere")).parts()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataRefused, match="has no files to read"):
        DatasetOrigin(str(tmp_path / "empty")).parts()


@pytest.mark.parametrize("streaming", [False, True])
def test_broken_records_are_refused_with_the_dataset_named(folder: Path, streaming: bool) -> None:
    (folder / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataRefused, match=r"the dataset .*corpus cannot be read"):
        read(DatasetOrigin(str(folder), streaming=streaming))


@pytest.mark.parametrize("ask", [DatasetOrigin.parts, DatasetOrigin.fingerprint])
def test_without_a_network_the_refusal_says_what_to_do(ask: Callable[[DatasetOrigin], object]) -> None:
    with pytest.raises(DataRefused, match=r"allenai/c4 cannot be reached .*data.prepare.*HF_HOME.*local folder"):
        ask(DatasetOrigin("allenai/c4", "en"))


def test_without_the_library_the_refusal_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataRefused, match="pip install datasets"):
        DatasetOrigin("allenai/c4").parts()


@pytest.fixture
def cached(folder: Path, tmp_path: Path) -> str:
    """A dataset of the hub that was downloaded before: a copy in the library's cache."""
    prepared = Path(DatasetOrigin(str(folder)).parts()[0].path).parent  # type: ignore[attr-defined]
    place = tmp_path / "cache" / "someone___some_corpus" / "default" / "0.0.0" / COMMIT
    shutil.copytree(prepared, place)
    for file in place.glob("corpus-*"):
        file.rename(file.with_name(file.name.replace("corpus-", "some_corpus-")))
    shutil.rmtree(prepared)
    return "someone/some_corpus"


def test_a_cached_copy_is_read_without_the_hub_and_known_by_its_commit(cached: str) -> None:
    assert len(read(DatasetOrigin(cached))) == 10
    newest = DatasetOrigin(cached).fingerprint()
    assert (
        DatasetOrigin(cached, revision=COMMIT).fingerprint()
        == newest
        == DatasetOrigin(cached, part_rows=1).fingerprint()
    )
    assert DatasetOrigin(cached, split="test").fingerprint() != newest


def test_a_cached_copy_of_another_commit_is_refused(cached: str) -> None:
    with pytest.raises(DataRefused, match=rf"cached copy of {cached} is commit {COMMIT}.*revision v2"):
        DatasetOrigin(cached, revision="v2").parts()


def test_a_subset_that_is_not_cached_is_refused(cached: str) -> None:
    with pytest.raises(DataRefused, match=r"no copy of .* with subset fr is in the cache .*\['default'\]"):
        DatasetOrigin(cached, "fr").parts()


def test_a_cut_arrow_file_is_refused(folder: Path) -> None:
    part = DatasetOrigin(str(folder)).parts()[0]
    path = Path(part.path)  # type: ignore[attr-defined]
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataRefused, match=r"corpus-train.arrow is no whole arrow file .*delete it"):
        list(part.read())


def test_the_fingerprint_follows_the_files_and_the_settings(folder: Path) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"split": "test"},
        {"column": "id"},
        {"streaming": True},
        {"max_documents": 3},
        {"data_files": "*.jsonl"},
    ]
    before = [DatasetOrigin(str(folder), **setting).fingerprint() for setting in settings]
    assert len(set(before)) == len(before)
    assert DatasetOrigin(str(folder), part_rows=3, workers=2).fingerprint() == before[0]
    write_jsonl(folder / "train.jsonl", ["changed"])
    assert DatasetOrigin(str(folder)).fingerprint() != before[0]
    assert read(DatasetOrigin(str(folder))) == [Document("train:0", "changed")]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("Dataset scripts are no longer supported, but found x.py"),
            "code of its own, which is never run",
        ),
        (PermissionError(13, "Permission denied", "/cache"), "HF_HOME to a folder that can be written"),
        (OSError(28, "No space left on device"), "No space left.*make room"),
        (ValueError("Config name is missing.\nPlease pick one: ['a', 'b']"), r"several subsets.*\['a', 'b'\]"),
        (LookupError("Dataset 'x' is a gated dataset on the Hub."), "accept its terms.*hf auth login"),
        (TimeoutError(), "x/y cannot be reached"),
        (KeyError("odd"), "x/y cannot be read .KeyError: 'odd'"),
    ],
)
def test_what_the_library_raises_comes_in_words(error: Exception, words: str) -> None:
    with pytest.raises(DataRefused, match=words), translated("x/y", "en"):
        raise error
