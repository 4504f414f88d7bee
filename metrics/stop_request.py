"""Asking a run to save and end: a file named `stop` in its folder, a signal, or a number of hours."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class StopRequest:
    """Notes the first signal; a second one, of any kind, does what it would have done without us: it ends the process
    at once, which harms nothing, as a checkpoint counts only when it is whole."""

    file: Path | None
    """Asks when it is there; of many processes one looks."""
    deadline: float | None = None
    """time.monotonic() from which on the hours are over; None: never."""
    hours: str = ""
    """Those hours, in words."""
    first: signal.Signals | None = None
    """The first one that came."""
    before: dict[int, Any] = field(default_factory=dict)
    """What signals would have done."""

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Take SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 as requests; only the main thread can."""
        try:
            for each in _SIGNALS:
                self.before[each] = signal.signal(each, self._note)
        except ValueError:  # not the main thread: the file still works
            pass
        try:
            yield self
        finally:
            self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.first = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> str | None:
        """Who asked for an end, in words; None if nobody did."""
        if self.first is not None:
            return self.first.name
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return self.hours
        return f"the file {self.file}" if self.file is not None and self.file.exists() else None
