"""Progress is told without changing what passes through."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from data import progress


def test_items_pass_unchanged_and_lines_tell_how_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_A_LINE", 0.0)
    said: list[str] = []
    noted: list[str] = []
    assert list(progress.tracked("abc", 3, "reading", said.append, noted.append)) == ["a", "b", "c"]
    assert said == ["reading: 1 of 3", "reading: 2 of 3", "reading: 3 of 3"]
    assert noted == ["reading: 1 of 3"]  # at most once a second


def test_short_work_says_nothing() -> None:
    said: list[str] = []
    list(progress.tracked(range(100), 100, "reading", said.append, said.append))
    assert said == ["reading: 1 of 100"]  # the note alone


@pytest.mark.parametrize(("at_once", "answers"), [(True, [True, False]), (False, [False, False])])
def test_every_is_true_once_an_interval(at_once: bool, answers: list[bool]) -> None:
    due = progress.Every(60, at_once=at_once)
    assert [due(), due()] == answers


def test_a_meter_tells_bytes_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_A_LINE", 0.0)
    times = iter([0.0, *[10.0] * 20])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    said: list[str] = []
    noted: list[str] = []
    meter = progress.Meter("encoding", said.append, noted.append)
    monkeypatch.setattr("time.monotonic", lambda: 10.0)
    meter.update(30_000_000, 3_030_000_000)
    meter.update(30_000_000, None, found=10_000_000)
    assert said == ["encoding: 30.0 MB of 3.0 GB, 3.0 MB/s, 16:40 left", "encoding: 30.0 MB, 2.0 MB/s"]
    assert noted == said[:1]  # at most once a second


@pytest.mark.parametrize(("seconds", "words"), [(7, "0:07"), (754, "12:34"), (18367, "5:06:07")])
def test_durations_are_as_on_a_clock(seconds: float, words: str) -> None:
    assert progress._duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0.0 MB"), (12_340_000, "12.3 MB"), (2e9, "2.0 GB"), (3.21e15, "3,210.0 TB")]
)
def test_bytes_are_told_in_the_unit_that_suits(count: float, words: str) -> None:
    assert progress.megabytes(count) == words


def test_on_a_terminal_a_bar_is_drawn_and_no_line_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_A_LINE", 0.0)
    screen, said = io.StringIO(), list[str]()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=100))
    with progress.Meter("encoding", said.append, lambda state: None) as meter:
        meter.update(30_000_000, 60_000_000)
    assert "encoding: 30.0 MB of 60.0 MB" in screen.getvalue()
    assert not said
