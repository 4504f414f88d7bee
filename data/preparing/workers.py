"""Processes that share out jobs: each a fresh Python with one thread, which ends when its parent does.

A fresh interpreter (not a fork, and not multiprocessing's spawn, which would import the parent's main program
with all of torch) is started with its end of a pipe; what it works with travels through that pipe alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

from data.lock import hold_shared
from errors import DataRefused

J = TypeVar("J")
R = TypeVar("R")
Tell = Callable[[int], None]
Work = Callable[[J, Tell], R]
"""Does a job, and tells now and then how many further bytes are done."""

_ONE_THREAD = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS", "POLARS_MAX_THREADS",
)  # fmt: skip
_END_SECONDS = 10.0


def shared_out(
    setup: Callable[[], Work[J, R]], jobs: Iterator[J], workers: int, tell: Tell, alive: Path
) -> Generator[tuple[J, R], None, None]:  # fmt: skip
    """Each job with its result, as they are done; jobs are taken from the iterator when a worker is free.

    `setup`: makes a process ready to work; with more than one of the `workers` it must be picklable, and made of
    importable modules, as must the jobs and the results. `tell`: what the work tells, in this process.
    `alive`: a file that every worker process holds a shared lock on until it ends, so that a new start can wait for
    workers whose parent was killed.

    Raises:
        DataRefused: one was raised in a worker, or a worker was killed.
        RuntimeError: something else went wrong in a worker; its traceback is in the message.
    """
    if workers == 1:
        work = setup()
        return ((job, work(job, tell)) for job in jobs)
    return _shared_out(setup, jobs, workers, tell, alive)


def _shared_out(
    setup: Callable[[], Work[J, R]], jobs: Iterator[J], workers: int, tell: Tell, alive: Path
) -> Generator[tuple[J, R], None, None]:  # fmt: skip
    processes: list[_Worker[J]] = []
    at_work: dict[Connection[Any, Any], _Worker[J]] = {}
    try:
        while True:
            while len(at_work) < workers and (job := next(jobs, None)) is not None:
                worker = next((worker for worker in processes if worker.job is None), None)
                if worker is None:
                    worker = _Worker(setup, alive)
                    processes.append(worker)
                worker.give(job)
                at_work[worker.connection] = worker
            if not at_work:
                return
            for ready in wait(list(at_work)):
                worker = at_work[ready]  # type: ignore[index]
                kind, value = worker.answer()
                if kind == "told":
                    tell(value)
                else:
                    del at_work[worker.connection]
                    yield worker.done(), value
    finally:
        _end(processes, quietly=not at_work)


class _Worker(Generic[J]):
    """A process, and the job that it has."""

    def __init__(self, setup: Callable[[], Work[J, Any]], alive: Path) -> None:
        self.connection, theirs = Pipe()
        paths = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        single = dict.fromkeys(_ONE_THREAD, "1") | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths}
        # A session of its own: Ctrl-C reaches the parent alone, which ends its workers.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "data.preparing.workers", str(theirs.fileno())],
            env=os.environ | single, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self.job: J | None = None
        self._send((alive, setup))

    def give(self, job: J) -> None:
        """Hands it a job."""
        self.job = job
        self._send(job)

    def done(self) -> J:
        """The job that it has finished; it has none afterwards."""
        job, self.job = self.job, None
        if job is None:
            raise RuntimeError("a worker says that it is done, but had no job: its answers are out of order")
        return job

    def answer(self) -> tuple[str, Any]:
        """("told", bytes) or ("done", result)."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            self._refuse_death()
        if kind == "refused":
            raise DataRefused(value)
        if kind == "crashed":
            raise RuntimeError(f"a worker failed:\n{value}")
        return kind, value

    def _send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            self._refuse_death()

    def _refuse_death(self) -> None:
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise DataRefused(
            f"a worker process {how} (SIGKILL: often for want of memory): start the same command again, it goes on "
            "where it stopped; with fewer workers it needs less memory"
        )


def _end(processes: list[_Worker[Any]], quietly: bool) -> None:
    """Ends all: those without work by closing their pipe, others at once (what they write is mended later)."""
    for worker in processes:
        worker.connection.close()
        if not quietly:
            worker.process.kill()
    for worker in processes:
        try:
            worker.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


def serve(connection: Connection[Any, Any]) -> int:
    """A worker's life: gets ready, does jobs until the pipe is closed. Returns its exit code."""

    def tell(count: int) -> None:
        if connection.poll():  # nothing is sent to a worker at work: the parent is gone
            os._exit(1)
        connection.send(("told", count))

    try:
        alive, setup = connection.recv()
        hold_shared(alive)
        work = setup()
        while True:
            connection.send(("done", work(connection.recv(), tell)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except DataRefused as refusal:
        connection.send(("refused", str(refusal)))
    except OSError as error:
        connection.send(("refused", f"a worker cannot go on ({error}): see to it, then start the same command again"))
    except Exception:
        connection.send(("crashed", traceback.format_exc()))
    return 1


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(serve(Connection(int(sys.argv[1]))))
