"""Asking a run to save and end: a file named `stop` in its folder, or a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Notes the first signal; the second one of a kind does what it would have done without us.

    Of many processes one looks at the file.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.signal: signal.Signals | None = None
        self.before: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Take SIGINT, SIGTERM and SIGUSR1 as requests; only the main thread can."""
        try:
            for each in _SIGNALS:
                self.before[each] = signal.signal(each, self._note)
        except ValueError:  # not the main thread: the file still works
            pass
        try:
            yield self
        finally:
            for number, handler in self.before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        signal.signal(number, self.before[number])

    @property
    def asked(self) -> str | None:
        """Who asked for an end, in words; None if nobody did."""
        if self.signal is not None:
            return self.signal.name
        return f"the file {self.file}" if self.file is not None and self.file.exists() else None
