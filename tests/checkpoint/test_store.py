"""Checkpoints are whole or absent, and hold no pickle."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint import folder as folder_of_checkpoints
from checkpoint import store
from checkpoint.folder import Folders, list_checkpoints
from checkpoint.pieces import whole
from checkpoint.run_state import RunState, read_state
from checkpoint.store import Retention
from errors import CheckpointRefused

KEEP = Retention(2)
TENSORS = {"model.a": torch.arange(6.0).view(2, 3), "optim.exp_avg.a": torch.ones(2, 3, dtype=torch.bfloat16)}
STATE = RunState(
    100, 1600, 409600, 99, data={"stdlib": "abc"}, config={"model": {"hidden": 4}}, vocab_size=9, wandb_id="ff00ff00"
)


def save(folder, step, keep=KEEP, **options):
    pieces = {name: whole(tensor) for name, tensor in TENSORS.items()}
    return store.save(folder, pieces, replace(STATE, step=step), keep=keep, **options)


def newest(folder):
    found = folder_of_checkpoints.newest(folder)
    assert found is not None
    return found


def find(resume, folder):
    """The path that a run goes on from."""
    found = folder_of_checkpoints.find(resume, Folders(folder))
    return found and found.path


def test_what_is_saved_is_read_back(tmp_path):
    path = save(tmp_path, 100)
    assert path.name == "step_00000100"
    assert read_state(path) == STATE
    read = store.read_tensors(path)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[n], t) and read[n].dtype == t.dtype for n, t in TENSORS.items())
    assert (tmp_path / "latest").read_text() == "step_00000100\n"


def test_only_safetensors_json_and_the_tokenizer_are_written(tmp_path):
    path = save(tmp_path / "c", 1, files={"tokenizer.model": b"spm"})
    assert (path / "tokenizer.model").read_bytes() == b"spm"
    assert {p.name for p in path.iterdir()} == {
        "tensors.safetensors", "pieces.json", "state.json", "tokenizer.model", "manifest.json",
    }  # fmt: skip
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"step_00000001", "latest"}


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_00000003", "step_00000004"]
    for step in (5, 6, 7):
        save(tmp_path, step, keep=Retention())
    assert len(list_checkpoints(tmp_path)) == 5


def test_what_a_killed_writer_left_is_not_a_checkpoint_and_is_swept(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".step_00000002.77.part").mkdir()
    (tmp_path / ".step_00000002.77.part" / "state.json").write_text("{}")
    assert newest(tmp_path).name == "step_00000001"
    save(tmp_path, 3)
    assert not list(tmp_path.glob(".*.part"))


def test_saving_a_step_again_replaces_what_is_there(tmp_path):
    path = save(tmp_path, 1)
    (path / "tensors.safetensors").write_bytes(b"damaged")
    (tmp_path / "step_00000002").mkdir()
    for step in (1, 2):
        assert store.read_tensors(save(tmp_path, step)).keys() == TENSORS.keys()
    assert not list(tmp_path.glob(".*.part"))


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from checkpoint import container, store
from checkpoint.pieces import whole
calls = 0
rooms = ((container, "write"), *((store, name) for name in ("write_manifest", "sync", "write_whole", "prune")))
for room, name in rooms:
    def wrapped(*args, _real=getattr(room, name), **options):
        global calls
        calls += 1
        if calls == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return _real(*args, **options)
    setattr(room, name, wrapped)
state = store.RunState(2, 0, 0, 0, data={}, config={}, vocab_size=9)
store.save(Path(sys.argv[1]), {"model.a": whole(torch.ones(1000))}, state, keep=store.Retention(1))
"""


@pytest.mark.parametrize("moment", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path, moment):
    save(tmp_path, 1)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(moment)], env=os.environ | {"PYTHONPATH": "."}
    )
    assert done.returncode in (-signal.SIGKILL, 0)
    latest = newest(tmp_path)
    assert read_state(latest).step == int(latest.name[-8:])
    assert store.read_tensors(latest)
    assert latest.name in ("step_00000001", "step_00000002")


def test_resume_finds_a_checkpoint_a_folder_of_them_or_a_run(tmp_path):
    path = save(tmp_path / "run" / "checkpoints", 5)
    new = tmp_path / "new"
    for given in (path, path.parent, path.parent.parent):
        assert find(str(given), new) == path
    assert find("auto", path.parent) == path
    assert find("auto", new) is None
    assert find("none", new) is None


def test_a_run_goes_on_from_its_own_checkpoint_though_it_began_from_another(tmp_path):
    begin, own = save(tmp_path / "a", 5), save(tmp_path / "b", 7)
    assert find(str(begin), own.parent) == own


def test_only_numbered_steps_are_checkpoints_in_the_order_of_their_numbers(tmp_path):
    save(tmp_path, 99_999_999, keep=Retention())
    save(tmp_path, 100_000_000, keep=Retention())
    (tmp_path / "step_best").symlink_to(tmp_path / "step_99999999")
    assert newest(tmp_path).name == "step_100000000"


def test_a_checkpoint_without_its_state_is_passed_over_and_told(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "state.json").unlink()
    found = folder_of_checkpoints.find("auto", Folders(tmp_path))
    assert found is not None and found.state.step == 1
    assert [(each.path.name, each.file.name) for each in found.passed_over] == [("step_00000002", "state.json")]


def test_a_folder_of_checkpoints_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "c").write_text("")
    with pytest.raises(CheckpointRefused, match="must be the folder"):
        find("auto", tmp_path / "c")


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointRefused, match="nothere holds no checkpoint"):
        find(str(tmp_path / "nothere"), tmp_path / "new")


def test_starting_anew_over_a_run_is_refused_and_overwrites_nothing(tmp_path):
    save(tmp_path, 5)
    with pytest.raises(CheckpointRefused, match="already holds step_00000005"):
        find("none", tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"format": 1}', '{"format": 2, "step": 3}', '{"format": 2, "step": "x", "config": []}']
)
def test_a_state_that_cannot_be_read_is_refused(tmp_path, content):
    path = save(tmp_path, 1)
    (path / "state.json").write_text(content)
    with pytest.raises(CheckpointRefused):
        read_state(path)


def test_tensors_that_cannot_be_read_are_refused_with_their_file(tmp_path):
    path = save(tmp_path, 1)
    (path / "tensors.safetensors").write_bytes(b"\x80\x04 a pickle, say")
    with pytest.raises(CheckpointRefused, match=r"tensors\.safetensors"):
        store.read_tensors(path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointRefused, match="cannot write a checkpoint"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_weights_alone_come_under_the_models_own_names(tmp_path):
    path = save(tmp_path, 1)
    weights = store.model_tensors(path, torch.bfloat16)
    assert list(weights) == ["a"] and weights["a"].dtype == torch.bfloat16


def test_the_state_is_plain_json(tmp_path):
    raw = json.loads(Path(save(tmp_path, 1) / "state.json").read_text())
    assert raw["samples"] == 1600 and raw["data"] == {"stdlib": "abc"}
