"""local.sh and train.sbatch keep the contract of exit codes, whatever the trainer, torchrun or Slurm do."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

LOCAL, SBATCH = "launch/local.sh", "launch/train.sbatch"
ODD = [
    "run.name=two words", "data.sources=[{name: 'it''s', prefix: \"/a b\", weight: 0.7}]", "extra.a=$HOME `id` $(id)",
    "extra.b=;|&<>", "extra.c=*", "extra.d=", "extra.e=\\n\"'", "extra.f=größer", "~extra.g", "extra.h=a\nb",
]  # fmt: skip


class Launcher:
    """A launcher with stubs in the places of python, srun and scontrol."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder, self.run, self.script = folder, folder / "run", script
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name in ("python", "srun", "scontrol"):
            stub = bin_folder / name
            stub.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {bin_folder / "stubs" / name} "$@"\n')
            stub.chmod(0o755)
            (bin_folder / "stubs").mkdir(exist_ok=True)
            shutil.copy(Path(__file__).parent / "stub.py", bin_folder / "stubs" / name)
        self.environ = os.environ | {
            "STUB": str(folder), "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHON": "python",
            "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "41", "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "32",
        }  # fmt: skip

    def start(self, plan: list[object], *words: str, **environ: str) -> "subprocess.Popen[str]":
        """Start it, in a process group of its own."""
        (self.folder / "ready").unlink(missing_ok=True)
        options = ["--python", "python"] if self.script == LOCAL else []
        return subprocess.Popen(
            ["bash", self.script, *options, *words], cwd=ROOT, text=True, stderr=subprocess.PIPE,
            env=self.environ | {"PLAN": json.dumps(plan)} | environ, start_new_session=True,
        )  # fmt: skip

    def code(self, plan: list[object], *words: str, **environ: str) -> int:
        """Run it to its end; its exit code."""
        with self.start(plan, *words, **environ) as process:
            self.said = process.communicate(timeout=60)[1]
        return process.returncode

    def code_of_asked(self, plan: list[object], *signals: int, words: tuple[str, ...] = ()) -> int:
        """Send signals once the trainer runs, as a terminal does (to the group) or Slurm (to the script); the code."""
        with self.start(plan, *words) as process:
            self.wait_until(lambda: (self.folder / "ready").exists())
            for number in signals:
                (os.killpg if self.script == LOCAL else os.kill)(process.pid, number)
                time.sleep(0.2)
            self.said = process.communicate(timeout=60)[1]
        return process.returncode

    def wait_until(self, condition) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def lines(self, name: str) -> list[Any]:
        """What a stub noted."""
        file = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def status(self, code: int | None, attempt: int = 1, step: int = 0) -> None:
        """What an earlier start has left."""
        self.run.mkdir(exist_ok=True)
        record = {"state": "x", "code": code, "step": step, "attempt": attempt}
        (self.run / "status.json").write_text(json.dumps(record))


@pytest.fixture
def local(tmp_path):
    return Launcher(tmp_path, LOCAL)


@pytest.fixture
def slurm(tmp_path):
    return Launcher(tmp_path, SBATCH)


@pytest.fixture(params=[LOCAL, SBATCH], ids=["local.sh", "train.sbatch"])
def either(request, tmp_path):
    return Launcher(tmp_path, request.param)


@pytest.mark.parametrize("code", [0, 2, 3, 4, 75])
def test_the_codes_of_the_contract_pass_through_without_a_restart(either, code):
    words = ["--restarts", "3"] if either.script == LOCAL else []
    assert either.code([code], *words) == code
    assert len(either.lines("starts")) == 1 and either.lines("scontrol") == []
    assert f"exit code {code}: " in either.said


def test_words_arrive_as_they_were_given(either):
    assert either.code([0], *ODD) == 0
    assert either.lines("checks")[0][-len(ODD) :] == ODD
    assert either.lines("starts")[0][-len(ODD) - 1 :] == ["train.py", *ODD]


def test_a_refused_configuration_starts_nothing(either):
    assert either.code([0], CHECK="2") == 2
    assert either.lines("starts") == []


def test_the_refusal_of_the_configuration_itself_is_shown(local):
    began = time.monotonic()
    assert local.code([0], "--nproc", "4", "--python", sys.executable, "trian.steps=3", "train.micro_batch=3") == 2
    assert time.monotonic() - began < 20
    assert "trian.steps=3" in local.said and "train.micro_batch=3" in local.said and "Traceback" not in local.said


@pytest.mark.parametrize("code", [0, 2, 75])
def test_a_stale_status_is_not_believed(either, code):
    either.status(code)
    assert either.code(["silent"], MAX_RESTARTS="0") == 1


def test_a_status_written_again_without_a_new_attempt_is_believed(either):
    either.status(75)
    assert either.code(["refused early"]) == 2
    assert either.code(["refused early"]) == 2


def test_a_stop_request_is_withdrawn_when_the_run_ended_otherwise(either):
    assert either.code_of_asked(["deaf"], signal.SIGTERM, signal.SIGTERM) == 1
    assert not (either.run / "stop").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_asks_for_a_save_and_an_end(local, number):
    assert local.code_of_asked(["obey"], number, words=("--restarts", "2")) == 75
    assert local.lines("signals") == []
    assert len(local.lines("starts")) == 1
    assert f"{number.name}: asked the run to save and end" in local.said


def test_a_second_signal_ends_the_processes(local):
    assert local.code_of_asked(["deaf"], signal.SIGINT, signal.SIGINT, words=("--restarts", "2")) == 1
    assert local.lines("signals") == ["SIGTERM"]
    assert len(local.lines("starts")) == 1


@pytest.mark.parametrize("ended_by", ["the signal", "the handler"])
def test_the_code_of_a_process_that_ends_while_a_signal_is_handled_is_kept(ended_by):
    script = (
        "run=/nowhere program=test; . launch/common.sh; ask_to_stop() { sleep 0.3; asked=1; }\n"
        "trap 'on_signal SIGUSR1' USR1; pause=$1\n"
        '(trap \'exit 7\' TERM; sleep 0.1; kill -USR1 $$; sleep "$pause" & wait; exit 7) & wait_for $!; echo "$ended"\n'
    )
    pause = "0" if ended_by == "the signal" else "0.1"
    said = subprocess.run(["bash", "-c", script, "bash", pause], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert said.stdout == "7\n"


def test_a_crash_is_started_again_as_often_as_allowed(local):
    assert local.code(["crash"], "--restarts", "1") == 1
    assert len(local.lines("starts")) == 2
    assert "start 1 of at most 1 more" in local.said


def test_a_start_after_a_crash_may_end_well(local):
    assert local.code(["crash", "silent", 0], "--restarts", "5") == 0
    assert len(local.lines("starts")) == 3


def test_without_restarts_a_crash_ends_it(local):
    assert local.code(["crash"]) == 1
    assert len(local.lines("starts")) == 1


def test_torchrun_gets_the_number_of_processes_and_where_they_meet(local):
    assert local.code([0], "--nproc=4", "train.steps=3") == 0
    assert local.lines("checks") == [["--ranks", "4", "train.steps=3"]]
    assert local.lines("starts")[0] == [
        "-m", "launch.torchrun", "--standalone", "--nproc-per-node", "4", "--max-restarts", "0",
        "train.py", "train.steps=3",
    ]  # fmt: skip


def test_hosts_meet_at_the_master(local):
    words = ["--nproc", "2", "--nodes", "3", "--node-rank", "1", "--master", "first:1234", "--config-dir", "my conf"]
    assert local.code([0], *words) == 0
    assert local.lines("checks") == [["--ranks", "6", "--config-dir", "my conf"]]
    assert local.lines("starts")[0] == [
        "-m", "launch.torchrun", "--nnodes", "3", "--node-rank", "1", "--master-addr", "first",
        "--master-port", "1234", "--nproc-per-node", "2", "--max-restarts", "0", "train.py", "--config-dir", "my conf",
    ]  # fmt: skip


def test_without_a_gpu_one_process_is_started_and_this_is_said(local):
    assert local.code([0], CUDA_VISIBLE_DEVICES="") == 0
    assert "--nproc 1 (no GPU found)" in local.said
    assert local.code([0], CUDA_VISIBLE_DEVICES="0,3") == 0
    assert "--nproc 2 (GPUs of CUDA_VISIBLE_DEVICES)" in local.said


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc", "none"], ["--nproc", "0"], ["--nproc"], ["--restarts", "-1"], ["--verbose"], ["-m"],
        ["--nodes", "2"], ["--nodes", "2", "--node-rank", "2", "--master", "a"], ["--nodes", "2", "--node-rank", "0"],
        ["--nodes", "2", "--node-rank", "0", "--master", "a:b"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_wrong_option_is_refused_in_words(local, words):
    assert local.code([0], *words) == 2
    assert local.said.startswith("local.sh: ") and "usage: " in local.said
    assert local.lines("checks") == local.lines("starts") == []


def test_srun_starts_one_task_a_gpu(slurm):
    assert slurm.code([0], "train.steps=3") == 0
    assert slurm.lines("checks") == [["--ranks", "8", "train.steps=3"]]
    assert slurm.lines("starts")[0] == [
        "--nodes", "2", "--ntasks", "8", "--ntasks-per-node", "4", "--cpus-per-task", "8", "--kill-on-bad-exit=1",
        "python", "train.py", "train.steps=3",
    ]  # fmt: skip


def test_without_gpus_the_tasks_of_a_node_are_as_asked(slurm):
    assert slurm.code([0], SLURM_GPUS_ON_NODE="", SLURM_NTASKS_PER_NODE="3", SLURM_CPUS_ON_NODE="2") == 0
    assert slurm.lines("starts")[0][3:8] == ["6", "--ntasks-per-node", "3", "--cpus-per-task", "1"]


def test_near_the_time_limit_the_job_saves_and_is_requeued(slurm):
    assert slurm.code_of_asked(["obey"], signal.SIGUSR1) == 75
    assert slurm.lines("scontrol") == [["requeue", "41"]]
    assert slurm.lines("signals") == []


def test_a_job_that_was_asked_to_end_is_not_requeued(slurm):
    assert slurm.code_of_asked(["obey"], signal.SIGTERM) == 75
    assert slurm.code_of_asked(["deaf"], signal.SIGTERM, signal.SIGTERM) == 1
    assert slurm.lines("scontrol") == []


def test_a_run_that_stopped_by_its_own_file_is_not_requeued(slurm):
    assert slurm.code([75]) == 75
    assert slurm.lines("scontrol") == []


def test_a_crash_is_requeued_while_fewer_in_a_row_than_allowed_came_no_further(slurm):
    for restart in range(3):
        assert slurm.code(["crash"], MAX_RESTARTS="2", SLURM_RESTART_COUNT=str(restart)) == 1
        assert len(slurm.lines("scontrol")) == min(restart + 1, 2)
    assert "2 restarts in a row came no further" in slurm.said


def test_crashes_between_which_the_run_gets_on_are_always_requeued(slurm):
    for restart in range(4):
        assert slurm.code(["progress and crash"], MAX_RESTARTS="1", SLURM_RESTART_COUNT=str(restart)) == 1
    assert len(slurm.lines("scontrol")) == 4


def test_a_refused_requeue_is_said(slurm):
    assert slurm.code(["crash"], SCONTROL="1") == 1
    assert "submit the same command again" in slurm.said


def test_the_job_script_is_not_for_a_shell(slurm):
    del slurm.environ["SLURM_SUBMIT_DIR"]
    assert slurm.code([0]) != 0
    assert "submit this script with sbatch" in slurm.said and slurm.lines("checks") == []


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_the_scripts_please_shellcheck():
    checked = subprocess.run(
        ["shellcheck", "-x", LOCAL, SBATCH, "launch/common.sh"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout
