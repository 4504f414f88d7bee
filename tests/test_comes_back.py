"""Runs that come back by themselves: damage, failed saves, ends that are asked for, spikes; weights that are loaded."""

import json
import shutil

import pytest

import train
from checkpoint.folder import list_checkpoints, step_of
from tests.conftest import losses, records, validations
from tests.test_train import run_of


def events(run, kind):
    return [r for r in records(run) if r.get("event") == kind]


def status(run):
    return json.loads((run / "status.json").read_text())


def flip(file, at=-9):
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.fixture
def stopped(tiny):
    """A run of 20 steps that stands at step 12, with checkpoints of 6 and 12, beside an undisturbed one."""
    assert train.main([*tiny, "run.name=whole"]) == 0
    assert train.main([*tiny, "train.stop_at=12"]) == 0
    return tiny


DAMAGE = {
    "a flipped byte of a weight": lambda path: flip(path / "tensors.safetensors"),
    "a cut file": lambda path: (path / "state.json").write_text((path / "state.json").read_text()[:-40]),
    "a missing file": lambda path: (path / "tensors.safetensors").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_it_used(stopped, capsys, damage):
    run = run_of(stopped)
    damage(run / "checkpoints" / "step_00000012")
    assert train.main(stopped) == 0
    assert losses(run) == losses(run_of(stopped, "whole"))
    (told,) = events(run, "damaged")
    assert told["step"] == 6 and "damaged_step_00000012" in capsys.readouterr().out
    assert [r["step"] for r in events(run, "resume")] == [6]
    assert len(list((run / "checkpoints").glob("damaged_step_00000012*"))) == 1


def test_where_every_checkpoint_is_damaged_nothing_begins_anew(stopped, capsys):
    for path in list_checkpoints(run_of(stopped) / "checkpoints"):
        flip(path / "tensors.safetensors")
    assert train.main(stopped) == 3
    said = capsys.readouterr().err
    assert "step_00000012" in said and "step_00000006" in said and "restore one of them" in said
    assert [step_of(path) for path in list_checkpoints(run_of(stopped) / "checkpoints")] == [6, 12]


def test_another_runs_damaged_checkpoint_is_refused_by_name(stopped, capsys):
    path = run_of(stopped) / "checkpoints" / "step_00000012"
    flip(path / "tensors.safetensors")
    assert train.main([*stopped, "run.name=other", f"checkpoint.resume={path}"]) == 3
    assert f"{path} is damaged: tensors.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("background", ["true", "false"])
def test_checkpoints_of_every_so_many_steps_are_kept_for_ever(tiny, background):
    keep = ["checkpoint.every=2", "checkpoint.keep=2", "checkpoint.keep_every=6", f"checkpoint.background={background}"]
    assert train.main([*tiny, *keep]) == 0
    assert [step_of(path) for path in list_checkpoints(run_of(tiny) / "checkpoints")] == [6, 12, 18, 20]


def test_a_faster_folder_has_the_newest_and_all_come_to_the_runs_own(stopped, tmp_path):
    local = [f"checkpoint.local={tmp_path / 'fast'}", "checkpoint.every=4"]
    assert train.main([*stopped, *local]) == 0
    assert [step_of(path) for path in list_checkpoints(tmp_path / "fast" / "tiny")] == [16, 20]
    assert [step_of(path) for path in list_checkpoints(run_of(stopped) / "checkpoints")] == [16, 20]
    flip(tmp_path / "fast" / "tiny" / "step_00000020" / "tensors.safetensors")
    assert train.main([*stopped, *local, "train.steps=24", "checkpoint.allow=[train.steps]"]) == 0
    (told,) = events(run_of(stopped), "damaged")
    assert told["step"] == 20  # the run's own copy of the same step is sound


FULL = "debug.inject=[{kind: disk_full, step: 12}]"


def test_a_full_disk_costs_a_checkpoint_not_the_run(stopped):
    run = run_of(stopped, "full")
    assert train.main([*stopped, "run.name=full", FULL]) == 0
    (failed,) = events(run, "save_failed")
    assert failed["step"] == 12 and "No space left" in failed["error"]
    assert [r["step"] for r in events(run, "checkpoint")] == [6, 18, 20]
    assert losses(run) == losses(run_of(stopped, "whole"))


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_full_disk_stops_the_run_where_that_is_the_policy(tiny, capsys, background):
    policy = ["checkpoint.on_failure=stop", f"checkpoint.background={background}", "train.steps=40"]
    assert train.main([*tiny, FULL, *policy]) == 3
    run = run_of(tiny)
    assert "No space left" in capsys.readouterr().err and status(run)["code"] == 3
    assert [step_of(path) for path in list_checkpoints(run / "checkpoints")] == [6]
    assert train.main([*tiny, *policy]) == 0


def test_the_last_checkpoint_must_be_written(tiny, capsys):
    assert train.main([*tiny, "debug.inject=[{kind: disk_full, step: 20}]"]) == 3
    assert "No space left" in capsys.readouterr().err
    assert train.main(tiny) == 0


def test_hours_that_are_over_save_and_end_with_75(stopped):
    assert train.main([*stopped, "train.max_hours=1e-9"]) == 75
    assert status(run_of(stopped)) == {"state": "stopped", "code": 75, "step": 13, "attempt": 2}
    assert train.main(stopped) == 0
    assert losses(run_of(stopped)) == losses(run_of(stopped, "whole"))


def test_a_new_run_begins_with_anothers_weights_alone(stopped):
    whole, new = run_of(stopped, "whole"), run_of(stopped, "new")
    assert train.main([*stopped, "run.name=new", f"checkpoint.load={whole}", "optim.lr=1e-9", "train.steps=1"]) == 0
    assert validations(new)[1] == pytest.approx(validations(whole)[20], abs=1e-4)
    (first,) = losses(new)
    assert first == 1
    shutil.rmtree(whole)
    assert train.main([*stopped, "run.name=new", f"checkpoint.load={whole}", "optim.lr=1e-9", "train.steps=1"]) == 0


def test_weights_that_do_not_fit_are_named_and_may_be_left_out(stopped, capsys):
    other = [*stopped, "run.name=new", f"checkpoint.load={run_of(stopped, 'whole')}", "model.layers=3", "train.steps=2"]
    assert train.main(other) == 3
    said = capsys.readouterr().err
    assert "layers.2" in said and "checkpoint.load_except=[" in said
    assert train.main([*other, "checkpoint.load_except=[layers.2.*]"]) == 0
    assert "layers.2" in capsys.readouterr().out


SPIKES = ["health.window=8", "health.sigma=1e-6", "checkpoint.every=2", "train.steps=40", "optim.lr=3e-2"]


def test_a_spike_is_told(tiny):
    assert train.main([*tiny, *SPIKES]) == 0
    found = events(run_of(tiny), "spike")
    assert found and all(each["step"] > 8 and each["policy"] == "log" for each in found)
    assert not events(run_of(tiny), "rollback")


def test_a_spike_may_change_nothing(tiny):
    assert train.main([*tiny, *SPIKES, "health.spike=skip"]) == 0
    run = run_of(tiny)
    before = [each for each in events(run, "spike") if each["step"] < 40]  # the last one is read after its record
    assert [r["skipped"] for r in records(run) if r["step"] == 40 and "event" not in r] == [len(before)]
    assert train.main([*tiny, *SPIKES, "health.spike=skip", "run.name=twice", "train.stop_at=21"]) == 0
    assert train.main([*tiny, *SPIKES, "health.spike=skip", "run.name=twice"]) == 0
    assert losses(run) == losses(run_of(tiny, "twice"))


def test_a_spike_may_end_the_run(tiny, capsys):
    assert train.main([*tiny, *SPIKES, "health.spike=stop"]) == 4
    assert "health.spike=stop" in capsys.readouterr().err


def test_a_spike_may_be_gone_back_before_and_its_data_passed_over(tiny, capsys):
    assert train.main([*tiny, *SPIKES, "health.spike=rollback", "health.max_rollbacks=2"]) in (0, 4)
    run = run_of(tiny)
    first, *more = events(run, "rollback")
    spike = events(run, "spike")[0]["step"]
    assert len(more) < 2 and first["last"] == spike and first["step"] < spike
    passed = [r for r in events(run, "skip") if r["step"] == spike]
    assert passed and "after the spike" in capsys.readouterr().out
    made = [r["step"] for r in records(run) if "event" not in r]
    assert made.count(spike) == 1 and made.count(spike - 1) == (1 if first["step"] == spike - 1 else 2)
