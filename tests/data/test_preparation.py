"""Texts become a corpus: every document once, in an order of its own, whatever happens on the way."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpus.indexed import IndexedCorpus
from data.corpus.metadata import read_metadata
from data.preparing.preparation import Preparation, prepare
from data.preparing.report import Report
from data.texts.origin import Document, Skipped
from data.tokenizers.tokenizer import load_tokenizer
from errors import ConfigRefused, DataRefused
from tests.data.listed import documents, origin

TEXTS = [f"text number {number} " + "word " * (number * 7 % 40) for number in range(120)]
Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests do not survive a loss of power, and need not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def quiet(line: str) -> None:
    """Says nothing."""


def made(folder: Path, source: Any, **changes: Any) -> Report:
    """Prepares `source` with bytes for tokens into `folder`/train (and held, where it is among the changes)."""
    if "validation" in changes:
        changes["validation"] = folder / changes["validation"]
    return prepare(Preparation(source, "bytes", folder / "train", **changes), quiet)


def texts_of(prefix: Path) -> list[str]:
    """The corpus's documents in their order."""
    corpus, tokenizer = IndexedCorpus(prefix), load_tokenizer("bytes")
    stream = corpus.read(0, corpus.tokens)
    ends = np.flatnonzero(stream == tokenizer.eod)
    assert len(ends) == corpus.documents
    assert corpus.borders(0, corpus.tokens).tolist() == (ends[:-1] + 1).tolist()
    starts = [0, *(ends + 1).tolist()]
    return [tokenizer.decode(stream[start:end].tolist()) for start, end in zip(starts, ends.tolist(), strict=False)]


def files(folder: Path) -> Files:
    """Content of all that was made; the report, which tells times, and the lock are left out."""
    left_out = (".report.json", ".lock")
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(left_out)}


@settings(max_examples=15, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=30), min_size=1, max_size=40),
    cuts=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    deduplicate=st.booleans(),
    seed=st.integers(-3, 1 << 70),
)
def test_every_document_is_there_once_and_the_cut_into_parts_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], cuts: tuple[int, int], deduplicate: bool, seed: int
) -> None:
    folders = [tmp_path_factory.mktemp("cut") for _ in cuts]
    for folder, parts in zip(folders, cuts, strict=True):
        made(folder, origin(documents(texts), parts), deduplicate=deduplicate, seed=seed)
    assert files(folders[0]) == files(folders[1])
    wanted = set(texts) if deduplicate else texts
    assert Counter(texts_of(folders[0] / "train")) == Counter(wanted)


def test_two_workers_make_the_same_files_as_one(tmp_path: Path) -> None:
    source, changes = origin(documents(TEXTS), 7), {"validation": "held", "held_out": 0.2}
    one = made(tmp_path / "one", source, **changes)
    two = made(tmp_path / "two", source, workers=2, **changes)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert {"train.bin", "train.idx", "train.json", "held.bin", "held.idx", "held.json"} == set(files(tmp_path / "one"))
    assert replace(one, seconds=0, megabytes_per_second=0) == replace(two, seconds=0, megabytes_per_second=0)


def test_small_pieces_and_many_ranges_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = origin(documents(TEXTS * 2), 3)
    for name in ("one", "many"):
        for deduplicate in (False, True):
            made(tmp_path / f"{name}{deduplicate}", source, deduplicate=deduplicate, validation="held", held_out=0.3)
        monkeypatch.setattr("data.preparing.pieces._PIECE_BYTES", 300)
        monkeypatch.setattr("data.preparing.pieces._BLOCK_TOKENS", 50)
        monkeypatch.setattr("data.preparing.lot_reader._BATCH_CHARACTERS", 100)
        monkeypatch.setattr("data.preparing.merge._RANGE_BYTES", (1000, 1000))
    assert files(tmp_path / "oneFalse") == files(tmp_path / "manyFalse")
    assert files(tmp_path / "oneTrue") == files(tmp_path / "manyTrue")


def test_the_shuffle_goes_over_the_whole_corpus_and_depends_on_the_seed(tmp_path: Path) -> None:
    orders = []
    for seed in (0, 1):
        made(tmp_path / str(seed), origin(documents(TEXTS), 5), seed=seed)
        orders.append([TEXTS.index(text) for text in texts_of(tmp_path / str(seed) / "train")])
    assert orders[0] != orders[1]
    for order in orders:
        # Of a random order of n, the mean distance to one's own place is n/3, with a spread of some 0.3 sqrt(n).
        moved = np.abs(np.array(order) - np.arange(len(order))).mean()
        assert moved == pytest.approx(len(order) / 3, abs=4 * 0.3 * len(order) ** 0.5)


def test_copies_of_a_text_are_not_neighbours_when_they_are_kept(tmp_path: Path) -> None:
    made(tmp_path, origin(documents(TEXTS + ["copy"] * 30)))
    places = [place for place, text in enumerate(texts_of(tmp_path / "train")) if text == "copy"]
    assert len(places) == 30
    assert places[-1] - places[0] > 60


def test_duplicates_are_dropped_and_counted_whatever_part_they_are_in(tmp_path: Path) -> None:
    report = made(tmp_path, origin(documents(TEXTS + TEXTS[:50] + TEXTS[:20]), 4), deduplicate=True)
    assert report.duplicates == 70
    assert sorted(texts_of(tmp_path / "train")) == sorted(TEXTS)


def test_a_documents_side_depends_on_its_text_alone(tmp_path: Path) -> None:
    made(tmp_path / "a", origin(documents(TEXTS)), validation="held", held_out=0.2)
    made(tmp_path / "b", origin(documents([*TEXTS[::-1][:60], "more"]), 3), validation="held", held_out=0.2, seed=5)
    held = set(texts_of(tmp_path / "a" / "held"))
    assert 10 <= len(held) <= 40
    assert set(texts_of(tmp_path / "b" / "held")) - {"more"} == held & set(TEXTS[::-1][:60])
    assert not held & set(texts_of(tmp_path / "a" / "train"))


def test_at_least_one_document_is_held_out_and_one_must_be_left(tmp_path: Path) -> None:
    report = made(tmp_path, origin(documents(TEXTS)), validation="held", held_out=1e-9)
    assert report.validation is not None
    assert report.validation.documents == 1
    with pytest.raises(DataRefused, match="leaves none of 1 documents for training: lower it"):
        made(tmp_path / "one", origin(documents(["alone"])), validation="held")


def test_texts_left_out_are_reported_by_reason_with_the_first_keys(tmp_path: Path) -> None:
    items = [
        *documents(["a", "bb" * 50, "fine text", "half \ud800 a pair", "ok to keep", ""]),
        Skipped("x:1", "encoding"), *(Skipped(f"x:{line}", "column") for line in range(5)),
    ]  # fmt: skip
    report = made(tmp_path, origin(items, 2), min_bytes=2, max_bytes=99)
    assert {why: (skips.count, skips.keys) for why, skips in report.skipped.items()} == {
        "too short": (1, ("list:0",)), "too long": (1, ("list:1",)), "empty": (1, ("list:5",)),
        "encoding": (2, ("list:3", "x:1")), "column": (5, ("x:0", "x:1", "x:2")),
    }  # fmt: skip
    assert sorted(texts_of(tmp_path / "train")) == ["fine text", "ok to keep"]
    assert "column missing or no text  5 (x:0, x:1, x:2, ...)" in report.table()


def test_the_json_files_tell_what_is_in_the_corpus(tmp_path: Path) -> None:
    report = made(tmp_path, origin(documents(["äb", "c"])))
    metadata = read_metadata(tmp_path / "train")
    assert metadata is not None
    assert (metadata.documents, metadata.tokens, metadata.bytes_of_text) == (2, 6, 4)
    assert metadata.tokenizer == load_tokenizer("bytes").fingerprint
    assert json.loads((tmp_path / "train.report.json").read_text())["training"]["tokens"] == report.training.tokens == 6
    assert not (tmp_path / "train.work").exists()


@pytest.mark.parametrize(
    ("workers", "limit", "parts"), [(1, 1, 1), (1, 30, 4), (1, 31, 4), (1, 59, 4), (1, 500, 4), (2, 31, 4)]
)
def test_max_documents_are_the_first_of_the_origin(tmp_path: Path, workers: int, limit: int, parts: int) -> None:
    report = made(tmp_path, origin(documents(TEXTS), parts), max_documents=limit, workers=workers)
    assert report.training.documents == min(limit, len(TEXTS))
    assert sorted(texts_of(tmp_path / "train")) == sorted(TEXTS[:limit])


def test_unreadable_parts_are_refused_or_reported_and_the_rest_is_not_read_again(tmp_path: Path) -> None:
    source = origin(documents(TEXTS), 4, ending="damaged")
    with pytest.raises(
        DataRefused, match=r"1 parts of the texts cannot be read: mend.*--allow-unreadable.*\n  part 3 is"
    ):
        made(tmp_path, source)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "train.work").glob("lot_0000000[012].*")}
    assert len(kept) == 6
    with pytest.raises(DataRefused):
        made(tmp_path, source)
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    report = made(tmp_path, source, allow_unreadable=True)
    assert [(part.part, part.documents) for part in report.unreadable] == [("part 3", 30)]
    assert sorted(texts_of(tmp_path / "train")) == sorted(TEXTS)  # what was read before the damage is kept
    assert "part 3 is cut short: copy it again (after 30 documents)" in report.table()
    with pytest.raises(DataRefused, match="unreadable"):
        made(tmp_path, source)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([], "there is no text to prepare .nothing was found."),
        ([Skipped("a:1", "column"), Skipped("a:2", "column")], "column missing or no text: 2 .a:1, a:2.*its column"),
    ],
)
def test_an_origin_without_text_is_refused_with_its_reasons(tmp_path: Path, items: Any, words: str) -> None:
    with pytest.raises(DataRefused, match=words):
        made(tmp_path, origin(items))


def test_an_origin_of_which_nothing_can_be_read_is_refused_even_if_allowed(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match="cannot be read: mend or remove them\n  part 0 is cut short"):
        made(tmp_path, origin([], ending="damaged"), allow_unreadable=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"held_out": 0.0}, "held_out is 0.0, but must be above 0"),
        ({"workers": 0}, "workers is 0, but must be at least 1"),
        ({"min_bytes": 5, "max_bytes": 4}, "max_bytes is 4, but must be at least 1 and not below min_bytes"),
        ({"max_documents": 0}, "max_documents is 0"),
        ({"validation": Path("a")}, "another prefix than the output's"),
    ],
)
def test_values_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigRefused, match=words):
        Preparation(origin([]), "bytes", Path("a"), **changes)


class Interrupted(BaseException):
    """Stands for a kill: nobody catches it."""


def interrupt_at(monkeypatch: pytest.MonkeyPatch, call: int) -> Callable[[], int]:
    """Ends the preparation at the call-th fsync, rename or unlink; tells how many there were."""
    count = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count >= call:  # a process that was killed does nothing more, no cleaning up either
                raise Interrupted
            return original(*arguments, **keywords)

        return run

    for name in ("fsync", "replace", "rename", "unlink"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(os, "getpid", lambda: 1_000_000 + call)  # the next start is another process
    return lambda: count


def test_a_stop_at_any_write_loses_nothing_and_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, changes = origin(documents(TEXTS[:20]), 2), {"validation": "held", "held_out": 0.2}
    made(tmp_path / "whole", source, **changes)
    wanted = files(tmp_path / "whole")
    with monkeypatch.context() as patch:
        total = interrupt_at(patch, 1 << 30)
        made(tmp_path / "counted", source, **changes)
    assert total() > 20
    for call in range(1, total() + 1):
        folder = tmp_path / f"stopped{call}"
        with monkeypatch.context() as patch:
            interrupt_at(patch, call)
            with pytest.raises(Interrupted):
                made(folder, source, **changes)
        for name, content in files_under_final_names(folder).items():
            assert content == wanted[name], f"{name} is half-made after a stop at call {call}"
        made(folder, source, **changes)
        assert files(folder) == wanted, f"another result after a stop at call {call}"


def files_under_final_names(folder: Path) -> Files:
    """What a reader would find."""
    names = [f"{prefix}.{part}" for prefix in ("train", "held") for part in ("bin", "idx", "json")]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def test_a_stop_while_another_corpus_is_replaced_leaves_no_mixture_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = origin(documents(TEXTS[:9])), origin(documents(TEXTS[9:18]))
    made(tmp_path / "old", old)
    made(tmp_path / "new", new)
    for call in range(1, 40):
        folder = tmp_path / f"stopped{call}"
        made(folder, old)
        with monkeypatch.context() as patch:
            interrupt_at(patch, call)
            with suppress(Interrupted):
                made(folder, new, overwrite=True)
        found = files_under_final_names(folder)
        if "train.idx" in found and "train.bin" in found:  # without one of them it cannot be opened
            sides = [files(tmp_path / side) for side in ("old", "new")]
            assert any(found.items() <= side.items() for side in sides), f"a mixture after a stop at call {call}"
        made(folder, new, overwrite=True)
        assert files(folder) == files(tmp_path / "new")


@pytest.mark.parametrize("damage", ["cut", "changed", "removed", "record cut", "record of another kind"])
def test_damaged_work_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    source = origin(documents(TEXTS), 3)
    made(tmp_path / "whole", source)
    with monkeypatch.context() as patch:
        patch.setattr("data.preparing.preparation.merge", raising(Interrupted()))
        with pytest.raises(Interrupted):
            made(tmp_path / "mended", source)
    piece, record = (
        tmp_path / "mended" / "train.work" / name for name in ("lot_00000001.0000.piece", "lot_00000001.json")
    )
    content = piece.read_bytes()
    match damage:
        case "cut":
            piece.write_bytes(content[:-1])
        case "changed":
            piece.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
        case "removed":
            piece.unlink()
        case "record cut":
            record.write_text(record.read_text()[:-5])
        case _:
            record.write_text("[1]")
    made(tmp_path / "mended", source)
    assert files(tmp_path / "mended") == files(tmp_path / "whole")


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises `error`."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        raise error

    return run


def test_unfinished_work_of_another_plan_is_refused_or_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = origin(documents(TEXTS))
    with monkeypatch.context() as patch:
        patch.setattr("data.preparing.preparation.merge", raising(Interrupted()))
        with pytest.raises(Interrupted):
            made(tmp_path, source, seed=1)
    with pytest.raises(DataRefused, match=r"train.work holds the unfinished work of another.*\(seed 2 instead of 1\)"):
        made(tmp_path, source, seed=2)
    made(tmp_path, source, seed=2, overwrite=True)
    assert not (tmp_path / "train.work").exists()


def test_a_folder_that_only_looks_like_work_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.work").mkdir()
    (tmp_path / "train.work" / "thesis.txt").write_text("years")
    with pytest.raises(DataRefused, match=r"no plan\.json"):
        made(tmp_path, origin(documents(TEXTS)), overwrite=True)
    assert (tmp_path / "train.work" / "thesis.txt").exists()


def test_a_finished_corpus_says_so_and_another_is_refused(tmp_path: Path) -> None:
    source = origin(documents(TEXTS))
    first = made(tmp_path, source)
    before = files(tmp_path)
    said: list[str] = []
    again = prepare(Preparation(source, "bytes", tmp_path / "train", workers=2), said.append)
    assert again == first
    assert said == [f"{tmp_path / 'train'} is done already: the same texts, tokenizer and settings"]
    with pytest.raises(DataRefused, match=r"train.bin is there already.*\(seed 3 instead of 0\): pass --overwrite"):
        made(tmp_path, source, seed=3)
    assert files(tmp_path) == before
    made(tmp_path, source, seed=3, overwrite=True)
    assert files(tmp_path) != before


@pytest.mark.parametrize("damage", ["train.bin", "train.idx", "train.json", "train.report.json"])
def test_a_finished_corpus_that_was_damaged_is_not_called_done(tmp_path: Path, damage: str) -> None:
    source = origin(documents(TEXTS))
    made(tmp_path, source)
    before = files(tmp_path)
    (tmp_path / damage).write_bytes((tmp_path / damage).read_bytes()[:-8])
    with pytest.raises(DataRefused, match="is there already"):
        made(tmp_path, source)
    made(tmp_path, source, overwrite=True)
    assert files(tmp_path) == before


def test_texts_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    class Changing:
        answers = iter(["before", "after"])

        def parts(self) -> Any:
            return origin(documents(TEXTS)).parts()

        def fingerprint(self) -> str:
            return next(self.answers)

    with pytest.raises(DataRefused, match="changed while they were read"):
        made(tmp_path, Changing())


@pytest.mark.parametrize("call", [1, 3, 6, 9])
def test_a_full_disk_is_refused_in_words_and_the_work_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    source = origin(documents(TEXTS), 2)
    made(tmp_path / "whole", source)
    with monkeypatch.context() as patch:
        calls = iter(range(1, 1000))
        real = os.fsync

        def full(descriptor: int) -> None:
            if next(calls) >= call:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        patch.setattr(os, "fsync", full)
        with pytest.raises(DataRefused, match=r"cannot be written \(No space left on device\): make room, then start"):
            made(tmp_path / "full", source)
    assert not files_under_final_names(tmp_path / "full")
    made(tmp_path / "full", source)
    assert files(tmp_path / "full") == files(tmp_path / "whole")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataRefused, match=r"cannot be written \(.*\): make it writable, or choose another folder"):
        made(tmp_path / "file", origin(documents(TEXTS)))


def test_a_worker_that_is_killed_is_named_and_its_work_is_not_lost(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match=r"a worker process was killed by SIGKILL .*with fewer workers"):
        made(tmp_path, origin(documents(TEXTS), 3, ending="killed"), workers=2)
    made(tmp_path, origin(documents(TEXTS), 3), workers=2)
    assert sorted(texts_of(tmp_path / "train")) == sorted(TEXTS)


def test_those_who_wait_get_the_same_report(tmp_path: Path) -> None:
    preparation = Preparation(origin(documents(TEXTS), 3), "bytes", tmp_path / "train")
    reports: list[Report] = []
    threads = [threading.Thread(target=lambda: reports.append(prepare(preparation, quiet))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 4
    assert all(report == reports[0] for report in reports)


def test_without_locks_every_process_works_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", raising(OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))))
    said: list[str] = []
    prepare(Preparation(origin(documents(TEXTS)), "bytes", tmp_path / "train"), said.append)
    assert "has no locks" in said[0]
    assert sorted(texts_of(tmp_path / "train")) == sorted(TEXTS)
    assert not list(tmp_path.glob("*work*"))


def test_a_document_is_never_read_twice_for_its_key(tmp_path: Path) -> None:
    made(tmp_path, origin([Document("same", "a"), Document("same", "b"), Document("same", "a")]))
    assert sorted(texts_of(tmp_path / "train")) == ["a", "a", "b"]
