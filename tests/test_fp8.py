"""Runs in FP8 as users start them: records, resumes, what stays in bf16."""

import json

import pytest
import torch

import train
from checkpoint.store import read_tensors
from tests.conftest import losses, records
from tests.test_train import run_of

EXPERTS = "model.moe={experts: 4, top_k: 2, ffn: 16, score: sigmoid}"
RECIPES = ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8")


@pytest.mark.parametrize("recipe", ["fp8_delayed", *(pytest.param(r, marks=pytest.mark.soak) for r in RECIPES[1:])])
def test_a_run_records_how_fp8_fares_and_goes_on_bit_for_bit(tiny, recipe):
    tiny = [*tiny, f"precision={recipe}", EXPERTS, "precision.fp8.health_every=5", "train.recompute=full"]
    history = ["precision.fp8.history=4"] if recipe == "fp8_delayed" else []
    tiny = [*(o for o in tiny if not o.startswith("precision.matmul")), *history]
    assert train.main([*tiny, "run.name=whole"]) == 0
    assert train.main([*tiny, "train.stop_at=7"]) == 0
    assert train.main(tiny) == 0
    assert losses(run_of(tiny)) == losses(run_of(tiny, "whole"))
    steps = {r["step"]: r["fp8"] for r in records(run_of(tiny)) if "fp8" in r}
    assert sorted(steps) == [5, 7, 10, 15, 20]
    names = [f"layers.{n}.{part}" for n in (0, 1) for part in
             ("attention.out.weight", "attention.qkv.weight", "mlp.experts.down", "mlp.experts.gate_up")]  # fmt: skip
    assert list(steps[20]["linears"]) == names
    for kinds in steps[20]["linears"].values():
        for kind, largest in (("x", 448.0), ("w", 448.0), ("g", 57344.0 if "block" not in recipe else 448.0)):
            own = kinds[kind]
            assert own["amax"] > 0 and 0 < own["error"] < 0.08 and own["saturated"] < 0.01
            assert own["underflow"] < 0.2
            if recipe == "fp8_current":
                assert own["amax"] * own["scale"] == pytest.approx(largest, rel=1e-5)
    assert json.loads((run_of(tiny) / "status.json").read_text())["state"] == "done"


def test_the_first_micro_batch_of_delayed_scaling_loses_no_gradients(tiny):
    """With scales of 1 a third of them would vanish here, nearly all in a run of usual size."""
    tiny = [o for o in tiny if not o.startswith("precision.matmul")]
    usual = ["precision=fp8_delayed", "precision.fp8.health_every=1", "metrics.every=1", "train.stop_at=2"]
    assert train.main([*tiny, *usual]) == 0
    first = next(r for r in records(run_of(tiny)) if "fp8" in r)["fp8"]
    assert first["error"] < 0.08 and first["saturated"] < 1e-3
    assert all(each["g"]["underflow"] < 0.05 for each in first["linears"].values())


HISTORY = ["precision=fp8_delayed", "precision.fp8.history=8"]
CHANGES = [
    (["precision=bf16"], ["precision=fp8_delayed"], "precision.name"),
    (["precision=fp8_delayed"], ["precision=bf16"], "precision.name"),
    (["precision=fp16"], ["precision=fp8_current"], "precision.name"),
    (["precision=fp8_delayed"], ["precision=fp16"], "precision.name"),
    (HISTORY, [*HISTORY[:1], "precision.fp8.history=4"], "precision.fp8.history"),
    (HISTORY, [*HISTORY, "precision.fp8.first_bf16=1"], "precision.fp8.first_bf16"),
]


def kept(run, step):
    return read_tensors(run / "checkpoints" / f"step_{step:08d}")


@pytest.mark.parametrize("before, after, key", CHANGES)
def test_a_run_goes_on_in_another_precision_whose_scales_begin_anew(tiny, capsys, before, after, key):
    tiny = [o for o in tiny if not o.startswith("precision.matmul")]
    assert train.main([*tiny, *before, "train.stop_at=3"]) == 0
    assert train.main([*tiny, *after]) == 2
    assert f"checkpoint.allow=[{key}]" in capsys.readouterr().err
    still = ["optim.lr=1e-30", "optim.weight_decay=0", f"checkpoint.allow=[{key},optim.lr,optim.weight_decay]"]
    assert train.main([*tiny, *after, "train.stop_at=5", *still]) == 0
    assert f"scales begin anew, if there are any: {key}: " in capsys.readouterr().out
    old, new = kept(run_of(tiny), 3), kept(run_of(tiny), 5)
    weights = [name for name in old if name.startswith("model.")]
    assert weights and all(torch.equal(old[name], new[name]) for name in weights)
    squares = [name for name in old if name.startswith("optim.exp_avg_sq.")]  # they only lose by beta2 a step
    assert squares and all((new[name] >= 0.95**2 * old[name] * (1 - 1e-5)).all() for name in squares)


def test_a_loss_scale_goes_on_though_its_settings_change(tiny):
    tiny = [*(o for o in tiny if not o.startswith("precision.matmul")), "precision=fp16"]
    grown = [*tiny, "precision.fp16.initial=1024", "precision.fp16.growth_interval=1"]
    assert train.main([*grown, "train.stop_at=3"]) == 0
    slow = [*grown[:-1], "precision.fp16.growth_interval=100", "checkpoint.allow=[precision.fp16.growth_interval]"]
    assert train.main([*slow, "train.stop_at=5"]) == 0
    scales = {r["step"]: r["loss_scale"] for r in records(run_of(tiny)) if "loss_scale" in r and "event" not in r}
    assert [scales[step] for step in (1, 2, 3, 4, 5)] == [1024.0, 2048.0, 4096.0, 8192.0, 8192.0]


def test_what_is_to_stay_in_bf16_does(tiny):
    tiny = [o for o in tiny if not o.startswith("precision.matmul")]
    tiny += ["precision=fp8_current", "precision.fp8.health_every=1", "train.stop_at=1"]
    for number, (settings, names) in enumerate(
        (
            (["precision.fp8.first_bf16=1"], ["layers.1.attention.out.weight", "layers.1.attention.qkv.weight",
              "layers.1.mlp.down.weight", "layers.1.mlp.gate.weight", "layers.1.mlp.up.weight"]),
            (["precision.fp8.last_bf16=1", "precision.fp8.attention=false"],
             ["layers.0.mlp.down.weight", "layers.0.mlp.gate.weight", "layers.0.mlp.up.weight"]),
        )
    ):  # fmt: skip
        assert train.main([*tiny, *settings, f"run.name=r{number}"]) == 0
        (record,) = [r for r in records(run_of(tiny, f"r{number}")) if "fp8" in r]
        assert list(record["fp8"]["linears"]) == names


NOTHING = "precision.fp8.first_bf16"
IDLE = [
    (["precision=bf16", "precision.fp8.margin=1"], "precision.fp8.margin"),
    (["precision=fp8_current", "precision.fp8.history=16"], "precision.fp8.history"),
    (["precision=mxfp8", "precision.fp8.format=e4m3"], "precision.fp8.format"),
    (["precision=bf16", "precision.fp16.least=2"], "precision.fp16.least"),
    (["precision=fp16", "precision.fp16.initial=1000"], "precision.fp16.initial"),
    (["precision=fp16", "precision.fp16.initial=2", "precision.fp16.least=4"], "precision.fp16.least"),
    (["precision=fp8_block", "precision.fp8.first_bf16=1", "precision.fp8.last_bf16=1"], NOTHING),
    (["precision=fp8_block", "precision.fp8.last_bf16=2"], "precision.fp8.last_bf16=2"),
    (["precision=fp8_block", "precision.fp8.experts=false"], "precision.fp8.experts"),
    (["precision=fp16", "precision.fp16.initial=3.402823669209385e38"], "at most 1099511627776"),
    (["precision=fp16", "precision.fp16.growth_interval=100000000000000000000"], "precision.fp16.growth_interval"),
    (["precision=fp16", "precision.fp16.least=7e-46"], "precision.fp16.least"),
    (["precision=fp8_block", "precision.fp8.attention=false", "precision.fp8.mlp=false"], "precision.fp8.attention"),
    (["precision=fp8_delayed", "precision.matmul=high"], "precision.matmul"),
    (["precision=fp8_block", "train.compile=true"], "train.compile"),
]


@pytest.mark.parametrize("settings, key", IDLE, ids=[" ".join(case[0]) for case in IDLE])
def test_settings_that_nothing_would_read_are_refused(tiny, capsys, settings, key):
    tiny = [o for o in tiny if not o.startswith("precision.matmul")]
    assert train.main([*tiny, *settings]) == 2
    said = capsys.readouterr().err
    assert key in said and "fix:" in said
