"""Sweeps: expanded as Hydra does, checked before the first job, each with a name of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.entry import main
from conf.groups import read_groups
from conf.multirun import plan
from conf.sweep import expand
from errors import ConfigRefused

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from conf.entry import main
from conf.resolve import run_name

def run(config, overrides):
    print("job", run_name(config), config.model.layers, flush=True)
    return {{3: 4, 5: 3, 6: 75}}.get(config.model.layers, 0)

sys.exit(main(run))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def labels(*overrides: str) -> list[str]:
    combinations, problems = expand(overrides, read_groups())
    assert problems == []
    return [each.label for each in combinations]


def test_choices_multiply_with_the_last_varying_fastest() -> None:
    assert labels("model.layers=1,2", "run.seed=7", "optim.lr=0.1,0.2") == [
        "model.layers=1 optim.lr=0.1", "model.layers=1 optim.lr=0.2",
        "model.layers=2 optim.lr=0.1", "model.layers=2 optim.lr=0.2",
    ]  # fmt: skip


def test_ranges_globs_lists_and_quoted_text_are_swept() -> None:
    assert labels("run.seed=range(1,7,2)") == ["run.seed=1", "run.seed=3", "run.seed=5"]
    assert labels("optim.lr=range(0,1,0.5)") == ["optim.lr=0.0", "optim.lr=0.5"]
    assert labels("model=glob(*0*)") == ["model=qwen3_30b_a3b", "model=350m", "model=70b", "model=405b"]
    assert labels("model=glob(*,exclude=*b)") == ["model=moe_nano", "model=nano", "model=125m", "model=350m"]
    assert labels("metrics.wandb_tags=[a,b],[c]") == ["metrics.wandb_tags=[a,b]", "metrics.wandb_tags=[c]"]
    assert labels("run.name='a,b',c") == ["run.name='a,b'", "run.name=c"]


WRONG = [
    (["optim.lr=interval(0,1)"], "key=1,2,3"),
    (["model=glob(x*)"], "names no value"),
    (["run.seed=range(5,1)"], "names no value"),
    (["run.seed=range(1,5,0)"], "cannot be swept"),
    (["run.seed=range(0,100000000)"], "combinations"),
    (["run.seed=range(0,100)", "train.steps=range(60,90)"], "3000 combinations"),
]


@pytest.mark.parametrize(("overrides", "part"), WRONG, ids=[" ".join(case[0]) for case in WRONG])
def test_a_sweep_that_cannot_be_run_is_refused(overrides: list[str], part: str) -> None:
    with pytest.raises(ConfigRefused, match=part):
        plan(overrides)


def test_every_combination_is_checked_and_each_mistake_names_its_own() -> None:
    with pytest.raises(ConfigRefused) as caught:
        plan(["model.kv_heads=2,3", "train.micro_batch=4,5,6", "lr=1"])
    text = str(caught.value)
    assert "4 problems" in text
    assert "model.kv_heads=3 train.micro_batch=4" in text
    assert text.count("unknown key `lr`") == 1


def test_derived_names_differ_by_themselves() -> None:
    names = [job.name for job in plan(["optim.lr=1,2", "model=nano,125m"])]
    assert len(set(names)) == 4
    assert all(name.count("-") == 2 for name in names)


def test_equal_names_are_numbered_and_handed_to_the_job() -> None:
    given = plan(["run.name=mine", "optim.lr=1,2"])
    assert [job.name for job in given] == ["mine-1", "mine-2"]
    assert given[1].overrides[-1] == "run.name='mine-2'"
    assert [job.name for job in plan(["run.name=a,a-1", "optim.lr=1,2"])] == ["a-1", "a-2", "a-1-1", "a-1-2"]
    derived = [job.name for job in plan(["train.eval_every=1,2"])]
    assert [name[-2:] for name in derived] == ["-1", "-2"]


def test_a_single_combination_keeps_its_name() -> None:
    (job,) = plan(["run.name=mine"])
    assert job.name == "mine" and job.overrides == ("run.name=mine",)


def test_jobs_run_one_after_another_and_the_first_failure_is_the_exit_code(
    program: str, capfd: pytest.CaptureFixture[str], somewhere_empty: Path
) -> None:
    assert main(lambda config, overrides: 0, ["-m", "model.layers=2,3,5", "run.name=x"], program) == 4
    out = capfd.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("job")] == [
        "job x-1 2",
        "job x-2 3",
        "job x-3 5",
    ]
    assert [line.split()[:2] for line in out.splitlines()[-3:]] == [["0", "x-1"], ["4", "x-2"], ["3", "x-3"]]
    assert list(somewhere_empty.iterdir()) == []


def test_a_job_that_was_asked_to_stop_ends_the_sweep(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(lambda config, overrides: 0, ["-m", "model.layers=6,2"], program) == 75
    assert "not started" in capfd.readouterr().out


def test_nothing_starts_when_one_combination_is_wrong(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(lambda config, overrides: 0, ["-m", "model.layers=2,0"], program) == 2
    printed = capfd.readouterr()
    assert "job" not in printed.out and "model.layers=0" in printed.err


@pytest.mark.parametrize(
    "started",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {
            "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n1",
        },
    ],
    ids=["torchrun", "srun"],
)  # fmt: skip
def test_a_sweep_under_a_launcher_is_refused(
    started: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert main(lambda config, overrides: 0, ["-m", "optim.lr=1,2"]) == 2
    said = capsys.readouterr().err
    assert "rank of a launcher" in said and "torchrun of its own" in said


def test_a_sweep_over_layouts_is_refused_with_how_to_start_each() -> None:
    with pytest.raises(ConfigRefused, match="torchrun --nproc-per-node 2"):
        plan(["parallel.tp=1,2"])
