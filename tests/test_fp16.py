"""Whole runs in fp16: how they find their loss scale, live through overflows, and go on after a stop."""

import json
import math

import pytest
import torch

import train
from checkpoint.folder import locate
from checkpoint.tensors import read_whole
from optim.updater import Updater
from parallel.gradients import finish_gradients
from tests.conftest import losses, records, validations
from tests.test_layouts_end_to_end import torchrun
from tests.test_train import run_of

FP16 = ["precision=fp16", "precision.matmul=auto"]
EXPERTS = "model.moe={experts: 4, top_k: 2, ffn: 24, balance: sequence, aux_coefficient: 1e-2, z_loss: 1e-3}"


def scales(run):
    """Loss scale by step, of the last time each step was made."""
    return {r["step"]: r["loss_scale"] for r in records(run) if "event" not in r}


def skips(run):
    return [(r["step"], r["loss_scale"]) for r in records(run) if r.get("event") == "skip"]


@pytest.fixture
def broken_at_six(monkeypatch):
    """The gradients of the sixth step overflow; gives which steps changed a weight or a moment."""
    step, done, changed = Updater.step, [0], []

    def finish_badly(shards, *rest):
        done[0] += 1
        finish_gradients(shards, *rest)
        if done[0] == 6:
            shards[3].gradient.view(-1)[5] = math.inf

    def watched(self, lr, watch=None):
        before = [t.clone() for _, t, _ in self.tensors()] + [s.local.clone() for s in self.shards]
        outcome = step(self, lr, watch)
        after = [t for _, t, _ in self.tensors()] + [s.local for s in self.shards]
        if not all(map(torch.equal, before, after)):
            changed.append(done[0])
        return outcome

    monkeypatch.setattr("engine.finish_gradients", finish_badly)
    monkeypatch.setattr(Updater, "step", watched)
    return changed


def test_an_overflow_costs_its_step_alone_and_the_scale_comes_back(tiny, broken_at_six, capsys):
    assert train.main([*tiny, *FP16, "precision.fp16.growth_interval=8", "train.steps=20", "train.max_skips=1"]) == 0
    run = run_of(tiny)
    assert broken_at_six == [step for step in range(1, 21) if step != 6]
    assert skips(run) == [(6, 32768.0)]
    assert "step 6 changed nothing: its gradients are not finite; the loss scale is lowered" in capsys.readouterr().out
    # Good steps: five before the overflow, of which nothing is left, and fourteen after it.
    assert scales(run) == {n: 65536.0 if n <= 6 or n > 14 else 32768.0 for n in range(1, 21)}
    assert [r["skipped"] for r in records(run) if "event" not in r][-1] == 1


def test_an_initial_scale_beyond_all_measure_comes_down_and_the_run_learns(tiny):
    options = [*FP16, "precision.fp16.initial=1073741824", "train.steps=60", "train.max_skips=2", "optim.lr=1e-2"]
    assert train.main([*tiny, *options]) == 0
    run = run_of(tiny)
    norms = [norm for _, norm in losses(run).values()]
    search = next(n for n, norm in enumerate(norms) if norm is not None)
    assert skips(run)[:search] == [(n, 2.0 ** (30 - n)) for n in range(1, search + 1)] and 3 <= search < 16
    assert len(skips(run)) <= search + 5 and scales(run)[60] >= 2.0**12
    assert all(norm is None or 0 < norm < 20 for norm in norms[search:])
    assert validations(run)[60] < 0.7 * validations(run)[7] < 0.75 * math.log(96)


def test_where_nothing_is_left_to_lower_skips_end_the_run(tiny, capsys):
    """A learning rate beyond all measure, as in other precisions: the halvings first, then train.max_skips."""
    options = ["optim.lr=1e38", "lr_schedule.warmup=0", "train.max_skips=3", "precision.fp16.initial=16"]
    assert train.main([*tiny, *FP16, *options, "precision.fp16.least=4", "checkpoint.every=1"]) == 4
    assert "3 steps in a row had gradients that are not finite" in capsys.readouterr().err
    run = run_of(tiny)
    first = skips(run)[0][0]
    assert skips(run) == [(first, 8.0), *((first + n, 4.0) for n in range(1, 5))]
    assert json.loads((run / "status.json").read_text())["state"] == "diverged"
    saved = [r["step"] for r in records(run) if r.get("event") == "checkpoint"]
    assert max(saved) < first, "weights that may be past saving have made room for themselves"


def kept(run):
    return read_whole(locate(run), "", None)


@pytest.mark.parametrize("model", [[], [EXPERTS]], ids=["dense", "experts"])
def test_a_stopped_run_goes_on_bitwise_with_its_scale_and_its_count(tiny, model):
    options = [*tiny, *FP16, *model, "precision.fp16.initial=268435456", "precision.fp16.growth_interval=3"]
    assert train.main([*options, "run.name=whole"]) == 0
    for stop_at in (2, 3, 10, 14, 20):
        assert train.main([*options, f"train.stop_at={stop_at}"]) == 0
    run, whole = run_of(tiny), run_of(tiny, "whole")
    assert losses(run) == losses(whole) and scales(run) == scales(whole)
    assert validations(run).items() >= validations(whole).items()
    assert skips(run) == skips(whole) and len(set(scales(run).values())) > 3
    ours, wanted = kept(run), kept(whole)
    assert ours.keys() == wanted.keys() and all(torch.equal(ours[name], wanted[name]) for name in ours)
    assert {"optim.loss_scale", "optim.loss_scale_good"} <= ours.keys()
    dtypes = {tensor.dtype for name, tensor in ours.items() if name != "health.window"}
    assert dtypes == {torch.float32}, "masters are not fp16"


@pytest.mark.soak
def test_a_run_goes_on_in_another_layout_with_its_scale(tiny):
    """From one process to four and back, the scale small enough that none overflows; it grows on where it was."""
    wide = [o for o in tiny if "micro_batch" not in o]
    wide += ["model.layers=4", "model.heads=4", "model.kv_heads=2", "train.global_batch=16", *FP16]
    wide += ["precision.fp16.initial=16", "precision.fp16.growth_interval=6"]
    assert train.main([*wide, "train.stop_at=5"]) == 0
    done = torchrun(4, *wide, "parallel.tp=2", "parallel.pp=2", "train.stop_at=10")
    assert done.returncode == 0, done.stderr
    assert train.main(wide) == 0
    assert scales(run_of(tiny)) == {n: 16.0 * 2 ** ((n - 1) // 6) for n in range(1, 21)}
    assert kept(run_of(tiny))["optim.loss_scale_good"] == 2


def test_only_fp16_has_a_scale(tiny):
    for options in (["run.name=fp16", *FP16], ["run.name=fp32"]):
        assert train.main([*tiny, *options]) == 0
    half, full = run_of(tiny, "fp16"), run_of(tiny, "fp32")
    assert not any("loss_scale" in r for r in records(full)) and not any("scale" in name for name in kept(full))
    wanted = losses(full)
    for step, (loss, norm) in losses(half).items():
        assert loss == pytest.approx(wanted[step][0], rel=1e-3)
        assert norm == pytest.approx(wanted[step][1], rel=2e-2)
