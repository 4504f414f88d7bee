"""A preparation spoils nothing that is there, and is not in its own way."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from data.corpus.indexed import IndexedCorpus
from data.corpus.writer import CorpusWriter
from data.lock import exclusive
from data.preparing.lot_queue import LotQueue
from data.preparing.lot_reader import Lot, Settings
from data.preparing.lots import LotRecord, LotSetup
from data.preparing.preparation import Preparation, prepare
from errors import ConfigRefused, DataRefused
from tests.data.listed import documents, origin
from tests.data.test_preparation import TEXTS, Interrupted, made, quiet, raising, texts_of


def test_replaced_and_killed_between_the_two_there_is_no_old_corpus_beside_a_new_held_out_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = origin(documents(TEXTS))
    made(tmp_path, source, validation="held", held_out=0.05)
    finish = CorpusWriter.finish
    finished: list[Path] = []

    def killed(self: CorpusWriter, *given: Any) -> Any:
        if finished:
            raise KeyboardInterrupt
        finished.append(self.prefix)
        return finish(self, *given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CorpusWriter, "finish", killed)
        made(tmp_path, source, validation="held", held_out=0.5, overwrite=True)
    assert finished == [tmp_path / "held"]
    with pytest.raises(DataRefused, match=r"train.idx does not exist"):
        IndexedCorpus(tmp_path / "train")
    made(tmp_path, source, validation="held", held_out=0.5, overwrite=True)
    assert not set(texts_of(tmp_path / "train")) & set(texts_of(tmp_path / "held"))


def test_two_that_share_a_held_out_corpus_wait_for_each_other(tmp_path: Path) -> None:
    lines: list[str] = []
    with exclusive(tmp_path / ".held.lock", "holding it", quiet):
        plan = Preparation(origin(documents(TEXTS)), "bytes", tmp_path / "train", tmp_path / "held")
        thread = threading.Thread(target=prepare, args=(plan, lines.append))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and "waiting while another process is preparing" in lines[0]
        assert not (tmp_path / "train.work").exists()
    thread.join(60)
    with pytest.raises(DataRefused, match=r"held.bin is there already"):
        prepare(replace(plan, output=tmp_path / "other"), quiet)


def test_a_killed_preparation_is_not_gone_on_with_for_another_held_out_corpus(tmp_path: Path) -> None:
    """Its plan names the files that it may replace."""
    source = origin(documents(TEXTS))
    made(tmp_path, origin(documents(TEXTS[:50])), validation="precious")
    precious = (tmp_path / "precious.bin").read_bytes()
    first = Preparation(source, "bytes", tmp_path / "new", tmp_path / "new_held")
    with pytest.MonkeyPatch.context() as patch, suppress(Interrupted):
        patch.setattr("data.preparing.preparation.merge", raising(Interrupted()))
        prepare(first, quiet)
    with pytest.raises(DataRefused, match=r"unfinished work of another preparation.*validation precious"):
        prepare(replace(first, validation=tmp_path / "precious"), quiet)
    assert (tmp_path / "precious.bin").read_bytes() == precious


def test_a_tokenizer_that_is_replaced_meanwhile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match="replaced by another tokenizer meanwhile"):
        LotSetup(tmp_path, "bytes", "f00d", Settings(0, False, 0, None))()


def test_a_refused_command_leaves_nothing_in_the_way_of_the_mended_one(tmp_path: Path) -> None:
    for texts in ([""], []):
        with pytest.raises(DataRefused):
            made(tmp_path, origin(documents(texts)))
        assert made(tmp_path, origin(documents(TEXTS[:5]))).training.documents == 5
        for path in tmp_path.glob("train*"):
            path.unlink()


@pytest.mark.parametrize("output, validation", [("a/../b", "b"), ("b", "a/../b"), ("a.bin", None), ("..", None)])
def test_names_that_cannot_be_corpora_are_refused(tmp_path: Path, output: str, validation: str | None) -> None:
    held = tmp_path / validation if validation else None
    with pytest.raises(ConfigRefused, match="must be"):
        Preparation(origin(documents(TEXTS)), "bytes", tmp_path / output, held)


@pytest.mark.parametrize("change", [{"plan": [1]}, {"seconds": "abc"}, {"training": 3}, {"skipped": None}])
def test_a_report_that_was_written_over_is_no_report(tmp_path: Path, change: dict[str, Any]) -> None:
    source, path = origin(documents(TEXTS)), tmp_path / "train.report.json"
    made(tmp_path, source)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataRefused, match="is there already"):
        made(tmp_path, source)
    assert made(tmp_path, source, overwrite=True).training.documents == len(TEXTS)


@pytest.mark.parametrize("size", [1 << 20, 1 << 40])
def test_progress_of_many_lots_costs_nothing(size: int) -> None:
    queue = LotQueue([Lot(number, (SizedPart(size),), None) for number in range(2000)], None)
    assert queue.total() == 2000 * size
    done = LotRecord(0, None, "", 1, size // 2, 0, None, {}, (), ())
    queue.add(queue.lots[0], done)
    assert queue.total() == 1000 * size


@dataclass(frozen=True)
class SizedPart:
    """A part of which only the size is asked."""

    size: int
    name: str = "part"

    def read(self) -> Any:
        raise AssertionError
