"""Ends a run that hangs, and says who was at fault: a thread beside the training on every rank.

    rank 0   ... backward [reduce: waits for 1 ....... limit] report --\\
    rank 1   ... forward [hangs ...................... limit] report ---+-- names culprits, exit 1
    rank 2   ... backward [reduce: waits for 1 ....... sees a report] --/

The rank whose limit is over first makes a folder `hang/N` in the run's (N: the start), with a report of what it was at;
all others see it there and report too. Those that wait inside a collective are victims. Culprits are the ranks that
do something else, or that do not even report; where all wait, those that have come least far. Then every rank ends
with code 1, so that a launcher starts all again.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from files import write_whole
from metrics.health_config import LimitsConfig
from metrics.run_directory import RunDirectory

_POLL = 1.0  # seconds between looks
_GRACE = 15.0  # seconds in which other ranks may report
_BETWEEN = "between parts"


@dataclass(frozen=True)
class Report:
    """What a rank was at."""

    rank: int
    """The process."""
    step: int
    """The step, from 1."""
    parts: int
    """Parts of it that it had come to."""
    part: str
    """The part of the step it was in."""
    seconds: float
    """For how long."""
    collective: str | None
    """The collective that its training thread waited in; None: it was in none."""
    place: str
    """The innermost line of its training thread."""

    @property
    def words(self) -> str:
        """In a line."""
        waits = f"waiting in {self.collective}" if self.collective else "not in a collective"
        return f"step {self.step}, {self.part} for {self.seconds:.0f} s, {waits}, at {self.place}"


class Watchdog(AbstractContextManager["Watchdog"]):
    """Listens to the parts of a step (as metrics.clock.Listener); inside of it, a thread looks how long they last."""

    def __init__(
        self, limits: LimitsConfig, directory: RunDirectory, rank: int, world: int, attempt: int, poll: float = _POLL,
        grace: float = _GRACE,
    ) -> None:  # fmt: skip
        self.limits, self.directory, self.rank, self.world, self.attempt = limits, directory, rank, world, attempt
        self.folder = directory.path / "hang" / str(attempt)
        self.poll, self.grace = poll, grace
        self.step, self.steps_begun, self.parts, self.part, self.since = 0, 0, 0, _BETWEEN, time.monotonic()
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.since = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def begin_step(self, step: int) -> None:
        """The step that comes."""
        self.step, self.parts = step, 0
        self.steps_begun += 1
        self.since = time.monotonic()

    def begins(self, part: str) -> None:
        """A part of the step begins."""
        self.part, self.since = part, time.monotonic()
        self.parts += 1

    def ends(self, part: str) -> None:
        """A part of the step ends."""
        self.part, self.since = _BETWEEN, time.monotonic()

    @property
    def limit(self) -> float:
        """Seconds that what this rank is at may last; 0: for ever."""
        limits = self.limits
        named = {"data": limits.data, "evaluation": limits.evaluation, "checkpoint": limits.checkpoint}
        limit = named.get(self.part, limits.compute)
        return max(limit, limits.start) if limit and self.steps_begun < 2 else limit

    def _watch(self) -> None:
        """Look now and then; what goes wrong here must not end the training."""
        while not self._over.wait(self.poll):
            part, limit, waited = self.part, self.limit, time.monotonic() - self.since
            if limit and waited > limit:
                self._say(f"{part} of step {self.step} has lasted {waited:.0f} s, the limit is {limit:g} s")
            elif not self._others_report():
                continue
            self._end()

    def _others_report(self) -> bool:
        with suppress(OSError):
            return self.world > 1 and self.folder.exists()
        return False

    def _end(self) -> None:
        """Report, name the culprits, and end the process."""
        with suppress(Exception):
            self._report()
            reports = self._reports()
            words = culprit_words(reports, self.world)
            if self.rank == min((each.rank for each in reports), default=self.rank):
                self._say(words)
                self._note(words)
            else:
                time.sleep(min(2.0, self.grace))  # launchers end all when the first ends: let the one speak
        os._exit(1)

    def _report(self) -> None:
        """Write what this rank is at, and all its threads' stacks."""
        report = self._own()
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"rank_{self.rank:05d}.stacks.txt").open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            recorded = _flight_record()
            if recorded:
                write_whole(self.folder / f"rank_{self.rank:05d}.collectives.json", recorded)
            write_whole(self.folder / f"rank_{self.rank:05d}.json", json.dumps(asdict(report)) + "\n")

    def _own(self) -> Report:
        frame = sys._current_frames().get(self._main)
        collective, place = waiting_in(frame)
        waited = time.monotonic() - self.since
        return Report(self.rank, self.step, self.parts, self.part, waited, collective, place)

    def _reports(self) -> list[Report]:
        """Those of all ranks that report within the grace."""
        end = time.monotonic() + self.grace
        found = {self.rank: self._own()}
        while len(found) < self.world and time.monotonic() < end:
            for path in self.folder.glob("rank_*.json"):
                if path.name.count(".") == 1:
                    with suppress(OSError, ValueError, TypeError):
                        report = Report(**json.loads(path.read_text(encoding="utf-8")))
                        found[report.rank] = report
            time.sleep(min(0.2, self.poll))
        return [found[rank] for rank in sorted(found)]

    def _note(self, words: str) -> None:
        """Leave the words for people, and in status.json that the start failed."""
        with suppress(OSError):
            write_whole(self.folder / "culprits.txt", words + "\n")
            status = self.directory.status()
            self.directory.write_status("failed", 1, status.get("step", 0), self.attempt)

    def _say(self, words: str) -> None:
        print(f"rank {self.rank}: watchdog: {words}", file=sys.stderr, flush=True)


def culprits(reports: Sequence[Report], world: int) -> tuple[list[Report], list[int]]:
    """Ranks at fault among those that report; and those that do not, which are at fault before all others."""
    silent = sorted(set(range(world)) - {each.rank for each in reports})
    if silent:
        return [], silent
    busy = [each for each in reports if each.collective is None]
    if busy and len(busy) < len(reports):
        return busy, []
    least = min((each.step, each.parts) for each in reports)
    return [each for each in reports if (each.step, each.parts) == least], []


def culprit_words(reports: Sequence[Report], world: int) -> str:
    """Who is at fault, in words."""
    busy, silent = culprits(reports, world)
    if silent:
        return f"the run hangs: rank {', '.join(map(str, silent))} did not even report; is its host alive?"
    if len(busy) == world > 1:
        return "the run hangs, and no rank is behind another:\n" + _lines(reports)
    what = "it is" if len(busy) == 1 else "they are"
    return f"the run hangs: rank {', '.join(str(each.rank) for each in busy)} holds it up; {what} in\n" + _lines(busy)


def _lines(reports: Sequence[Report]) -> str:
    return "\n".join(f"  rank {each.rank}: {each.words}" for each in reports)


def waiting_in(frame: FrameType | None) -> tuple[str | None, str]:
    """The collective that a thread waits in, if it does, and its innermost line."""
    if frame is None:
        return None, "the end of its training"
    stack = traceback.extract_stack(frame)
    inner = stack[-1]
    place = f"{Path(inner.filename).name}:{inner.lineno} in {inner.name}"
    text = linecache.getline(inner.filename, inner.lineno or 0).strip()
    inside = f"{os.sep}torch{os.sep}distributed{os.sep}" in inner.filename
    if not inside and ".wait(" not in text:
        return None, place
    named = [each for each in stack if each.filename.endswith("distributed_c10d.py") and not each.name.startswith("_")]
    outer = next((each.name for each in named if each.name != "wrapper"), None)
    return outer or text or inner.name, place


def _flight_record() -> str | None:
    """What PyTorch's flight recorder kept of the last collectives (NCCL), as JSON."""
    room: Any = torch._C._distributed_c10d if torch.distributed.is_available() else None
    dump = getattr(room, "_dump_nccl_trace_json", None) or getattr(room, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    found = dump()
    return found.decode() if isinstance(found, bytes) else str(found)
