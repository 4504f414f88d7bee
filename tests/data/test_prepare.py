"""Data is ready once, whole, and recognised again."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from data.config import DataConfig, SourceConfig
from data.indexed import IndexedCorpus
from data.prepare import ReadyData, ready
from data.stdlib import collect, shuffled, split
from data.tokenizer import Tokenizer, train_sentencepiece
from data.writer import CorpusWriter
from errors import DataRefused

REPOSITORY = Path(__file__).parents[2]


def config(cache: Path, **changes: Any) -> DataConfig:
    small = DataConfig(corpus="stdlib", cache=str(cache), vocab_size=320, held_out=0.2)
    return dataclasses.replace(small, **changes)


def quiet(line: str) -> None:
    """Says nothing."""


def prepare(cache: Path, library: Path, **changes: Any) -> ReadyData:
    return ready(config(cache, **changes), quiet, root=library)


def in_process(cache: Path, library: Path, before: str = "") -> subprocess.Popen[str]:
    """The same preparation in a process of its own; `before` runs in it first."""
    code = (
        f"from pathlib import Path\nfrom data.config import DataConfig\nimport data.prepare\n{before}\n"
        f"data.prepare.ready(DataConfig(corpus='stdlib', cache={str(cache)!r}, vocab_size=320, "
        f"held_out=0.2), print, root=Path({str(library)!r}))"
    )
    return subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_prepared_corpus_holds_every_document_once_split_and_shuffled(tmp_path: Path, fake_library: Path) -> None:
    data = prepare(tmp_path / "cache", fake_library)
    assert data.tokenizer is not None and data.source.validation is not None
    tokenizer = Tokenizer(data.tokenizer)
    texts: dict[str, list[str]] = {}
    for prefix in (data.source.train, data.source.validation):
        corpus = IndexedCorpus(prefix)
        ids = corpus.read(0, corpus.tokens).tolist()
        starts = [0, *corpus.borders(0, corpus.tokens).tolist(), corpus.tokens]
        documents = [ids[start:stop] for start, stop in itertools.pairwise(starts)]
        assert all(document[-1] == tokenizer.eod for document in documents)
        texts[prefix.name] = [tokenizer.decode(document) for document in documents]
    training, validation = split(collect(fake_library), held_out=0.2)
    assert texts["train"] == [document.text for document in shuffled(training, seed=0)]
    assert texts["validation"] == [document.text for document in validation]


def test_the_report_tells_vocabulary_entropy_and_bytes(tmp_path: Path, fake_library: Path) -> None:
    data = prepare(tmp_path / "cache", fake_library)
    told = json.loads(Path(f"{data.source.train}.json").read_text())
    assert data.vocab_size == told["vocab_size"] == 320
    assert data.bytes_per_token == told["bytes_of_text"] / told["tokens"]
    assert 2 < data.unigram_entropy < 6


def test_preparing_twice_gives_the_same_files(tmp_path: Path, fake_library: Path) -> None:
    first, second = (prepare(tmp_path / name, fake_library) for name in "ab")
    assert first.fingerprint == second.fingerprint
    assert content(first.source.train.parent) == content(second.source.train.parent)
    assert len(content(first.source.train.parent)) == 7


def test_a_second_call_finds_what_is_there(tmp_path: Path, fake_library: Path) -> None:
    first = prepare(tmp_path, fake_library)
    before = first.source.train.parent.stat().st_mtime_ns
    lines: list[str] = []
    assert ready(config(tmp_path), lines.append, root=fake_library) == first
    assert lines == [] and first.source.train.parent.stat().st_mtime_ns == before


@pytest.mark.parametrize("change", [{"vocab_size": 330}, {"held_out": 0.3}, {"shuffle_seed": 1}])
def test_a_setting_that_matters_changes_the_fingerprint(
    tmp_path: Path, fake_library: Path, change: dict[str, Any]
) -> None:
    changed = prepare(tmp_path, fake_library, **change)
    assert changed.fingerprint != prepare(tmp_path, fake_library).fingerprint


@pytest.mark.parametrize("change", [{"prefetch": 5}, {"document_mask": False}, {"name": "other"}])
def test_a_setting_that_does_not_matter_keeps_it(tmp_path: Path, fake_library: Path, change: dict[str, Any]) -> None:
    changed = prepare(tmp_path, fake_library, **change)
    assert changed.fingerprint == prepare(tmp_path, fake_library).fingerprint


def test_a_changed_document_changes_the_fingerprint(tmp_path: Path, fake_library: Path) -> None:
    before = prepare(tmp_path, fake_library).fingerprint
    (fake_library / "package0" / "module0.py").write_text("x = 1\n")
    assert prepare(tmp_path, fake_library).fingerprint != before


def test_without_held_out_documents_there_is_no_validation(tmp_path: Path, fake_library: Path) -> None:
    assert prepare(tmp_path, fake_library, held_out=0.0).source.validation is None


def test_of_processes_at_once_one_prepares_and_the_others_wait(tmp_path: Path, fake_library: Path) -> None:
    slow = (
        "import time; train = data.prepare.train_sentencepiece\n"
        "data.prepare.train_sentencepiece = lambda *given: (time.sleep(0.5), train(*given))[1]"
    )
    processes = [in_process(tmp_path / "cache", fake_library, slow) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("prepared" in output for output in outputs) == 1
    assert all("prepared" in output or "waiting" in output or not output for output in outputs)
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_a_killed_process_leaves_nothing_that_is_trusted_or_in_the_way(tmp_path: Path, fake_library: Path) -> None:
    cache = tmp_path / "cache"
    stuck = "import time\ndata.prepare._encode = lambda *given: time.sleep(600)"
    holder = in_process(cache, fake_library, stuck)
    deadline = time.monotonic() + 60
    while not list(cache.glob(".*.tmp/tokenizer.model")):
        assert time.monotonic() < deadline and holder.poll() is None
        time.sleep(0.02)
    waiting = in_process(cache, fake_library)
    assert waiting.stdout is not None
    assert f"process {holder.pid}" in waiting.stdout.readline()  # says whom it waits for
    assert [path for path in cache.iterdir() if not path.name.startswith(".")] == []
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    output, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and "prepared" in output
    assert list(cache.glob(".*.tmp")) == []
    prepare(cache, fake_library)


def test_a_full_disk_is_refused_and_leaves_nothing_behind(
    tmp_path: Path, fake_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataRefused, match=r"cannot be written.*No space left.*data.cache"):
        prepare(tmp_path / "cache", fake_library)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_where_the_file_system_has_no_locks_the_process_prepares_and_says_so(
    tmp_path: Path, fake_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    lines: list[str] = []
    data = ready(config(tmp_path), lines.append, root=fake_library)
    assert IndexedCorpus(data.source.train).documents > 10
    assert any("has no locks" in line for line in lines)


def test_without_locks_a_process_that_was_overtaken_uses_the_others_work(
    tmp_path: Path, fake_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[Path] = []

    def overtaken(*given: Any) -> Tokenizer:
        monkeypatch.setattr("data.prepare.train_sentencepiece", train_sentencepiece)
        finished.append(prepare(tmp_path, fake_library).source.train.parent)
        return train_sentencepiece(*given)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr("data.prepare.train_sentencepiece", overtaken)
    assert prepare(tmp_path, fake_library).source.train.parent == finished[0]
    assert list(tmp_path.glob(".*.tmp")) == []


def test_a_cache_that_cannot_be_made_is_refused(tmp_path: Path, fake_library: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataRefused, match=r"data cache .*file/cache cannot be written"):
        prepare(tmp_path / "file" / "cache", fake_library)


@pytest.mark.parametrize("name", ["train.bin", "train.json", "validation.idx", "tokenizer.model"])
def test_a_prepared_folder_that_lost_a_file_is_refused_with_the_way_out(
    tmp_path: Path, fake_library: Path, name: str
) -> None:
    folder = prepare(tmp_path, fake_library).source.train.parent
    (folder / name).unlink()
    with pytest.raises(DataRefused, match=f"{name}.*delete {folder} and start again"):
        prepare(tmp_path, fake_library)


def foreign(prefix: Path, documents: list[list[int]], described: bool = False) -> SourceConfig:
    with CorpusWriter(prefix, "uint16") as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish(tokenizer="f00d" * 16, vocab_size=600, bytes_of_text=40)
    if not described:
        Path(f"{prefix}.json").unlink()
    return SourceConfig("web", str(prefix))


def test_a_corpus_made_elsewhere_takes_the_models_vocabulary(tmp_path: Path) -> None:
    source = foreign(tmp_path / "web", [[1, 2], [1, 2, 1, 2]])
    data = ready(DataConfig(sources=(source,)), quiet, model_vocab=500)
    assert (data.vocab_size, data.tokenizer, data.bytes_per_token) == (500, None, None)
    assert data.unigram_entropy == pytest.approx(0.6931, abs=1e-4)
    assert (data.source.name, data.source.train, data.source.validation) == ("web", tmp_path / "web", None)


def test_a_corpus_with_a_json_tells_its_own_vocabulary(tmp_path: Path) -> None:
    source = foreign(tmp_path / "web", [[1, 2], [3]], described=True)
    data = ready(DataConfig(sources=(source,)), quiet)
    assert (data.vocab_size, data.bytes_per_token) == (600, 40 / 3)


def test_a_changed_corpus_under_the_same_name_has_another_fingerprint(tmp_path: Path) -> None:
    prints = set()
    for last in (2, 3):
        source = foreign(tmp_path / "web", [[1, last]])
        prints.add(ready(DataConfig(sources=(source,)), quiet, model_vocab=500).fingerprint)
    assert len(prints) == 2


def refusals(folder: Path, cache: Path, library: Path) -> dict[str, tuple[DataConfig, int | None, str]]:
    source = foreign(folder / "web", [[1, 2, 650]])
    described = foreign(folder / "code", [[1, 2]], described=True)
    missing = SourceConfig("web", str(folder / "none"))
    tokenizer = str(prepare(cache, library).tokenizer)
    both = dataclasses.replace(source, validation=missing.prefix)
    return {
        "nothing": (DataConfig(), None, "there is no data: set data.corpus=stdlib"),
        "both": (DataConfig(corpus="stdlib", sources=(source,)), None, "are both set"),
        "two sources": (DataConfig(sources=(source, described)), 700, "mixtures of several sources are not"),
        "unknown corpus": (DataConfig(corpus="news"), None, "news is unknown: it must be one of stdlib"),
        "own tokenizer": (DataConfig(corpus="stdlib", tokenizer="x"), None, "trains its own"),
        "no vocabulary": (DataConfig(sources=(source,)), None, "vocabulary of .*web is unknown"),
        "id outside": (DataConfig(sources=(source,)), 600, "position 2 is 650"),
        "missing": (DataConfig(sources=(missing,)), 600, "none.idx does not exist"),
        "missing validation": (DataConfig(sources=(both,)), 700, "none.idx does not exist"),
        "other tokenizer": (DataConfig(sources=(described,), tokenizer=tokenizer), None, "ids would mean"),
        "model too small": (DataConfig(sources=(described,)), 599, "has 600 entries, but the model only 599"),
    }


def test_what_cannot_work_is_refused_in_words(tmp_path: Path, fake_library: Path) -> None:
    for settings, model_vocab, message in refusals(tmp_path, tmp_path / "cache", fake_library).values():
        with pytest.raises(DataRefused, match=message):
            ready(settings, quiet, model_vocab=model_vocab)


def test_a_json_of_other_files_is_refused(tmp_path: Path) -> None:
    source = foreign(tmp_path / "web", [[1, 2]], described=True)
    described = (tmp_path / "web.json").read_text()
    foreign(tmp_path / "web", [[1, 2, 3]])
    (tmp_path / "web.json").write_text(described)
    with pytest.raises(DataRefused, match=r"web.json tells of .*belongs to other files"):
        ready(DataConfig(sources=(source,)), quiet)
