"""Runs in several processes, as users start them: torchrun, the wrapper, a resume in another layout, refusals."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

import train
from tests.conftest import ROOT, losses, records, validations
from tests.test_train import run_of

# Twelve micro-batches would do for any schedule; a model that four ranks can cut in every way.
SHAPE = ["model.layers=4", "model.heads=4", "model.kv_heads=2", "train.global_batch=16", "precision=fp32"]
QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.fixture
def wide(tiny):
    return [*(o for o in tiny if "micro_batch" not in o), *SHAPE]


def torchrun(ranks, *overrides, before=(), timeout=150, **options):
    """before: further options of torchrun."""
    command = [sys.executable, "-m", "launch.torchrun", "--standalone", "--nproc-per-node", str(ranks), *before]
    return subprocess.run(
        [*command, "train.py", *overrides], cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True,
        timeout=timeout, check=False, **options,
    )  # fmt: skip


def close(run, reference, tolerance):
    assert losses(run).keys() == losses(reference).keys()
    for step, (loss, norm) in losses(reference).items():
        assert losses(run)[step][0] == pytest.approx(loss, abs=tolerance), step
        assert losses(run)[step][1] == pytest.approx(norm, rel=10 * tolerance), step
    for step, value in validations(reference).items():
        assert validations(run)[step] == pytest.approx(value, abs=tolerance), step


def test_a_run_under_torchrun_has_the_losses_of_one_process_and_one_voice(wide):
    assert train.main([*wide, "run.name=one"]) == 0
    done = torchrun(4, *wide, "parallel.tp=2", "parallel.pp=2")
    assert done.returncode == 0, done.stderr
    run = run_of(wide)
    close(run, run_of(wide, "one"), 1e-5)
    assert done.stdout.count("step  1/20 |") == 1
    assert "rank 3: pp 1 tp 1" in done.stdout and "pipeline: 1f1b" in done.stdout
    assert len(list((run / "logs").glob("rank_*.txt"))) == 4
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    assert all(sum(r["time"].values()) == pytest.approx(r["step_time"]) for r in records(run) if "event" not in r)


EXPERTS = [
    "model.moe={experts: 8, top_k: 2, ffn: 24, score: sigmoid, balance: bias, bias_rate: 1e-2, first_dense: 1}",
]


IMPOSSIBLE = {
    "tp does not divide the processes": ["parallel.tp=3"],
    "pp does not divide the processes": ["parallel.pp=3"],
    "tp * pp above the processes": ["parallel.tp=4", "parallel.pp=2"],
    "more tp than kv heads": ["parallel.tp=4"],
    "an ffn that does not divide": ["parallel.tp=2", "model.ffn=47"],
    "a vocabulary that does not divide": ["parallel.tp=2", "model.vocab_multiple=3"],
    "an odd sequence under tp": ["parallel.tp=2", "train.seq_len=31", "train.micro_batch=1"],
    "fewer layers than stages": ["parallel.pp=4", "model.layers=3"],
    "vpp without pp": ["parallel.vpp=2"],
    "vpp under 1f1b": ["parallel.pp=2", "parallel.vpp=2", "parallel.schedule=1f1b"],
    "a looped schedule with one stage": ["parallel.pp=2", "parallel.vpp=1", "parallel.schedule=interleaved"],
    "a V of three stages": ["parallel.pp=2", "parallel.vpp=3", "parallel.schedule=zbv", "model.layers=6"],
    "a schedule without pp": ["parallel.schedule=gpipe"],
    "too few micro-batches": ["parallel.pp=4", "train.micro_batch=8"],
    "too few for a double pipe": ["parallel.pp=2", "parallel.schedule=dualpipev", "train.micro_batch=4"],
    "a batch that does not divide": ["train.global_batch=10"],
    "a micro-batch that does not divide": ["train.micro_batch=3"],
    "replicas that do not divide": ["parallel.replicate=3"],
    "replicas without shards": ["parallel.zero=0", "parallel.replicate=2"],
    "a fifth zero": ["parallel.zero=4"],
    "layers that do not add up": ["parallel.pp=2", "parallel.layers_per_stage=[1,2]"],
    "compiled halves": ["parallel.pp=2", "parallel.schedule=zbv", "train.compile=true"],
    "three faults at once": ["parallel.tp=3", "parallel.zero=9", "train.micro_batch=5"],
}


# The rest in `make soak`; their rules are tested in one process by tests/conf.
SHORT = ("three faults at once",)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(wrong, id=name, marks=() if name in SHORT else pytest.mark.soak)
        for name, wrong in IMPOSSIBLE.items()
    ],
)
def test_an_impossible_layout_is_refused_by_all_ranks_and_told_once(wide, wrong):
    """Four processes with the variables that torchrun gives; none waits for another."""
    began = time.perf_counter()
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py", *wide, *wrong], cwd=ROOT, text=True, stderr=subprocess.PIPE,
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"},
        )
        for rank in range(4)
    ]  # fmt: skip
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert time.perf_counter() - began < 50
    assert [rank.returncode for rank in ranks] == [2] * 4, said
    assert said[1:] == [""] * 3
    assert "rule:" in said[0] and "fix:" in said[0] and "Traceback" not in said[0]
    assert any(word.split("=")[0] in said[0] for word in wrong)


def test_torchrun_passes_a_refusal_on(wide):
    began = time.perf_counter()
    done = torchrun(4, *wide, "parallel.tp=3")
    assert (done.returncode, time.perf_counter() - began < 50) == (2, True)
    assert done.stderr.count("The configuration is refused") == 1 and "Traceback" not in done.stderr


def by_hand(port, settings, *overrides):
    """Ranks started one by one with the launcher's variables, each with settings of its own."""
    return [
        subprocess.Popen(
            [sys.executable, "train.py", *overrides, *own], cwd=ROOT, text=True, stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | QUIET | {
                "RANK": str(rank), "WORLD_SIZE": str(len(settings)), "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
        )
        for rank, own in enumerate(settings)
    ]  # fmt: skip


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def until_a_step(process):
    for said in process.stdout:
        if said.lstrip().startswith("step "):
            return


def test_processes_with_other_settings_are_refused_by_name(wide):
    ranks = by_hand(free_port(), [[], ["train.eval_samples=9"]], *wide)
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert "differ in the settings train.eval_samples" in said[0][1] and said[1][1] == ""


def test_a_process_that_is_killed_ends_all_and_the_run_says_so(wide):
    ranks = by_hand(free_port(), [["train.steps=100000"]] * 2, *wide, "checkpoint.every=0")
    until_a_step(ranks[0])
    began = time.perf_counter()
    ranks[1].kill()
    _, error = ranks[0].communicate(timeout=60)
    assert time.perf_counter() - began < 30 and ranks[0].returncode == 1
    assert "rank 0 lost another process" in error and "Traceback" not in error
    status = json.loads((run_of(wide) / "status.json").read_text())
    assert (status["state"], status["code"]) == ("failed", 1) and status["step"] > 0


def test_a_leader_that_is_killed_is_spoken_for(wide):
    ranks = by_hand(free_port(), [["train.steps=100000"]] * 2, *wide, "checkpoint.every=0", "parallel.pp=2")
    until_a_step(ranks[0])
    ranks[0].kill()
    _, error = ranks[1].communicate(timeout=60)
    assert ranks[1].returncode == 1 and "rank 1 lost another process" in error
    status = json.loads((run_of(wide) / "status.json").read_text())
    assert (status["state"], status["code"]) == ("failed", 1)
