"""Ranks on this machine: what they return, how a failure is told, and that none is left behind."""

import multiprocessing.forkserver as server
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from launch.spawn import RankFailed, run_ranks
from tests.conftest import ROOT
from tests.launch import targets

QUICK = 25  # seconds; a failure takes under one on a quiet machine


def running(pid):
    """Whether a process is there and not merely unburied."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=QUICK):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_left():
    """After each test, the forkserver has no children."""
    yield
    pid = server._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid:
        assert Path(f"/proc/{pid}/task/{pid}/children").read_text().split() == []


def failure(target, world, *args, timeout=60):
    """How it fails, and that this is quick."""
    run_ranks(targets.place, 1, "so that the forkserver is there")
    began = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(target, world, *args, timeout=timeout)
    assert time.monotonic() - began < QUICK
    return caught.value


def test_results_come_in_the_order_of_ranks():
    assert run_ranks(targets.place, 3, "word") == [(0, 3, 0, "word"), (1, 3, 1, "word"), (2, 3, 2, "word")]


def test_a_tensor_comes_back_whole():
    first, second = run_ranks(targets.tensor, 2)
    assert torch.equal(first, torch.zeros(1000, 1000)) and torch.equal(second, torch.ones(1000, 1000))


def test_a_rank_has_the_threads_asked_for_and_the_environment_of_the_caller(monkeypatch):
    for value in ("one", "another"):
        monkeypatch.setenv("FROM_THE_CALLER", value)
        assert run_ranks(targets.surroundings, 2, threads=2) == [(2, "2", value)] * 2


def test_ranks_meet_and_agree():
    for rank_sum, added, texts, empty, refusal in run_ranks(targets.agreements, 4):
        assert rank_sum == 6
        assert added == [6, 4, 2**42]
        assert texts == targets.TEXTS
        assert empty == [""] * 4
        assert "differ in the number of files: rank 0 has 0, rank 2 has 1" in refusal


def test_rank_0_is_heard_and_the_others_are_not(capfd):
    run_ranks(targets.speaks, 3)
    assert capfd.readouterr().out == "this is rank 0\n"


@pytest.mark.parametrize("failing", [0, 2])
def test_a_traceback_is_told_once_while_the_others_wait_in_a_collective(failing, capfd):
    failed = failure(targets.one_fails, 4, failing)
    assert failed.rank == failing and failed.exit_code == 1
    assert str(failed).startswith(f"rank {failing} of 4 failed:\nTraceback")
    assert str(failed).count("Traceback") == 1 and "the odd one" in failed.traceback
    assert (str(failed) + capfd.readouterr().out).count("something odd in layer 17") == 1


def test_a_refusal_keeps_its_words_and_its_code():
    failed = failure(targets.one_refuses, 3)
    assert str(failed) == "rank 1 of 3 refused: step_7 is damaged; remove it"
    assert (failed.rank, failed.exit_code, failed.traceback) == (1, 3, "")


@pytest.mark.parametrize("how, words", [("exit", "exit code 7"), ("kill", "killed by SIGKILL")])
def test_a_rank_that_dies_without_a_word_is_named_with_what_it_printed_last(how, words):
    failed = failure(targets.one_dies, 4, how)
    assert str(failed) == f"rank 2 of 4 ended without a word: {words}\nThe last it printed:\n  on the way out"


def test_a_rank_that_dies_after_its_result_is_named():
    assert str(failure(targets.dies_after_its_result, 2)) == "rank 1 of 2 ended after its result: exit code 9"


def test_a_lost_connection_is_told_when_no_rank_has_a_failure_of_its_own():
    assert "by peer" in failure(targets.one_leaves_early, 3).traceback


def test_a_collective_that_waits_in_vain_shows_where_the_missing_rank_is():
    failed = failure(targets.one_never_comes, 3)
    assert "Timed out" in failed.traceback
    said = str(failed).partition("Still running:\n")[2]
    assert said.startswith("rank 1: ") and "in forgotten_here" in said and "rank 2" not in said


def test_a_timeout_names_the_rank_that_hangs_and_shows_where():
    failed = failure(targets.one_hangs, 3, timeout=1.5)
    assert failed.rank == 1
    assert str(failed).startswith("after 1.5 s, 1 of 3 ranks had not finished (1):\nrank 1: ")
    assert "in forgotten_here" in str(failed) and "in one_hangs" in str(failed)


def test_ranks_that_ignore_sigterm_are_ended_too():
    assert "the odd one" in failure(targets.one_fails_and_the_others_ignore_sigterm, 3).traceback


def test_a_result_that_cannot_be_sent_is_a_failure():
    assert "pickle" in failure(targets.unpicklable, 2).traceback


def test_nothing_outlives_a_caller_that_is_killed(tmp_path):
    code = (
        "import sys; from pathlib import Path; from launch.spawn import run_ranks; from tests.launch import targets; "
        "run_ranks(targets.leave_pid, 3, Path(sys.argv[1]))"
    )
    caller = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    try:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3, 60)
        wait_until(lambda: all(file.read_text() for file in tmp_path.iterdir()))
        ranks = [int(file.read_text()) for file in tmp_path.iterdir()]
        forkserver = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
        assert all(running(pid) for pid in (*ranks, forkserver))
    finally:
        os.kill(caller.pid, signal.SIGKILL)
        caller.wait()
    wait_until(lambda: not any(running(pid) for pid in (*ranks, forkserver)))
