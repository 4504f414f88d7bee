"""What a run's time was used for, over all its starts: goodput.json in the run's folder.

    productive   steps that were made for the first time, without what follows
    recomputed   steps made again, after a start or a rollback went back before them
    saving       what checkpoints held training up for
    data         waiting for the next batch
    evaluation   validations
    startup      from a process's start to its first step
    down         from what one start last wrote here to the next start

ETTR (the effective training time ratio) is productive time over all time since the run's first start.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from files import write_whole
from metrics.throughput import format_duration

KINDS = ("productive", "recomputed", "saving", "data", "evaluation", "startup", "down")
_APART = {"checkpoint": "saving", "data": "data", "evaluation": "evaluation"}  # parts of the record's time
_SECONDS = 10.0  # between writes


class Goodput:
    """The ledger, kept by the process that leads."""

    def __init__(self, path: Path, attempt: int, began: float) -> None:
        """began: time.time() of this process's start."""
        self.path, self.attempt, self.began = path, attempt, began
        self.seconds, self.furthest, known = _read(path)
        if known is not None:
            self.seconds["down"] += max(0.0, began - known)
        self._written = 0.0

    def begin(self, step: int) -> None:
        """The first step of this start comes; step: where it goes on from."""
        self.seconds["startup"] += max(0.0, time.time() - self.began)
        self.write()

    def add(self, first: int, last: int, seconds: float, parts: Mapping[str, float]) -> None:
        """Steps `first` to `last` took so many seconds, of which some were named parts."""
        apart = 0.0
        for part, kind in _APART.items():
            self.seconds[kind] += parts[part]
            apart += parts[part]
        again = max(0, min(last, self.furthest) - first + 1) / (last - first + 1)
        working = max(0.0, seconds - apart)
        self.seconds["recomputed"] += working * again
        self.seconds["productive"] += working * (1.0 - again)
        self.furthest = max(self.furthest, last)
        if time.monotonic() - self._written >= _SECONDS:
            self.write()

    def summary(self) -> dict[str, float]:
        """Seconds of each kind, and `ettr`."""
        total = sum(self.seconds.values())
        return {**self.seconds, "ettr": self.seconds["productive"] / total if total else 0.0}

    def words(self) -> str:
        """In a line: the shares of all that took a hundredth or more."""
        total = sum(self.seconds.values()) or 1.0
        shares = ((kind, seconds / total) for kind, seconds in self.seconds.items())
        told = ", ".join(f"{kind} {share:.0%}" for kind, share in shares if share >= 0.005)
        return f"time since the first start: {format_duration(total)}: {told}"

    def write(self) -> None:
        """Put it on the disk; one that refuses is no reason to end a run."""
        self._written = time.monotonic()
        record = {"seconds": self.seconds, "furthest": self.furthest, "attempt": self.attempt, "written": time.time()}
        with suppress(OSError):
            write_whole(self.path, json.dumps(record, indent=1) + "\n")


def _read(path: Path) -> tuple[dict[str, float], int, float | None]:
    """Seconds, the furthest step and when it was written; all zero where there is none."""
    nothing = dict.fromkeys(KINDS, 0.0)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        seconds = nothing | {kind: float(raw["seconds"][kind]) for kind in KINDS}
        return seconds, int(raw["furthest"]), float(raw["written"])
    except (OSError, ValueError, KeyError, TypeError):
        return nothing, 0, None


def process_began(pid: int | None = None) -> float:
    """time.time() at which a process (None: this one) was started; now, where the system does not say."""
    try:
        status = Path(f"/proc/{pid or os.getpid()}/stat").read_text(encoding="utf-8")
        ticks = int(status.rpartition(")")[2].split()[19])
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return booted + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return time.time()
