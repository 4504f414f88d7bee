"""Progress of long preparations: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

T = TypeVar("T")
Say = Callable[[str], None]

_SECONDS_A_LINE = 5.0


class Every:
    """True once every `seconds`, for things that would be said too often; `at_once`: true at the first
    call."""

    def __init__(self, seconds: float, at_once: bool = False) -> None:
        self._seconds = seconds
        self._last = -math.inf if at_once else time.monotonic()

    def __call__(self) -> bool:
        now = time.monotonic()
        due = now - self._last >= self._seconds
        if due:
            self._last = now
        return due


def tracked(items: Iterable[T], total: int, label: str, say: Say, note: Say) -> Iterator[T]:
    """Yields `items`, `total` of them, and shows how far it is.

    `say`: prints a line, where standard error is no terminal. `note`: is told the same about once a second
    (for processes that wait).
    """
    console = Console(stderr=True)
    line_due, note_due = Every(_SECONDS_A_LINE), Every(1.0, at_once=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(label, total=total)
        for done, item in enumerate(items, 1):
            yield item
            bars.update(bar, completed=done)
            state = f"{label}: {done:,} of {total:,}"
            if note_due():
                note(state)
            if line_due() and not console.is_terminal:
                say(state)


class Meter(AbstractContextManager["Meter"]):
    """Shows how many bytes of how many are done, how fast and how long it will take.

    `label`: what is done. `say`: prints a line, every few seconds where standard error is no terminal (there a bar
    is drawn). `note`: is told the same about once a second (for processes that wait).
    """

    def __init__(self, label: str, say: Say, note: Say) -> None:
        console = Console(stderr=True)
        self._label, self._say, self._note = label, say, note
        self._began, self._terminal = time.monotonic(), console.is_terminal
        self._line_due, self._note_due = Every(_SECONDS_A_LINE), Every(1.0, at_once=True)
        self._draw_due = Every(0.1, at_once=True)
        columns = (TextColumn("{task.description}"), BarColumn())
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar = self._bars.add_task(label, total=None)

    def __enter__(self) -> Meter:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def update(self, done: int, total: int | None, found: int = 0) -> None:
        """`done` bytes of `total` (None: unknown); `found` of them were done before and say nothing of the speed."""
        noted, said, drawn = (
            self._note_due(),
            not self._terminal and self._line_due(),
            self._terminal and self._draw_due(),
        )
        if not (noted or said or drawn):
            return
        state = f"{self._label}: {_state(done, total, (done - found) / max(time.monotonic() - self._began, 1e-9))}"
        if noted:
            self._note(state)
        if said:
            self._say(state)
        if drawn:
            self._bars.update(self._bar, completed=done, total=total, description=state)


def megabytes(count: float) -> str:
    """Bytes in words, in the unit that suits: "12.3 MB"."""
    unit, power = next((unit for unit in (("TB", 12), ("GB", 9), ("MB", 6)) if count >= 10 ** unit[1]), ("MB", 6))
    return f"{count / 10**power:,.1f} {unit}"


def _state(done: int, total: int | None, rate: float) -> str:
    if total is None:
        return f"{megabytes(done)}, {rate / 1e6:.1f} MB/s"
    seconds = (total - done) / rate if rate > 0 else math.inf
    left = f", {_duration(seconds)} left" if math.isfinite(seconds) else ""
    return f"{megabytes(done)} of {megabytes(total)}, {rate / 1e6:.1f} MB/s{left}"


def _duration(seconds: float) -> str:
    """As 0:07, 12:34 or 5:06:07."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
