"""Progress is told without changing what passes through."""

from __future__ import annotations

import pytest

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
