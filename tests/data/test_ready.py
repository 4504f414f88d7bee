"""Data is ready once, whole, and recognised again."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from data.config import DataConfig, SourceConfig
from data.corpus.indexed import IndexedCorpus
from data.corpus.writer import CorpusWriter
from data.ready import ReadyData, ready
from data.texts.documents import documents_of
from data.texts.stdlib import library
from data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece
from errors import DataRefused

REPOSITORY = Path(__file__).parents[2]
LIBRARY = SourceConfig("library", corpus="stdlib")


def config(cache: Path, **changes: Any) -> DataConfig:
    small = DataConfig(sources=(LIBRARY,), cache=str(cache), vocab_size=320, held_out=0.2, workers=1)
    return dataclasses.replace(small, **changes)


def quiet(line: str) -> None:
    """Says nothing."""


def prepare(cache: Path, library: Path, **changes: Any) -> ReadyData:
    return ready(config(cache, **changes), quiet, root=library)


def in_process(cache: Path, library: Path, before: str = "") -> subprocess.Popen[str]:
    """The same preparation in a process of its own; `before` runs in it first."""
    code = (
        f"from pathlib import Path\nfrom data.config import DataConfig, SourceConfig\nimport data.ready\n{before}\n"
        f"data.ready.ready(DataConfig(sources=(SourceConfig('library', corpus='stdlib'),), cache={str(cache)!r}, "
        f"vocab_size=320, held_out=0.2, workers=1), print, root=Path({str(library)!r}))"
    )
    return subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)


def content(folder: Path) -> dict[str, bytes]:
    """Its files, but for the report with its seconds and the lock."""
    files = (path for path in folder.iterdir() if not path.name.endswith((".report.json", ".lock")))
    return {path.name: path.read_bytes() for path in files}


def folder_of(data: ReadyData) -> Path:
    """Where the corpus of the one source lies."""
    return Path(data.sources[0].train).parent


def texts_of(data: ReadyData, prefix: str) -> list[str]:
    corpus, tokenizer = IndexedCorpus(prefix), load_tokenizer(data.tokenizer or "")
    text = tokenizer.decode(corpus.read(0, corpus.tokens).tolist())
    starts = [0, *corpus.borders(0, corpus.tokens).tolist(), corpus.tokens]
    parts = [corpus.read(a, b).tolist() for a, b in itertools.pairwise(starts)]
    assert all(part[-1] == tokenizer.eod for part in parts) and text
    return [tokenizer.decode(part) for part in parts]


def test_the_prepared_corpus_holds_every_document_once_shuffled(tmp_path: Path, fake_library: Path) -> None:
    data = prepare(tmp_path / "cache", fake_library)
    (source,) = data.sources
    training, held_out = texts_of(data, source.train), texts_of(data, source.validation or "")
    documents = [document.text for document in documents_of(library(fake_library))]
    assert sorted(training + held_out) == sorted(documents) and training != sorted(training)
    assert data.vocab_size == 320 and 2 < source.unigram_entropy < 6
    held_out_bytes = sum(len(text.encode()) for text in held_out)
    assert source.held_out_bytes_per_token == held_out_bytes / IndexedCorpus(source.validation or "").tokens


def test_preparing_twice_gives_the_same_files(tmp_path: Path, fake_library: Path) -> None:
    first, second = (prepare(tmp_path / name, fake_library) for name in "ab")
    assert first.fingerprint == second.fingerprint
    assert content(folder_of(first)) == content(folder_of(second))
    assert {path.suffix for path in folder_of(first).iterdir() if "." not in path.stem} == {".bin", ".idx", ".json"}


def test_a_second_call_finds_what_is_there(tmp_path: Path, fake_library: Path) -> None:
    first = prepare(tmp_path, fake_library)
    before = folder_of(first).stat().st_mtime_ns
    lines: list[str] = []
    assert ready(config(tmp_path), lines.append, root=fake_library) == first
    assert lines == [] and folder_of(first).stat().st_mtime_ns == before


def test_a_cache_that_can_only_be_read_serves_what_is_in_it(
    tmp_path: Path, fake_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, opened = prepare(tmp_path, fake_library), os.open

    def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", read_only)
    assert prepare(tmp_path, fake_library) == first


def test_two_sources_share_a_tokenizer_and_have_their_own_corpora(tmp_path: Path, fake_library: Path) -> None:
    """Text files as a source of their own, beside the library."""
    (tmp_path / "prose").mkdir()
    for number in range(12):
        (tmp_path / "prose" / f"{number}.txt").write_text(f"So wise a word, said {number} times over.\n" * 40)
    prose = SourceConfig("prose", input=str(tmp_path / "prose" / "*.txt"), max_documents=11)
    data = prepare(tmp_path / "cache", fake_library, sources=(LIBRARY, prose))
    assert [each.name for each in data.sources] == ["library", "prose"]
    written = sum(IndexedCorpus(p).documents for p in (data.sources[1].train, data.sources[1].validation or ""))
    assert written == 11
    assert len(list((tmp_path / "cache").glob("tokenizer-*"))) == 1


def test_a_given_tokenizer_makes_the_ids(tmp_path: Path, fake_library: Path) -> None:
    data = prepare(tmp_path, fake_library, tokenizer="bytes")
    assert (data.vocab_size, data.tokenizer, data.tokenizer_files()) == (257, "bytes", {})
    assert sorted(texts_of(data, data.sources[0].train))[0].startswith("def function_")
    assert list(tmp_path.glob("tokenizer-*")) == []


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
    assert prepare(tmp_path, fake_library, held_out=0.0).sources[0].validation is None


def test_of_processes_at_once_one_prepares_and_the_others_wait(tmp_path: Path, fake_library: Path) -> None:
    slow = (
        "import time; train = data.ready.train_sentencepiece\n"
        "data.ready.train_sentencepiece = lambda *given: (time.sleep(0.5), train(*given))[1]"
    )
    processes = [in_process(tmp_path / "cache", fake_library, slow) for _ in range(3)]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("\nprepared " in output for output in outputs) == 1
    assert sum("of text, 1 process" in output for output in outputs) == 1
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2  # tokenizer and corpus


def test_a_killed_process_leaves_nothing_that_is_trusted_or_in_the_way(tmp_path: Path, fake_library: Path) -> None:
    cache = tmp_path / "cache"
    stuck = "import time, sys\ndata.ready.train_sentencepiece = lambda *given: time.sleep(600)"
    holder = in_process(cache, fake_library, stuck)
    deadline = time.monotonic() + 60
    while not list(cache.glob(".*.tmp")):
        assert time.monotonic() < deadline and holder.poll() is None
        time.sleep(0.02)
    waiting = in_process(cache, fake_library)
    assert waiting.stdout is not None
    assert f"process {holder.pid}" in waiting.stdout.readline()  # says whom it waits for
    assert [path for path in cache.iterdir() if not path.name.startswith(".")] == []
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    output, _ = waiting.communicate(timeout=100)
    assert waiting.returncode == 0 and "prepared" in output
    assert list(cache.glob(".*.tmp")) == []


def test_a_full_disk_is_refused_and_leaves_nothing_behind(
    tmp_path: Path, fake_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataRefused, match=r"cannot be written.*No space left"):
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
    assert IndexedCorpus(data.sources[0].train).documents > 10
    assert any("has no locks" in line for line in lines)


def test_without_locks_a_process_that_was_overtaken_uses_the_others_work(
    tmp_path: Path, fake_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[str | None] = []

    def overtaken(*given: Any) -> Any:
        monkeypatch.setattr("data.ready.train_sentencepiece", train_sentencepiece)
        finished.append(prepare(tmp_path, fake_library).tokenizer)
        return train_sentencepiece(*given)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr("data.ready.train_sentencepiece", overtaken)
    assert prepare(tmp_path, fake_library).tokenizer == finished[0]
    assert list(tmp_path.glob(".*.tmp")) == []


def test_a_cache_that_cannot_be_made_is_refused(tmp_path: Path, fake_library: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataRefused, match=r"data cache .*file/cache cannot be written"):
        prepare(tmp_path / "file" / "cache", fake_library)


@pytest.mark.parametrize("name", ["train.bin", "train.json", "validation.idx", "train.report.json"])
def test_a_prepared_folder_that_lost_a_file_is_mended(tmp_path: Path, fake_library: Path, name: str) -> None:
    first = prepare(tmp_path, fake_library)
    before = content(folder_of(first))
    (folder_of(first) / name).unlink()
    assert prepare(tmp_path, fake_library) == first
    assert content(folder_of(first)) == before


def test_a_trained_tokenizer_that_was_damaged_is_made_again(tmp_path: Path, fake_library: Path) -> None:
    first = prepare(tmp_path, fake_library)
    path = Path(first.tokenizer or "")
    whole = path.read_bytes()
    path.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    assert prepare(tmp_path, fake_library) == first and path.read_bytes() == whole


def foreign(prefix: Path, documents: list[list[int]], described: bool = False, tokenizer: str = "f00d") -> SourceConfig:
    with CorpusWriter(prefix, "uint16") as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish(tokenizer=tokenizer * 16, vocab_size=600, bytes_of_text=40)
    if not described:
        Path(f"{prefix}.json").unlink()
    return SourceConfig("web", prefix=str(prefix))


def test_a_corpus_made_elsewhere_takes_the_models_vocabulary(tmp_path: Path) -> None:
    source = foreign(tmp_path / "web", [[1, 2], [1, 2, 1, 2]])
    data = ready(DataConfig(sources=(source,)), quiet, model_vocab=500)
    (found,) = data.sources
    assert (data.vocab_size, data.tokenizer, found.held_out_bytes_per_token) == (500, None, None)
    assert found.unigram_entropy == pytest.approx(0.6931, abs=1e-4)
    assert (found.name, found.train, found.validation) == ("web", str(tmp_path / "web"), None)


def test_a_corpus_with_a_json_tells_its_own_vocabulary(tmp_path: Path) -> None:
    source = foreign(tmp_path / "web", [[1, 2], [3]], described=True)
    both = dataclasses.replace(source, validation=source.prefix)
    data = ready(DataConfig(sources=(both,)), quiet)
    assert (data.vocab_size, data.sources[0].held_out_bytes_per_token) == (600, 40 / 3)


def test_many_prefixes_are_one_source_with_one_tokenizer(tmp_path: Path) -> None:
    for name, ids in (("web_0", [1, 2, 1]), ("web_1", [2, 2, 1])):
        foreign(tmp_path / name, [ids], described=True)
    source = SourceConfig("web", prefix=str(tmp_path / "web_*"), validation=str(tmp_path / "web_*"))
    (found,) = ready(DataConfig(sources=(source,)), quiet).sources
    assert found.held_out_bytes_per_token == 80 / 6
    assert found.unigram_entropy == pytest.approx(0.6931, abs=1e-4)
    foreign(tmp_path / "web_1", [[1]], described=True, tokenizer="beef")
    with pytest.raises(DataRefused, match=r"web_1 was made with another tokenizer than .*web_0"):
        ready(DataConfig(sources=(source,)), quiet)


def test_a_changed_corpus_under_the_same_name_has_another_fingerprint(tmp_path: Path) -> None:
    prints = set()
    for last in (2, 3):
        source = foreign(tmp_path / "web", [[1, last]])
        prints.add(ready(DataConfig(sources=(source,)), quiet, model_vocab=500).fingerprint)
    assert len(prints) == 2


def refusals(folder: Path, cache: Path, library: Path) -> dict[str, tuple[DataConfig, int | None, str]]:
    source = foreign(folder / "web", [[1, 2, 650]])
    described = dataclasses.replace(foreign(folder / "code", [[1, 2]], described=True), name="code")
    other = dataclasses.replace(foreign(folder / "talk", [[1, 2]], described=True, tokenizer="beef"), name="talk")
    missing = SourceConfig("web", prefix=str(folder / "none"))
    tokenizer = str(prepare(cache, library).tokenizer)
    both = dataclasses.replace(source, validation=missing.prefix)
    return {
        "no vocabulary": (DataConfig(sources=(source,)), None, "vocabulary of .*web is unknown"),
        "id outside": (DataConfig(sources=(source,)), 600, "position 2 is 650"),
        "missing": (DataConfig(sources=(missing,)), 600, "none.idx does not exist"),
        "missing validation": (DataConfig(sources=(both,)), 700, "none.idx does not exist"),
        "other tokenizer": (DataConfig(sources=(described,), tokenizer=tokenizer), None, "ids would mean"),
        "two tokenizers": (DataConfig(sources=(described, other)), None, "code has .* talk was made with .*beef"),
        "model too small": (DataConfig(sources=(described,)), 599, "has 600 entries, but model.vocab_size is 599"),
        "no texts": (DataConfig(sources=(SourceConfig("a", input=str(folder / "no*")),)), None, "no"),
    }


def test_what_cannot_work_is_refused_in_words(tmp_path: Path, fake_library: Path) -> None:
    for settings, model_vocab, message in refusals(tmp_path, tmp_path / "cache", fake_library).values():
        with pytest.raises(DataRefused, match=message.replace("talk was", ".*talk was")):
            ready(dataclasses.replace(settings, cache=str(tmp_path / "cache")), quiet, model_vocab=model_vocab)


def test_a_json_of_other_files_is_refused(tmp_path: Path) -> None:
    source = foreign(tmp_path / "web", [[1, 2]], described=True)
    described = (tmp_path / "web.json").read_text()
    foreign(tmp_path / "web", [[1, 2, 3]])
    (tmp_path / "web.json").write_text(described)
    with pytest.raises(DataRefused, match=r"web.json tells of .*belongs to other files"):
        ready(DataConfig(sources=(source,)), quiet)
