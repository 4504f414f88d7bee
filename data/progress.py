"""Progress of long preparations: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

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
