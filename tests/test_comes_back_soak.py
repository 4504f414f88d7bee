"""Minutes of what tests/test_comes_back.py promises: many layouts, many kills, full disks (`make soak`)."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import train
from checkpoint.folder import list_checkpoints, step_of
from checkpoint.manifest import verify
from errors import CheckpointRefused
from tests.conftest import ROOT, losses, records, validations
from tests.test_comes_back import events, status
from tests.test_layouts_end_to_end import EXPERTS, QUIET, SHAPE, close, torchrun
from tests.test_train import run_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]


@pytest.fixture
def wide(tiny):
    return [*(o for o in tiny if "micro_batch" not in o), *SHAPE]


EVERYWHERE = [
    (2, ["tp=2"]), (4, ["pp=2", "vpp=2"]), (4, ["zero=3"]), (4, ["tp=2", "pp=2"]), (2, ["ep=2"]), (2, ["cp=2"]),
]  # fmt: skip


@pytest.mark.parametrize("model", [[], EXPERTS], ids=["dense", "experts"])
def test_a_run_goes_on_through_every_kind_of_layout(wide, model):
    """Each start makes three steps, the last one ten; the optimizer's state and the data go on with the weights."""
    wide = [*wide, *model, "train.steps=31", "precision.matmul=highest"]
    assert train.main([*wide, "run.name=whole"]) == 0
    assert train.main([*wide, "train.stop_at=3"]) == 0
    for number, (ranks, layout) in enumerate(EVERYWHERE, 2):
        own = [] if layout == ["ep=2"] and not model else [f"parallel.{each}" for each in layout]
        done = torchrun(ranks, *wide, *own, f"train.stop_at={3 * number}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert status(run_of(wide))["step"] == 3 * number
    assert train.main(wide) == 0
    close(run_of(wide), run_of(wide, "whole"), 1e-5)


def ranks_of(agent):
    """Process ids of the workers that a launcher has started."""
    try:
        return [int(each) for each in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
    except OSError:
        return []


def attempt_of(run):
    """Number of the newest start; 0 before it is written."""
    return status(run)["attempt"] if (run / "status.json").exists() else 0


def sound_or_gone(path):
    """A checkpoint is as it was written; one that is pruned while it is read is read again, if it is still there."""
    try:
        verify(path)
    except (OSError, CheckpointRefused):
        time.sleep(1.0)
        if path.exists():
            verify(path)


def test_ranks_killed_at_random_moments_leave_an_undisturbed_run(wide):
    """A save every step and a short life of each make a kill fall into writing, committing and pruning as often as into
    training; torchrun starts the ranks again."""
    options = [*wide, "train.steps=600", "checkpoint.every=1", "checkpoint.keep=2", "train.eval_every=150"]
    whole = torchrun(2, *options, "run.name=whole", "checkpoint.every=0")
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, "-m", "launch.torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "40"]
    agent = subprocess.Popen(
        [*command, "train.py", *options], cwd=ROOT, env=os.environ | QUIET, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    draw, kills, folder = random.Random(0), 0, run_of(wide) / "checkpoints"
    while kills < 30 and agent.poll() is None:
        attempt = attempt_of(run_of(wide))
        time.sleep(draw.uniform(0.1, 3.0))
        victims = ranks_of(agent.pid)
        if len(victims) < 2:
            continue
        os.kill(draw.choice(victims), signal.SIGKILL)
        kills += 1
        for path in list_checkpoints(folder):
            sound_or_gone(path)
        until = time.monotonic() + 60
        while time.monotonic() < until and agent.poll() is None and attempt_of(run_of(wide)) <= attempt:
            time.sleep(0.2)
    agent.wait(timeout=600)
    assert (agent.returncode, kills) == (0, 30)
    run = run_of(wide)
    assert losses(run) == losses(run_of(wide, "whole")) and validations(run) == validations(run_of(wide, "whole"))
    seen = {r["step"]: r["samples"] for r in records(run) if "event" not in r}
    assert [seen[step] for step in sorted(seen)] == [16 * step for step in range(1, 601)]
    for path in list_checkpoints(folder):
        verify(path)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_wrapper_of_four_ranks_saves_once_and_the_same_command_goes_on(wide, number):
    assert train.main([*wide, "run.name=whole"]) == 0
    command = [
        "bash", "launch/local.sh", "--nproc", "4", "--restarts", "2", "--python", sys.executable, *wide,
        "parallel.pp=2", "checkpoint.every=0",
    ]  # fmt: skip
    started = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | QUIET, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert started.stdout
    for said in started.stdout:
        if said.lstrip().startswith("step"):
            break
    started.send_signal(number)
    said = said + started.communicate(timeout=120)[0]
    assert started.returncode == 75, said
    (saved,) = events(run_of(wide), "checkpoint")
    assert saved["step"] < 20 and status(run_of(wide))["code"] == 75
    again = subprocess.run(command, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    close(run_of(wide), run_of(wide, "whole"), 1e-5)


def test_torchrun_restarts_after_a_kill_and_fewer_ranks_go_on(wide):
    assert train.main([*wide, "run.name=whole", "train.steps=30"]) == 0
    options = [*wide, "train.steps=30", "checkpoint.every=4"]
    command = [sys.executable, "-m", "launch.torchrun", "--standalone", "--max-restarts", "3", "--nproc-per-node"]
    killed = [*command, "4", "train.py", *options, "train.stop_at=18", "debug.inject=[{kind: kill, step: 11, rank: 2}]"]
    done = subprocess.run(killed, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert status(run_of(wide)) == {"state": "paused", "code": 0, "step": 18, "attempt": 2}
    assert [r["step"] for r in events(run_of(wide), "resume")] == [8]
    fewer = [*command, "2", "train.py", *options]
    done = subprocess.run(fewer, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    close(run_of(wide), run_of(wide, "whole"), 1e-5)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("no right to mount a file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk):
    (disk / "filler").write_bytes(b"0" * (shutil.disk_usage(disk).free - 100_000))


def empty(disk):
    (disk / "filler").unlink()


def remount(how, disk):
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


BROKEN_DISKS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], str]] = {
    "full": (fill, empty, "No space left"),
    "read-only": (partial(remount, "ro"), partial(remount, "rw"), "Read-only file system"),
}


@pytest.mark.parametrize("broken", BROKEN_DISKS)
@pytest.mark.parametrize("policy, last_step", [("go_on", 14), ("stop", 8)])
def test_a_disk_that_refuses_goes_by_the_policy_and_the_last_good_checkpoint_stays(
    tiny, small_disk, capsys, policy, last_step, broken
):
    breaks, mends, words = BROKEN_DISKS[broken]
    options = [
        *tiny, f"checkpoint.dir={small_disk / 'ck'}", f"checkpoint.on_failure={policy}", "checkpoint.every=2",
        "checkpoint.keep=1", "checkpoint.background=false",
    ]  # fmt: skip
    assert train.main([*options, "train.stop_at=6"]) == 0
    breaks(small_disk)
    try:
        assert train.main([*options, "train.stop_at=14"]) == 3
        assert words in capsys.readouterr().err
        failed = [r["step"] for r in events(run_of(tiny), "save_failed")]
        assert sorted({*failed}) == [*range(8, last_step + 1, 2)]
        (good,) = list_checkpoints(small_disk / "ck")
        assert step_of(good) == 6
        verify(good)
    finally:
        mends(small_disk)
    assert train.main([*options, "train.stop_at=14"]) == 0
    assert status(run_of(tiny))["step"] == 14


def test_a_vanished_folder_is_told_and_made_again(tiny):
    """The run's checkpoints are removed while it trains."""
    command = [sys.executable, "train.py", *tiny, "train.steps=4000", "checkpoint.every=50"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    for said in process.stdout:
        if said.startswith("saved"):
            break
    shutil.rmtree(run_of(tiny) / "checkpoints")
    for said in process.stdout:
        if said.startswith("saved"):
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    for path in list_checkpoints(run_of(tiny) / "checkpoints"):
        verify(path)
    assert json.loads((run_of(tiny) / "status.json").read_text())["code"] == 75
