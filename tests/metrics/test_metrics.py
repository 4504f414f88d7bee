"""Records, sinks, the clock and the peak."""

import io
import json
import time

import pytest
import torch

from metrics.clock import PARTS, StepClock
from metrics.config import MetricsConfig
from metrics.reporter import Reporter
from metrics.run_directory import RunDirectory, describe_environment
from metrics.sinks import Console, JsonLines, Wandb, finite_record
from metrics.throughput import format_duration, throughput


def test_parts_of_a_step_add_up_to_the_whole():
    clock = StepClock(torch.device("cpu"))
    clock.finish()
    with clock.part("forward"):
        time.sleep(0.02)
    with clock.part("backward"):
        time.sleep(0.03)
    clock.add("data", 0.005)
    time.sleep(0.02)
    total, parts = clock.finish()
    assert set(parts) == set(PARTS)
    assert sum(parts.values()) == pytest.approx(total)
    assert parts["forward"] >= 0.02 and parts["backward"] >= 0.03 and parts["other"] > 0.01
    assert clock.finish()[0] < 0.02, "the next step begins at nought"


def test_numbers_that_are_not_finite_become_null_and_are_named():
    record = {"step": 3, "loss": float("nan"), "time": {"data": 1.0, "other": float("inf")}}
    assert finite_record(record) == {
        "step": 3, "loss": None, "time": {"data": 1.0, "other": None}, "nonfinite": ["loss", "time.other"],
    }  # fmt: skip
    assert finite_record({"loss": 1.0}) == {"loss": 1.0}


def test_every_line_parses_after_a_kill_amid_a_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "lo')
    lines = JsonLines(file)
    lines.write({"step": 2})
    lines.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2]


def test_what_was_said_before_the_folder_existed_is_in_the_log(tmp_path):
    stream = io.StringIO()
    console = Console(stream)
    console.say("early")
    console.open_log(tmp_path / "log.txt")
    console.say("late")
    console.close()
    assert [line.split(" ", 2)[2] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["early", "late"]
    assert stream.getvalue() == "early\nlate\n"


def test_the_environment_holds_versions_and_no_variables(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t")
    text = describe_environment()
    assert f"torch: {torch.__version__}" in text
    assert "s3cr3t" not in text


def test_a_status_that_is_damaged_reads_as_none(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.status() == {}
    directory.status_file.write_text("{")
    assert directory.status() == {}
    directory.write_status("done", 0, 5, 1)
    assert directory.status() == {"state": "done", "code": 0, "step": 5, "attempt": 1}


def test_mfu_is_needed_flops_over_peak_and_hfu_counts_recomputation():
    speed = throughput(tokens=1000, flops=300, recomputed=100, seconds=2.0, peak=400.0)
    assert (speed.tokens_per_s, speed.mfu, speed.hfu) == (500.0, 0.375, 0.5)


@pytest.mark.parametrize(
    "seconds, text", [(0, "0s"), (59.4, "59s"), (725, "12m05s"), (11220, "3h07m"), (187200, "2d04h")]
)
def test_durations_read_well(seconds, text):
    assert format_duration(seconds) == text


def test_a_disabled_wandb_writes_nothing(tmp_path):
    wandb = Wandb(MetricsConfig(wandb="disabled"), tmp_path, "r", "abc", {})
    wandb.write({"step": 1, "loss": 2.0})
    wandb.close()
    assert not list(tmp_path.iterdir())


def test_the_time_that_is_left_is_told(tmp_path, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("metrics.reporter.time.perf_counter", lambda: now[0])
    reporter = Reporter(Console(), None, None, attempt=1, last_step=50, total_steps=200)
    record = {
        "loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 1.0, "mfu": 0.1, "step_time": 2.0, "skipped": 0,
        "time": {"data": 0.0, "evaluation": 0.0, "checkpoint": 0.0},
    }  # fmt: skip
    for step in (1, 2, 3):
        reporter.step(record | {"step": step})
        now[0] += 2.0
    assert "step   3/200" in capsys.readouterr().out.splitlines()[-1]
    reporter.step(record | {"step": 4})
    assert "eta 1m32s" in capsys.readouterr().out


def test_a_clock_gives_the_rest_to_one_part_and_nested_parts_to_the_outer_one(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("metrics.clock.time.perf_counter", lambda: now[0])
    clock = StepClock(torch.device("cpu"))
    with clock.rest("pipeline_idle"):
        now[0] += 1.0
        for _ in range(2):
            with clock.part("forward"):
                now[0] += 2.0
        now[0] += 0.5
    with clock.part("evaluation"), clock.part("forward"):
        now[0] += 4.0
    now[0] += 0.25
    total, parts = clock.finish()
    assert (parts["pipeline_idle"], parts["forward"], parts["evaluation"], parts["other"]) == (1.5, 4.0, 4.0, 0.25)
    assert total == sum(parts.values()) == 9.75
