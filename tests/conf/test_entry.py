"""The command line: flags anywhere, refusals without tracebacks, exit codes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from conf.compose import compose
from conf.convert import from_dict
from conf.entry import main
from conf.flags import FLAGS, Flag, parse
from conf.schema import Config
from errors import ConfigRefused, DataRefused, Diverged, StopRequested

ROOT = Path(__file__).resolve().parents[2]


def nothing(config: Config, overrides: list[str]) -> int:
    return 0


def test_the_run_gets_the_config_and_the_overrides_and_its_code_is_returned() -> None:
    seen = []

    def run(config: Config, overrides: list[str]) -> int:
        seen.append((config.train.steps, overrides))
        return 7

    assert main(run, ["train.steps=70", "optim.lr=1"]) == 7
    assert seen == [(70, ["train.steps=70", "optim.lr=1"])]


@pytest.mark.parametrize(
    "argv", [["--cfg", "job", "optim.lr=2"], ["optim.lr=2", "-c", "job"], ["--cfg=job", "optim.lr=2"]]
)
def test_cfg_job_prints_yaml_that_parses_to_the_same_config(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(nothing, argv) == 0
    assert from_dict(yaml.safe_load(capsys.readouterr().out)) == compose(["optim.lr=2"])


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["lr=3", "--help"]])
def test_help_is_printed_whatever_else_is_said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(nothing, argv) == 0
    assert "train.global_batch=8" in capsys.readouterr().out


def test_a_config_dir_may_stand_anywhere(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("hidden: 64\n")
    seen: list[int] = []

    def run(config: Config, overrides: list[str]) -> int:
        seen.append(config.model.hidden)
        return 0

    for argv in (["-cd", str(tmp_path), "model=mine"], ["model=mine", f"--config-dir={tmp_path}"]):
        assert main(run, argv) == 0
    assert seen == [64, 64]


WRONG = [
    (["--hlep"], "did you mean --help"),
    (["--multi-run"], "did you mean --multirun"),
    (["--steps=3"], "settings have no dashes: write train.steps=3"),
    (["--optim.lr", "3"], "settings have no dashes: write optim.lr=VALUE"),
    (["--zzz"], "the flags are"),
    (["--cfg"], "write --cfg job"),
    (["--cfg", "hydra"], "write --cfg job"),
    (["--cfg", "jbo"], "did you mean job"),
    (["--config-dir"], "write --config-dir DIR"),
    (["--config-dir", "nowhere"], "does not exist"),
    (["--config-dir", "nowhere", "-m", "optim.lr=1,2"], "does not exist"),
    (["--config-name", "x"], "experiment=NAME"),
    (["--help=3"], "takes no value"),
    (["--cfg", "job", "-m"], "leave out -m"),
    (["lr=3"], "did you mean `optim.lr`"),
]


@pytest.mark.parametrize(("argv", "part"), WRONG, ids=[" ".join(case[0]) for case in WRONG])
def test_a_wrong_command_line_ends_with_2_and_words(
    argv: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(nothing, argv) == 2
    printed = capsys.readouterr()
    assert part in printed.err
    assert "Traceback" not in printed.err and printed.out == ""


def test_all_wrong_flags_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(nothing, ["--hlep", "--zzz", "--cfg"]) == 2
    assert "3 problems" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ConfigRefused("a"), 2),
        (DataRefused("b"), 3),
        (Diverged("c"), 4),
        (StopRequested("d"), 75),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_refusal_becomes_its_exit_code(raised: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def run(config: Config, overrides: list[str]) -> int:
        raise raised

    assert main(run, []) == code
    assert str(raised) in capsys.readouterr().err


def started_as(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))


SAID = [
    (["lr=3"], 2),
    (["--hlep"], 2),
    (["--cfg", "jbo"], 2),
    (["parallel.tp=3"], 2),
    (["-m", "optim.lr=1,2"], 2),
    (["--help"], 0),
    (["train.micro_batch=4", "--cfg", "job"], 0),
]


@pytest.mark.parametrize(("argv", "code"), SAID, ids=[" ".join(case[0]) for case in SAID])
def test_every_rank_comes_to_the_same_exit_code_and_rank_0_says_why(
    argv: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        started_as(monkeypatch, rank, 2)
        assert main(nothing, argv) == code
        printed = capsys.readouterr()
        assert ((printed.out if code == 0 else printed.err) != "") == (rank == 0)


@pytest.mark.parametrize(
    ("raised", "code"), [(DataRefused("b"), 3), (StopRequested("d"), 75), (KeyboardInterrupt(), 130)]
)
def test_a_refusal_inside_the_run_is_said_by_rank_0_alone(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config, overrides: list[str]) -> int:
        raise raised

    for rank in (0, 3):
        started_as(monkeypatch, rank, 4)
        assert main(run, ["train.micro_batch=2"]) == code
        assert (capsys.readouterr().err != "") == (rank == 0)


def test_the_rules_know_how_many_processes_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(nothing, ["parallel.tp=2"]) == 2
    started_as(monkeypatch, 1, 2)
    assert main(nothing, ["parallel.tp=2"]) == 0


def test_a_launcher_that_does_not_number_its_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(nothing, []) == 2
    assert "RANK=None" in capsys.readouterr().err


def test_other_commands_add_their_own_flags() -> None:
    invocation = parse(
        ["--ranks", "4", "optim.lr=1", "--steps=2"],
        (*FLAGS, Flag(("--ranks",), "N", ""), Flag(("--steps",), "K", "")),
    )
    assert invocation.flags == {"--ranks": "4", "--steps": "2"}
    assert invocation.overrides == ("optim.lr=1",)


def test_a_wrong_command_is_answered_within_seconds_and_without_torch() -> None:
    refused = "code = main(lambda config, overrides: 0, ['lr=3'])"
    code = f"import sys; from conf.entry import main; {refused}; sys.exit('torch' in sys.modules or code)"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, time.monotonic() - started < 10) == (2, True), done.stderr
