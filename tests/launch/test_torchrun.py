"""torchrun's failures become one exit code, and torchrun ends with the launcher."""

import os
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch import torchrun
from tests.conftest import ROOT
from tests.launch.test_spawn import running, wait_until


def failed(codes, seconds):
    failures = {}
    for rank, (code, second) in enumerate(zip(codes, seconds, strict=True)):
        failures[rank] = ProcessFailure(rank, 100 + rank, code, "none")
        failures[rank].timestamp = second
    return ChildFailedError("train.py", failures)


@pytest.mark.parametrize(
    "codes, seconds, expected, words",
    [
        ([75, 75], [5, 5], 75, ""),
        ([1, 3], [5, 5], 3, ""),
        ([3, 1], [6, 5], 1, "rank 1 (process 101) failed first: exit code 1"),
        ([-15, -9], [5, 5], 1, "rank 1 (process 101) failed first: killed by SIGKILL"),
        ([-15, 2], [5, 5], 2, ""),
    ],
)
def test_the_code_is_that_of_the_process_that_failed_first(capsys, codes, seconds, expected, words):
    assert torchrun._code(failed(codes, seconds)) == expected
    assert capsys.readouterr().err.strip() == words


def start(tmp_path, script):
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "launch.torchrun", "--standalone", "--nproc-per-node", "2", tmp_path / "script.py"]
    # As under local.sh: a shell waits for it.
    shell = ["bash", "-c", 'trap "" TERM; "$@" & wait $!', "shell", *map(str, command)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(shell, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)


def test_a_code_that_a_process_ends_with_is_not_turned_into_1_and_nothing_is_said(tmp_path):
    with start(tmp_path, "import os, sys; sys.exit(75 if os.environ['RANK'] == '0' else 0)") as process:
        said = process.communicate(timeout=100)[1]
    assert process.returncode == 75
    assert said == ""


def test_when_the_launcher_is_killed_the_processes_are_asked_to_end(tmp_path):
    script = (
        "import os, pathlib, signal, sys, time; here = pathlib.Path(__file__).parent; rank = os.environ['RANK']\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((here / f'asked_{rank}').touch(), sys.exit(75)))\n"
        "(here / f'pid_{rank}').write_text(str(os.getpid())); time.sleep(100)"
    )
    with start(tmp_path, script) as process:
        wait_until(lambda: len(list(tmp_path.glob("pid_*"))) == 2, 100)
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    pids = [int(file.read_text()) for file in tmp_path.glob("pid_*")]
    wait_until(lambda: not any(running(pid) for pid in pids))
    assert len(list(tmp_path.glob("asked_*"))) == 2
