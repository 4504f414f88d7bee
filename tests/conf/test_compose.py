"""Overrides and YAML files become a Config, or one refusal in words."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.compose import compose
from conf.problem import Problem
from conf.schema import Config
from model.config import MoEConfig

Refusal = Callable[..., str]
Found = Callable[..., list[Problem]]
Folder = Callable[..., Path]

WRONG = [
    # override, part of the rule, part of the fix
    ("lr=1e-3", "unknown key `lr`; did you mean `optim.lr`", "optim.lr=1e-3"),
    ("train.stpes=5", "did you mean `train.steps`", "train.steps=5"),
    ("tran.steps=5", "did you mean `train.steps`", "train.steps=5"),
    ("optim/lr=5", "did you mean `optim.lr`", "optim.lr=5"),
    ("learning_rate=0.1", "did you mean `optim.lr`", "optim.lr=0.1"),
    ("num_layers=4", "did you mean `model.layers`", "model.layers=4"),
    ("tp=2", "did you mean `parallel.tp`", "parallel.tp=2"),
    ("tensor_model_parallel_size=2", "did you mean `parallel.tp`", "parallel.tp=2"),
    ("parallel.scheduel=zbv", "did you mean `parallel.schedule`", "parallel.schedule=zbv"),
    ("parallel.schedule=1f1", "did you mean 1f1b", "parallel.schedule=1f1b"),
    ("parallel.layers_per_stage=4", "a list, each item a whole number", "'parallel.layers_per_stage=[100]'"),
    ("parallel=8", "choices of parallel", "parallel=default"),
    ("train.recompute=ful", "did you mean full", "train.recompute=full"),
    ("modle=8b", "did you mean `model`", "the keys of model"),
    ("qwertz=1", "unknown key `qwertz`", "+extra.NAME=VALUE"),
    ("++qwertz=1", "unknown key `qwertz`", "+extra.NAME=VALUE"),
    ("train.zzzzzz=1", "unknown key `train.zzzzzz`", "train.steps"),
    ("train.steps.more=1", "it has no keys below it", "train.steps="),
    ("model.rope_scaling.fctor=8", "did you mean factor", "original_seq_len"),
    ("model.moe.exprts=8", "did you mean experts", "top_k"),
    ("model.moe=8", "section", "model.moe.experts=16"),
    ("model.moe.balance=biass", "did you mean bias", "model.moe.balance=bias"),
    ("model.experts=8", "did you mean `model.moe.experts`", "model.moe.experts=8"),
    ("num_experts_per_tok=2", "did you mean `model.moe.top_k`", "model.moe.top_k=2"),
    ("context_parallel_size=2", "did you mean `parallel.cp`", "parallel.cp=2"),
    ("expert_model_parallel_size=2", "did you mean `parallel.ep`", "parallel.ep=2"),
    ("ep=2", "did you mean `parallel.ep`", "parallel.ep=2"),
    ("parallel.cp_exchange=allgather", "did you mean all_gather", "parallel.cp_exchange=all_gather"),
    ("model.rope_scaling=3", "section", "model.rope_scaling.factor=8.0"),
    ("data.sources.0.prefx=p", "did you mean prefix", "name, weight, prefix"),
    ("data.sources.1.prefix=p", "fewer items", "data.sources=[{"),
    ("model=9b", "moe_nano, nano, qwen3_30b_a3b, 125m, 350m, 1b, 3b, 8b", "model=nano"),
    ("model=8B", "did you mean 8b", "model=8b"),
    ("model=[8b,9b]", "choices of model", "model="),
    ("model=null", "choices of model", "model=nano"),
    ("precision=fp23", "did you mean fp32", "precision=fp32"),
    ("experiment=quik", "did you mean quick", "experiment=quick"),
    ("train=3", "train is a section", "train.steps=100"),
    ("run=mine", "run is a section", "run.name=TEXT"),
    ("train={stpes: 3}", "did you mean `train.steps`", "train.steps=3"),
    ("+train.steps=3", "only extra takes those", "write train.steps=3"),
    ("+experiment=quick", "takes no +", "write experiment=quick"),
    ("+model=8b", "takes no +", "write model=8b"),
    ("~train.steps", "cannot be deleted", "train.steps=null"),
    ("~optim.eps", "cannot be deleted", "leave it out"),
    ("~model", "needs a choice of model", "model=nano"),
    ("~extra.nothing", "does not exist", "mend"),
    ("hydra.run.dir=x", "Hydra's own settings", "leave it out"),
    ("hydra/launcher=basic", "Hydra's own settings", "leave it out"),
    ("hydra=x", "Hydra's own settings", "leave it out"),
    ("train.steps=1,2", "a sweep", "add -m"),
    ("train.steps=range(1,4)", "a sweep", "add -m"),
    ("model=glob(*)", "a sweep", "add -m"),
    ("train.stpes=1,2", "did you mean", "train.steps"),
    ("train.steps", "key=value", "train.steps=VALUE"),
    ("", "key=value", "KEY=VALUE"),
    ("=3", "key=value", "KEY=VALUE"),
    ("train steps=3", "not a key", "no spaces"),
    ("--train.steps=3", "no dashes", "train.steps=3"),
    ("run.name=ü", "cannot be parsed", "'run.name=\"ü\"'"),
    ("run.name=a=b", "cannot be parsed", "'run.name=\"a=b\"'"),
    ("data.cache='x", "cannot be parsed", "quote"),
    ("train.steps=ten", "a whole number, or null", "train.steps=100"),
    ("train.steps=1e-3", "must be a whole number", "train.steps="),
    ("train.steps=10M", "text was given", "train.steps=10000000"),
    ("train.steps=2.5", "a whole number", "train.steps=100"),
    ("train.steps=true", "a whole number", "train.steps=100"),
    ("train.steps=None", "text was given", "train.steps=null"),
    ("train.steps=", "a whole number", "train.steps=100"),
    ("train.seq_len=null", "a whole number", "train.seq_len=256"),
    ("optim.lr=fast", "a finite number", "optim.lr=0.001"),
    ("optim.lr=nan", "a finite number", "optim.lr=0.001"),
    ("optim.lr=inf", "a finite number", "optim.lr=0.001"),
    ("optim.lr=true", "a finite number", "optim.lr=0.001"),
    ("train.compile=yes", "true or false", "train.compile=true"),
    ("train.compile=0", "true or false", "train.compile=false"),
    ("metrics.wandb=ofline", "did you mean offline", "metrics.wandb=offline"),
    ("metrics.wandb=false", "one of offline, online, disabled", "metrics.wandb="),
    ("metrics.wandb_tags=one", "a list, each item text", "'metrics.wandb_tags=[TEXT]'"),
    ("metrics.wandb_tags=[1]", "must be text", "'1'"),
    ("data.sources=web", "a list, each item a mapping", "'data.sources=[{name"),
    ("data.sources=[{prefix: web}]", "must be given", "name: TEXT"),
    ("data.sources=[{name: web, prefix: p, weigth: 1}]", "unknown key", "validation"),
    ("extra=3", "section of your own notes", "+extra.NAME=3"),
    ("+extra.x=[1,nan]", "finite", "quotes"),
    ("train.steps=${train.stpes}", "leads nowhere", "${train.steps}"),
    ("train.steps=${oc.env:NOT_SET_HERE}", "NOT_SET_HERE is not set", "export NOT_SET_HERE"),
    ("optim.lr=${optim.lr}", "Recursive", "name a key"),
]


@pytest.mark.parametrize(("override", "rule", "fix"), WRONG, ids=[case[0] or "empty" for case in WRONG])
def test_a_wrong_override_is_answered_with_the_rule_and_a_fix(found: Found, override: str, rule: str, fix: str) -> None:
    (problem,) = found(override)
    assert rule in problem.rule
    assert fix in problem.fix


def test_the_value_is_shown(refusal: Refusal) -> None:
    assert "train.steps=ten\n" in refusal("train.steps=ten")


def test_all_mistakes_of_a_command_line_are_reported_at_once(refusal: Refusal) -> None:
    text = refusal("lr=3", "model=9b", "train.steps=ten", "optim.beta1=2", "x y=3", "train.micro_batch=5")
    assert "6 problems" in text
    for part in ("`lr`", "model=9b", "train.steps=ten", "optim.beta1=2", "x y=3", "train.micro_batch=5"):
        assert part in text


def test_a_refused_value_brings_no_verdict_from_the_rules_that_would_read_it(found: Found) -> None:
    assert [each.key for each in found("train.micro_batch=x", "train.global_batch=7")] == ["train.micro_batch"]


def test_composing_writes_nothing_changes_no_logging_and_stays_in_its_folder(somewhere_empty: Path) -> None:
    before = (logging.getLogger().handlers[:], logging.getLogger().level, Path.cwd())
    compose(["experiment=quick", "model=125m"])
    assert list(somewhere_empty.iterdir()) == []
    assert (logging.getLogger().handlers[:], logging.getLogger().level, Path.cwd()) == before


def test_nothing_given_gives_the_repositorys_defaults() -> None:
    config = compose([])
    assert (config.model.name, config.data.sources[0].corpus, config.train.steps) == ("nano", "stdlib", 200)


def test_keys_groups_dicts_lists_and_notes_can_be_set() -> None:
    config = compose(
        ["model=8b", "train={steps: 90, seq_len: 512}", "++optim.lr=1", "metrics.wandb_tags=[a,b]",
         "+extra.note=hi", "extra.deep={a: [1, {b: null}]}", "data=indexed",
         "data.sources=[{name: web, prefix: p}]", "data.sources.0.prefix=q", "model.rope_scaling.factor=4"]
    )  # fmt: skip
    assert (config.model.layers, config.train.steps, config.train.seq_len, config.optim.lr) == (
        32,
        90,
        512,
        1.0,
    )
    assert isinstance(config.optim.lr, float)
    assert config.metrics.wandb_tags == ("a", "b")
    assert config.extra == {"note": "hi", "deep": {"a": [1, {"b": None}]}}
    assert (config.data.sources[0].name, config.data.sources[0].prefix) == ("web", "q")
    assert config.model.rope_scaling is not None and config.model.rope_scaling.factor == 4.0


def test_one_key_of_the_experts_makes_a_dense_model_sparse_and_null_a_sparse_one_dense() -> None:
    assert compose(["model.moe.experts=8"]).model.moe == MoEConfig(experts=8)
    sparse = compose(["model=moe_nano", "model.moe.experts=8"]).model
    assert sparse.moe is not None and (sparse.moe.experts, sparse.moe.score) == (8, "sigmoid")
    assert compose(["model=moe_nano", "model.moe=null"]).model.moe is None


def test_a_text_key_keeps_the_characters_that_were_typed() -> None:
    assert [compose([f"run.name={text}"]).run.name for text in ("1e3", "true", "1_0")] == [
        "1e3",
        "true",
        "1_0",
    ]


def test_interpolations_reach_keys_that_only_have_a_default() -> None:
    assert compose(["train.micro_batch=${train.global_batch}"]).train.micro_batch == Config().train.global_batch


def test_the_last_choice_of_a_group_counts_removal_included() -> None:
    cases = [
        (["experiment=quick", "experiment=null"], 200),
        (["experiment=null", "experiment=quick"], 20),
        (["experiment=quick", "~experiment"], 200),
        (["~experiment", "experiment=quick"], 20),
    ]
    assert [compose(overrides).train.steps for overrides, _ in cases] == [steps for _, steps in cases]


def test_a_package_directive_puts_a_choice_elsewhere() -> None:
    assert compose(["+model@extra.teacher=8b"]).extra["teacher"]["layers"] == 32


def test_tokens_alone_replace_the_steps_of_config_yaml() -> None:
    train = compose(["train.tokens=1000000"]).train
    assert (train.steps, train.tokens) == (None, 1000000)


def test_steps_and_tokens_together_on_one_command_line_are_refused(found: Found) -> None:
    (problem,) = found("train.tokens=1000000", "train.steps=100")
    assert "exactly one" in problem.rule


def test_a_command_line_replaces_an_experiments_tokens_by_steps(folder: Folder) -> None:
    mine = folder(experiment__long="# @package _global_\ntrain:\n  tokens: 1_000_000\n")
    assert compose(["experiment=long"], str(mine)).train.tokens == 1000000
    assert compose(["experiment=long", "train.steps=70"], str(mine)).train == compose(["train.steps=70"]).train


def test_an_experiment_overrides_config_yaml_and_chooses_groups(folder: Folder) -> None:
    head = "# @package _global_\ndefaults:\n  - override /model: 350m\n"
    mine = folder(experiment__b=head + "train: {steps: 77}\noptim: {lr: 1e-4}\n")
    config = compose(["experiment=b"], str(mine))
    assert (config.model.layers, config.train.steps, config.optim.lr) == (24, 77, 1e-4)


def test_a_group_of_the_users_own_is_added_with_a_plus(folder: Folder, refusal: Refusal) -> None:
    mine = folder(team__us="# @package _global_\ntrain: {steps: 66}\n")
    assert compose(["+team=us"], str(mine)).train.steps == 66
    assert "write +team=us" in refusal("team=us", config_dir=mine)


FILES = [
    # name, text, parts of the message
    ("model__m", "hiden: 8\n", ["model.hiden=8", "m.yaml", "did you mean `model.hidden`"]),
    ("model__m", "hidden: eight\n", ["model.hidden=eight", "m.yaml", "whole number"]),
    ("model__m", "hidden: 2.5\n", ["model.hidden=2.5", "a whole number"]),
    ("model__m", "bias: 'no'\n", ["model.bias=no", "model.bias=false"]),
    ("model__m", "hidden: 8\n  heads: [\n", ["m.yaml", "unreadable YAML at line 2"]),
    ("model__m", "hidden: 8\nhidden: 9\n", ["m.yaml", "duplicate key hidden"]),
    ("model__m", "- a\n- b\n", ["m.yaml", "no mapping"]),
    ("model__m", "hidden: ${\n", ["m.yaml", "unreadable YAML"]),
    ("model__m", "hidden: ${modell.layers}\n", ["leads nowhere", "m.yaml", "${model.layers}"]),
    ("model__m", "hidden: ${oc.env:NOT_SET_HERE}\n", ["NOT_SET_HERE is not set", "m.yaml"]),
    ("model__m", "head_dim: ???\n", ["model.head_dim=???", "must be given"]),
    ("model__m", "model: {hidden: 8}\n", ["remove the outer `model:`", "m.yaml"]),
    ("model__m", "rope_scaling: {factor: x}\n", ["model.rope_scaling.factor=x", "m.yaml"]),
    ("model__m", "hidden: 6\n", ["model.hidden=6", "even multiple of model.heads=4", "m.yaml"]),
    ("experiment__m", "train: {steps: 60}\n", ["# @package _global_", "m.yaml"]),
    ("experiment__m", "# @package _global_\nhydra: {run: {dir: x}}\n", ["Hydra's own settings", "m.yaml"]),
    ("experiment__m", "# @package _global_\noptim:\n", ["optim=null", "section", "m.yaml"]),
    ("experiment__m", "# @package _global_\ndefaults:\n  - override /model: 9b\n", ["model/9b", "nano"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "parts"), FILES, ids=[repr(case[1]) for case in FILES])
def test_a_wrong_file_is_answered_with_its_name_the_rule_and_a_fix(
    folder: Folder, refusal: Refusal, name: str, text: str, parts: list[str]
) -> None:
    message = refusal(f"{name.split('__')[0]}=m", config_dir=folder(**{name: text}))
    assert "1 problem." in message
    for part in parts:
        assert part in message


def test_mistakes_of_files_and_overrides_are_reported_together(folder: Folder, refusal: Refusal) -> None:
    mine = folder(model__m="hiden: 8\n", model__bad="a: [\n")
    text = refusal("model=m", "lr=3", "train.steps=x", config_dir=mine)
    assert all(part in text for part in ("model.hiden", "`lr`", "train.steps=x"))
    text = refusal("model=bad", "lr=3", "train.steps=x", config_dir=mine)
    assert all(part in text for part in ("bad.yaml", "`lr`", "train.steps=x"))


def test_a_folder_that_is_not_there_is_refused_beside_the_other_mistakes(refusal: Refusal, tmp_path: Path) -> None:
    text = refusal("lr=3", config_dir=tmp_path / "nowhere")
    assert "does not exist" in text and "`lr`" in text


def test_a_file_that_the_repositorys_own_would_hide_is_refused(folder: Folder, refusal: Refusal) -> None:
    assert "rename the file" in refusal(config_dir=folder(model__nano="hidden: 512\n"))


def test_a_file_ending_in_yml_is_refused_because_it_would_not_be_read(folder: Folder, refusal: Refusal) -> None:
    mine = folder(model__m="hidden: 512\n")
    (mine / "model" / "m.yaml").rename(mine / "model" / "m.yml")
    assert "rename it to m.yaml" in refusal(config_dir=mine)
