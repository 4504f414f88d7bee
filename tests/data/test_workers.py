"""Jobs are shared out among processes that end with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from data.lock import wait_for_holders
from data.preparing.workers import Tell, shared_out
from errors import DataRefused
from tests.conftest import ROOT
from tests.data.working import Square


def quiet(count: int) -> None:
    """Says nothing."""


@pytest.mark.parametrize("workers", [1, 3])
def test_every_job_is_done_once_and_what_is_told_arrives(tmp_path: Path, workers: int) -> None:
    told: list[int] = []
    results = dict(shared_out(Square(), iter(range(20)), workers, told.append, tmp_path / "alive"))
    assert results == {number: number**2 for number in range(20)}
    assert sum(told) == sum(range(20))


def test_workers_are_processes_of_one_thread_and_no_more_of_them_than_jobs(tmp_path: Path) -> None:
    results = shared_out(Square("who"), iter(range(2)), 5, quiet, tmp_path / "alive")
    identities = {result for _, result in results}
    assert 1 <= len({process for process, _ in identities}) <= 2
    assert os.getpid() not in {process for process, _ in identities}
    assert {threads for _, threads in identities} == {"1"}


@pytest.mark.parametrize(
    ("way", "error", "words"),
    [
        ("refused", DataRefused, "not this one"),
        ("bug", RuntimeError, "a worker failed:\n(.|\n)*ZeroDivisionError"),
        ("disk", DataRefused, "a worker cannot go on .*No space left"),
        ("killed", DataRefused, "was killed by SIGKILL"),
        ("exit", DataRefused, "ended with code 7"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_told_here(tmp_path: Path, way: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        list(shared_out(Square(way), iter(range(4)), 2, quiet, tmp_path / "alive"))
    began = time.monotonic()
    wait_for_holders(tmp_path / "alive", "ending", lambda line: None)  # nobody is left
    assert time.monotonic() - began < 1


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom tests.data.working import Square\n"
        "from data.preparing.workers import shared_out\n"
        f"alive = Path({str(tmp_path / 'alive')!r})\n"
        "list(shared_out(Square('slow'), iter(range(4)), 2, lambda n: print(n, flush=True), alive))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()  # a worker is at work
    parent.kill()
    parent.wait()
    ended = threading.Thread(target=wait_for_holders, args=(tmp_path / "alive", "ending", lambda line: None))
    ended.start()
    ended.join(20)
    assert not ended.is_alive()


@dataclass(frozen=True)
class Local:
    """A setup that is used in this process."""

    def __call__(self) -> Callable[[int, Tell], int]:
        return lambda job, tell: os.getpid()


def test_one_worker_is_this_process(tmp_path: Path) -> None:
    assert list(shared_out(Local(), iter([1]), 1, quiet, tmp_path / "alive")) == [(1, os.getpid())]
