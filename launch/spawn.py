"""N ranks on this machine that meet over gloo: for tests, benchmarks and `launch.verify`.

    caller      -- starts -->  forkserver, torch imported once  -- forks -->  rank 0 ... rank N-1   (0.2 s)
    rank        -- one report: its result, or how it failed -->  caller
    caller      -- a pipe on which nothing is ever sent -->  rank: where it ends, the rank ends

A failure is told once, by the rank that it began with; the others are ended, and nothing outlives the caller.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from errors import Refused
from launch.spawned import Report, live
from parallel.ranks import Ranks

T = TypeVar("T")

_PRELOADED = [
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.pipelining", "torch._dynamo",
]  # fmt: skip
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
_SETTLE = 0.5  # seconds in which a rank that fails later may still turn out to be the one it began with
_GRACE = 3.0  # seconds between SIGTERM and SIGKILL
_STACK_WAIT = 2.0
_LAST_LINES = 20


class RankFailed(Refused):
    """A rank failed, and the others were ended."""

    def __init__(self, message: str, rank: int, traceback: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        """The one it began with."""
        self.traceback = traceback
        """Its traceback; empty where there is none: a refusal, a death without a word, a timeout."""
        self.exit_code = exit_code
        """A refusal's own code, else 1."""


_NONE = Report()


@dataclass
class _Started:
    """A rank's process, and the ends of its pipes that stay with the caller."""

    rank: int
    process: ForkServerProcess
    results: Connection
    alive: Connection
    folder: Path
    report: Report = _NONE
    silent: bool = False
    """Whether its pipe has ended."""

    def look(self) -> None:
        """Take its report if it is there, and make one for a process that ended without."""
        while self.report is _NONE and not self.silent and self.results.poll():
            try:
                self.report = pickle.loads(self.results.recv_bytes())
            except (EOFError, OSError):  # it died before the end of its report
                self.silent = True
        code = self.process.exitcode
        if code is not None and (self.report is _NONE or (code and not self.report.failure)):
            when = "without a word" if self.report is _NONE else "after its result"
            how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
            self.report = Report(failure=f"ended {when}: {how}", doubt=1)

    @property
    def waited_for(self) -> list[Connection | int]:
        """What changes when it reports or ends."""
        reporting = self.report is _NONE and not self.silent
        running = self.process.exitcode is None
        return [*([self.results] if reporting else []), *([self.process.sentinel] if running else [])]

    def last_words(self) -> str:
        """The end of what it printed, which nobody has seen; rank 0's went through."""
        lines = _text(self.folder / f"output_{self.rank}").splitlines()[-_LAST_LINES:]
        return "\n  ".join(["\nThe last it printed:", *lines]) if lines else ""


def run_ranks(target: Callable[..., T], world: int, *args: Any, timeout: float = 120, threads: int = 1) -> list[T]:
    """Call target(ranks, *args) in `world` processes; what they returned, in the order of ranks.

    Args:
        target: a function of a module; it joins the process group itself (`parallel.process.joined`).
        timeout: seconds for all of it.
        threads: torch's, in each process.

    Raises:
        RankFailed: a rank raised, refused, died or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="tatara-ranks-", ignore_cleanup_errors=True) as folder:
        started: list[_Started] = []
        try:
            for rank in range(world):
                ranks = Ranks(rank, world, rank, f"file://{folder}/meeting", "launch.spawn", local_world=world)
                started.append(_start(target, ranks, args, Path(folder), threads))
            _watch(started, timeout)
            return [each.report.result for each in started]
        finally:
            _end(started)


def _start(target: Callable[..., Any], ranks: Ranks, args: Sequence[Any], folder: Path, threads: int) -> _Started:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    results, report = context.Pipe(duplex=False)
    watched, alive = context.Pipe(duplex=False)
    # The forkserver has the environment and output of the moment it was started; a rank gets those of now.
    environ = {**_LOOPBACK, **os.environ, "OMP_NUM_THREADS": str(threads)}
    with (folder / f"output_{ranks.rank}").open("ab") as unseen:
        shown = [1, 2] if ranks.rank == 0 else [unseen.fileno()] * 2
        output = [Connection(os.dup(descriptor), readable=False) for descriptor in shown]
    life = (target, ranks, args, folder, environ, output, report, watched)
    process = context.Process(target=live, args=life, daemon=True)
    process.start()
    for theirs in (report, watched, *output):
        theirs.close()
    return _Started(ranks.rank, process, results, alive, folder)


def _watch(started: Sequence[_Started], timeout: float) -> None:
    """Return when all have reported and ended well."""
    settled, deadline = math.inf, time.monotonic() + timeout
    failed: list[_Started] = []
    while waited_for := [thing for each in started for thing in each.waited_for]:
        changed = wait(waited_for, max(0.0, min(settled, deadline) - time.monotonic()))
        for each in started:
            each.look()
        failed = [each for each in started if each.report.failure]
        if any(each.report.doubt == 0 for each in failed) or time.monotonic() >= settled:
            break
        if failed:
            settled = min(settled, time.monotonic() + _SETTLE)
        elif not changed:
            late = [each for each in started if each.process.exitcode is None]
            numbers = ", ".join(str(each.rank) for each in late)
            message = f"after {timeout:g} s, {len(late)} of {len(started)} ranks had not finished ({numbers})"
            raise RankFailed(f"{message}:\n{_stacks(late)}", late[0].rank)
    if failed:
        raise _failure(started, min(failed, key=lambda each: each.report.doubt))


def _failure(started: Sequence[_Started], first: _Started) -> RankFailed:
    """What happened to the rank that it began with."""
    report = first.report
    message = f"rank {first.rank} of {len(started)} {report.failure}"
    if report.exit_code == 1:
        message += first.last_words()
    running = [each for each in started if each.report is _NONE]
    if report.doubt == 2 and running:  # nobody failed of himself: somebody did not come
        message += f"\nStill running:\n{_stacks(running)}"
    return RankFailed(message, first.rank, report.traceback, report.exit_code)


def _stacks(running: Sequence[_Started]) -> str:
    """Where the Python of each rank stands now."""
    for each in running:
        with suppress(ProcessLookupError):
            os.kill(each.process.pid, signal.SIGUSR2)  # type: ignore[arg-type]  # started, so it has one
    deadline = time.monotonic() + _STACK_WAIT
    while time.monotonic() < deadline:
        time.sleep(0.1)
        texts = {each.rank: _text(each.folder / f"stack_{each.rank}").rstrip() for each in running}
        if all(texts.values()):
            break
    return "\n".join(f"rank {rank}: {text or '(it gave no answer)'}" for rank, text in texts.items())


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.is_file() else ""


def _end(started: Sequence[_Started]) -> None:
    """Leave no process behind: those that still run are asked, then killed."""
    for each in started:
        each.process.terminate()
    deadline = time.monotonic() + _GRACE
    for each in started:
        each.process.join(max(0.0, deadline - time.monotonic()))
    for each in started:
        each.process.kill()
        each.process.join()
        each.process.close()
        each.results.close()
        each.alive.close()
