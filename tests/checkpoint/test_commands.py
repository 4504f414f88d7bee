"""What people ask about a checkpoint, and take from it: checkpoint.inspect and checkpoint.export."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from checkpoint import export, inspect, store
from checkpoint.manifest import verify
from checkpoint.pieces import whole
from checkpoint.run_state import RunState
from checkpoint.store import Retention

STATE = RunState(
    300, 4800, 1_228_800, 299, data={"stdlib": "abc"}, vocab_size=9, layout="pp 2, tp 2", tokenizer="bytes",
    config={"model": {"name": "nano"}, "precision": {"name": "bf16"}},
)  # fmt: skip
WEIGHT = torch.arange(12.0).view(3, 4) / 7
TENSORS = {
    "model.layers.0.mlp.up.weight": WEIGHT, "optim.exp_avg.layers.0.mlp.up.weight": torch.ones(3, 4),
    "model.embedding.weight": torch.ones(9, 4),
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A run's folder with two checkpoints."""
    for step in (200, 300):
        pieces = {name: whole(tensor) for name, tensor in TENSORS.items()}
        state = RunState(**{**STATE.__dict__, "step": step})
        store.save(tmp_path / "mine" / "checkpoints", pieces, state, keep=Retention(2))
    return tmp_path / "mine"


def test_a_checkpoint_is_described(run, capsys):
    assert inspect.main([str(run)]) == 0
    said = capsys.readouterr().out
    for words in (
        "step_00000300", "step 300 (299 updates), 4,800 samples, 1,228,800 tokens", "model nano, precision bf16",
        "written by: pp 2, tp 2", "torch 2.13", "tensors.safetensors", "model.layers", "optim.exp_avg",
        "48 elements", "older: step_00000200",
    ):  # fmt: skip
        assert words in said, words
    assert inspect.main([str(run), "--tensors"]) == 0
    assert "model.embedding.weight" in capsys.readouterr().out


def test_every_byte_is_verified_and_the_damaged_file_named(run, capsys):
    assert inspect.main([str(run), "--verify"]) == 0
    assert capsys.readouterr().out.count("sound") == 2
    file = run / "checkpoints" / "step_00000200" / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    assert inspect.main([str(run), "--verify"]) == 3
    told = capsys.readouterr()
    assert "step_00000300: sound" in told.out and "step_00000200: tensors.safetensors" in told.err
    assert inspect.main([str(file.parent.parent / "step_00000300"), "--verify"]) == 0


def test_a_checkpoint_that_is_pruned_while_it_is_read_is_no_damage(run, capsys, monkeypatch):
    def prune(path):
        if path.name == "step_00000200":
            shutil.rmtree(path)
        return verify(path)

    monkeypatch.setattr("checkpoint.inspect.verify", prune)
    assert inspect.main([str(run), "--verify"]) == 0
    told = capsys.readouterr().out
    assert "step_00000200: removed while it was read" in told and "step_00000300: sound" in told


@pytest.mark.parametrize("command", [inspect.main, lambda argv: export.main([*argv, "--to", "torch"])])
def test_what_is_no_checkpoint_is_refused(tmp_path, capsys, command):
    assert command([str(tmp_path)]) == 3
    assert "holds no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_weights_are_exported_under_the_models_own_names(run, tmp_path, capsys, kind):
    out = tmp_path / "weights"
    assert export.main([str(run), "--to", kind, "--out", str(out)]) == 0
    read = load_file(out) if kind == "safetensors" else torch.load(out, weights_only=True)
    assert set(read) == {"layers.0.mlp.up.weight", "embedding.weight"}
    assert torch.equal(read["layers.0.mlp.up.weight"], WEIGHT)
    assert "48 weights of step 300" in capsys.readouterr().out
    assert export.main([str(run), "--to", kind, "--out", str(out)]) == 3
    assert "--overwrite" in capsys.readouterr().err
    assert export.main([str(run), "--to", kind, "--out", str(out), "--overwrite", "--dtype", "bf16"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "weights"}


def test_a_file_that_cannot_be_written_and_damage_are_refused(run, tmp_path, capsys):
    assert export.main([str(run), "--to", "torch", "--out", str(tmp_path / "none" / "w.pt")]) == 3
    assert "cannot write" in capsys.readouterr().err
    path = run / "checkpoints" / "step_00000300"
    shutil.copyfile(path / "pieces.json", path / "tensors.safetensors")
    assert export.main([str(run), "--to", "torch", "--out", str(tmp_path / "w.pt")]) == 3
    assert "is damaged: tensors.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "w.pt").exists()
