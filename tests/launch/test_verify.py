"""Proofs of layouts from the command line."""

from dataclasses import replace

import numpy as np
import pytest

from conf.compose import compose
from conf.validate import problems
from launch import verify
from launch.shrink import shrink
from launch.tolerance import TOLERANCES
from launch.trial import Trial, run_trial
from launch.verify import compare, worst
from parallel.layout import layout_of


def trial(**changed):
    tensors = {"a": np.ones((2, 2)), "b": np.zeros(3)}
    return replace(Trial([2.0, 1.0], [1.0, 1.0], [tensors, tensors], tensors, 5.0), **changed)


def test_a_layout_is_proven_at_the_command_line(capsys):
    assert verify.main(["parallel.tp=2", "model.tied_embeddings=true", "--ranks", "2", "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "tp 2, zero 1, fp64" in said and said.count("\n    1 ") == said.count("\n    2 ") == 1
    assert said.rstrip().endswith("the same training")


def test_a_difference_is_a_fault_with_a_name_and_exit_code_1(monkeypatch, capsys):
    real = run_trial

    def broken(config, corpus, world, steps, compared):
        result = real(config, corpus, world, steps, compared)
        if world > 1:
            result.gradients[1]["norm.weight"][3] *= 1.001
        return result

    monkeypatch.setattr(verify, "run_trial", broken)
    assert verify.main(["--ranks", "2", "--steps", "2"]) == 1
    said = capsys.readouterr().out
    assert "FAULT: step 2: the gradient of norm.weight differs" in said and "does NOT compute" in said


@pytest.mark.parametrize(
    "words, wrong",
    [
        (["parallel.tp=3", "--ranks", "2"], "parallel.tp=3"), (["--ranks", "1"], "--ranks 1"),
        (["parallel.ttp=2", "--ranks", "2"], "parallel.ttp"),
        (["model=moe_nano", "model.moe.balance=batch", "--ranks", "2"], "write model.moe.balance=sequence"),
        (["model=moe_nano", "model.moe.capacity_factor=1.5", "--ranks", "2"], "model.moe.capacity_factor=1.5"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(capsys, words, wrong):
    assert verify.main(words) == 2
    assert wrong in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--ranks", "0"], ["--ranks", "2", "--steps", "0"], []])
def test_options_are_checked(words):
    with pytest.raises(SystemExit) as ended:
        verify.main(words)
    assert ended.value.code == 2


OWN_DATA = ["data.sources=[{name: a, prefix: b}]"]
SHRUNK = {
    "405b": (64, ["model=405b", "data.sources=[{name: a, prefix: b}]", "parallel.tp=8",
                  "parallel.pp=8", "train.global_batch=64", "train.seq_len=8192"]),
    "70b interleaved, odd tp": (24, ["model=70b", "data.sources=[{name: a, prefix: b}]",
                                     "parallel.tp=4", "parallel.pp=2", "parallel.vpp=2", "train.global_batch=24",
                                     "train.seq_len=8192", "train.device=cuda", "train.threads=512"]),
    "a window and a table": (2, ["model.window=64", "model.tied_embeddings=true", "model.hidden=768"]),
    "uneven stages": (4, ["parallel.pp=4", "model.layers=10", "parallel.layers_per_stage=[3,3,3,1]",
                          "train.global_batch=32"]),
    "cp and tp": (8, ["parallel.cp=4", "parallel.tp=2", "train.seq_len=4096", "train.global_batch=32"]),
    "cp alone": (3, ["parallel.cp=3", "train.seq_len=6", "train.micro_batch=1"]),
    "mixtral": (16, ["model=mixtral_8x7b", *OWN_DATA, "parallel.ep=8", "parallel.tp=2", "train.global_batch=64"]),
    "qwen3": (64, ["model=qwen3_30b_a3b", *OWN_DATA, "parallel.ep=16", "parallel.cp=2", "parallel.pp=4",
                   "train.seq_len=8192", "train.global_batch=256"]),
    "deepseek": (8, ["model=deepseek_moe_16b", *OWN_DATA, "parallel.ep=4", "parallel.tp=2", "parallel.pp=2",
                     "parallel.vpp=2", "train.global_batch=64"]),
    "groups": (3, ["model=moe_nano", "parallel.ep=3", "model.moe.experts=24", "model.moe.groups=4",
                   "model.moe.groups_chosen=2", "train.global_batch=9"]),
    "many groups, every third block": (2, ["model=moe_nano", "model.layers=12", "model.moe.every=3",
                                           "model.moe.experts=64", "model.moe.groups=8", "model.moe.groups_chosen=4"]),
    "an expert a rank": (2, ["model=moe_nano", "parallel.ep=2", "model.moe.experts=2", "model.moe.top_k=2"]),
    "few micro-batches": (4, ["parallel.pp=2", "parallel.schedule=interleaved_zb", "train.global_batch=16",
                              "train.micro_batch=4"]),
}  # fmt: skip


@pytest.mark.parametrize("world, overrides", SHRUNK.values(), ids=SHRUNK.keys())
def test_a_configuration_made_small_keeps_its_structure_and_can_be_run(world, overrides):
    whole = compose(overrides, world=world, here=False)
    small = shrink(whole, world, 3, "fp64")
    data = "model.vocab_size"  # the trial has a corpus of its own
    assert [p for p in problems(small, world=world, here=False) if p.key != data] == []
    assert layout_of(small.parallel, world) == layout_of(whole.parallel, world)
    a, b = whole.model, small.model
    assert b.heads // b.kv_heads == min(4, a.heads // a.kv_heads)
    assert (a.window is None, a.tied_embeddings, a.bias) == (b.window is None, b.tied_embeddings, b.bias)
    assert (a.hidden > a.heads * (a.head_dim or a.hidden // a.heads)) == (b.hidden > b.heads * (b.head_dim or 0))
    assert_same_kind_of_experts(whole, small)
    assert b.layers <= 18 and b.hidden <= 1024 and small.train.seq_len <= 512


def assert_same_kind_of_experts(whole, small):
    a, b, ep = whole.model.moe, small.model.moe, whole.parallel.ep
    assert (a is None) == (b is None)
    if a is None:
        return
    kept = ("every", "score", "renormalize", "scale", "balance", "aux_coefficient", "z_loss")
    assert [getattr(a, name) for name in kept] == [getattr(b, name) for name in kept]
    assert b.experts % ep == 0 and b.experts >= min(2 * ep, a.experts) and b.experts <= max(24, 2 * ep)
    assert min(a.top_k, 2) <= b.top_k <= 3 and (b.top_k < b.experts) == (a.top_k < a.experts)
    assert (b.groups > 1, b.groups_chosen < b.groups) == (a.groups > 1, a.groups_chosen < a.groups)
    assert (b.shared_ffn > 0, b.first_dense > 0) == (a.shared_ffn > 0, a.first_dense > 0)
    assert any(b.is_sparse(layer) for layer in range(1, small.model.layers)) or a.every > small.model.layers


def test_what_takes_part_in_a_proof_is_named():
    config = compose(["model=moe_nano", "parallel.ep=2", "parallel.cp=2"], world=2, here=False)
    said = list(verify._covered(config, 2))
    assert "sequences shared by 2 ranks (ring)" in said
    assert "16 experts on 2 ranks, 4 for a token, balance bias" in said


def test_a_missing_or_differing_tensor_is_found_by_name():
    one = trial().gradients[0]
    assert worst(one, {"a": one["a"]}).name == "b"
    assert worst(one, one | {"b": np.full(3, 1e-3)}).error == pytest.approx(1e-3 * 3**0.5)
    assert worst(one, one | {"a": np.full((2, 2), np.nan)}).name == "a"
    assert worst(one, one | {"a": np.ones((2, 3))}).name == "a"


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"losses": [2.0, 1.1]}, "step 2: loss"), ({"norms": [1.1, 1.0]}, "step 1: the gradient norm"),
        ({"losses": [2.0, float("nan")]}, "step 2: loss"), ({"val_loss": 5.1}, "the validation loss"),
        ({"parameters": {"a": np.ones((2, 2)), "b": np.ones(3)}}, "after the last step b differs"),
    ],
)  # fmt: skip
def test_each_number_counts(changed, words):
    assert compare(trial(), trial(), TOLERANCES["fp64"]).faults == []
    assert any(words in fault for fault in compare(trial(), trial(**changed), TOLERANCES["fp64"]).faults)
