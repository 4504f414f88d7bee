"""What a run's time was used for, over all its starts: the key `goodput` of each record.

    productive   steps that were made for the first time, without what follows
    recomputed   steps made again, after a start or a rollback went back before them
    saving       what checkpoints held training up for
    data         waiting for the next batch
    evaluation   validations
    startup      from a process's start to its first step
    down         from the last record of one start to the next start

A start goes on from the newest record of metrics.jsonl. ETTR (the effective training time ratio) is productive time
over all time since the run's first start.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from files import lines_backwards
from metrics.throughput import format_duration

KINDS = ("productive", "recomputed", "saving", "data", "evaluation", "startup", "down")
_APART = {"checkpoint": "saving", "data": "data", "evaluation": "evaluation"}  # parts of the record's time


class Goodput:
    """The ledger, kept by the process that leads."""

    def __init__(self, records: Path, began: float) -> None:
        """records: metrics.jsonl, with what former starts used; began: time.time() of this process's start."""
        self.began = began
        known = _newest(records)
        self.seconds = {kind: float(known.get(kind, 0.0)) for kind in KINDS}
        self.furthest = int(known.get("furthest", 0))
        self.seconds["down"] += max(0.0, began - known.get("until", began))

    def begin(self) -> None:
        """The first step of this start comes."""
        self.seconds["startup"] += max(0.0, time.time() - self.began)

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

    def summary(self) -> dict[str, float]:
        """Seconds of each kind; `ettr`; the `furthest` step that was made; `until`: time.time() now."""
        total = sum(self.seconds.values())
        ettr = self.seconds["productive"] / total if total else 0.0
        return {**self.seconds, "ettr": ettr, "furthest": self.furthest, "until": time.time()}

    def words(self) -> str:
        """In a line: the shares of all that took a hundredth or more."""
        total = sum(self.seconds.values()) or 1.0
        shares = ((kind, seconds / total) for kind, seconds in self.seconds.items())
        told = ", ".join(f"{kind} {share:.0%}" for kind, share in shares if share >= 0.005)
        return f"time since the first start: {format_duration(total)}: {told}"


def _newest(records: Path) -> dict[str, float]:
    """The newest summary in metrics.jsonl; empty where there is none."""
    if records.exists():
        for line in lines_backwards(records):
            if b'"goodput"' in line:
                with suppress(ValueError):
                    return dict(json.loads(line).get("goodput", {}))
    return {}


def process_began(pid: int | None = None) -> float:
    """time.time() at which a process (None: this one) was started; now, where the system does not say."""
    try:
        status = Path(f"/proc/{pid or os.getpid()}/stat").read_text(encoding="utf-8")
        ticks = int(status.rpartition(")")[2].split()[19])
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return booted + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return time.time()
